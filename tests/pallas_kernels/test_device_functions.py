"""Device functions that kernels share, in Triton's interpreter."""

from pathlib import Path

import interpreter


def test_interpreted_device_functions():
    interpreter.run(Path(__file__).with_name("interpreted_device_checks.py"))
