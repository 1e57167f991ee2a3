"""Runs checks of Triton kernels in a process of their own, where Triton interprets kernels instead of compiling."""

import os
import subprocess
import sys
from pathlib import Path


def run(checks: Path) -> None:
    """Runs a file of pytest checks with TRITON_INTERPRET=1; fails with its output. Triton reads this once, at import.

    Such a file is named so that pytest does not collect it by itself (not test_*.py).
    """
    here, paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "quick_interpreter",
            str(checks),
        ],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, [here, paths])),
        },
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-8000:] + made.stderr[-2000:]
