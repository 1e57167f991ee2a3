"""Fixtures that several rooms use, and what depends on the golden data at hand (tests/support/golden.py)."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import golden
import pytest

# These compare whole models; the committed cut holds single layers and the drafter only.
WHOLE_MODEL_TESTS = (
    "golden/test_end_to_end.py", "fidelity/test_golden_logits.py", "fidelity/test_golden_drafts.py"
)  # fmt: skip
collect_ignore = [] if golden.complete_folder() else list(WHOLE_MODEL_TESTS)
# Linux gives a process 65,530 memory mappings, and every compiled program that is still known keeps three. A worker
# that runs most of the tests gets there; XLA then aborts in the middle of a compilation.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 30_000


def pytest_report_header() -> str:
    return f"golden data: {golden.description()}"


@pytest.fixture(autouse=True, scope="module")
def programs_are_forgotten() -> Iterator[None]:
    """Behind a module, if the process has come to hold many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax  # first imported by the tests, some of which say beforehand what devices there are

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """`golden_checkpoint("v4-tiny")`: the folder of a checkpoint that golden data were computed with.

    Where only the cut is at hand, it is a checkpoint of the same shapes in which some tensors are zero.
    """
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = golden.checkpoint(name, tmp_path_factory.mktemp("golden"))
        return made[name]

    return folder
