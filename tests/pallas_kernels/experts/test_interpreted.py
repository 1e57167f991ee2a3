"""The fused expert launches in Triton's interpreter, their inline assembly in the PTX emulator."""

from pathlib import Path

import interpreter


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))
