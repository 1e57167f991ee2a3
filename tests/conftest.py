"""Fixtures that several rooms use."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def golden_checkpoint() -> Callable[[str], Path]:
    """`golden_checkpoint("v4-tiny")`: the folder of a checkpoint that golden data were computed with."""

    def folder(name: str) -> Path:
        path = GOLDEN / name
        if not (path / "config.json").is_file():
            pytest.fail(f"no golden checkpoint at {path}: expected config.json and weights there")
        return path

    return folder
