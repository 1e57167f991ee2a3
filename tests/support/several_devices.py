"""Scripts of this folder in processes that have several devices: the processor pretends to be so many."""

import json
import os
import subprocess
import sys
from typing import Any

# Where nothing is worth optimising, programs compile several times faster.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def apart(script: str, devices: int, *arguments: str, **settings: str) -> Any:
    """The JSON that a script prints; `settings` of JAX, in its environment."""
    settings |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    settings |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, script, *arguments], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
