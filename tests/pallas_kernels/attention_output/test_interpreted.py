"""The fused output projection in Triton's interpreter, its inline assembly in the PTX emulator."""

from pathlib import Path

import interpreter


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))
