"""Tile choices that were measured on a GPU, read from `<operation>/tuning/<gpu>.json`.

Knows: the files, which GPU a program is made for, and what stands in for choices that nobody measured. Does not know:
what a choice means, or how it was found (`v4flash kernels tune`).

A file holds one choice by variant or shape. A GPU without a file, or a file without that name, takes the H200's choice;
a name that it has not either takes what the operation's code says for shapes never tuned.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pallas_kernels import launch

Choice = Mapping[str, int]
GPUS = {90: "h200", 103: "gb300"}  # by compute capability
ROOT = Path(__file__).parent
_MEASURED = "h200"
_tried: contextvars.ContextVar[tuple[str, str, Choice] | None] = contextvars.ContextVar("tried", default=None)


def gpu() -> str:
    """Name of the GPU that kernels traced now compile for; the H200's where there is none."""
    return GPUS.get(launch.capability(), _MEASURED)


def file(operation: str, gpu: str, root: Path = ROOT) -> Path:
    """The file of an operation's choices on one GPU, below the folder of all operations."""
    return root / operation / "tuning" / f"{gpu}.json"


def tiles(operation: str) -> dict[str, Choice]:
    """Recorded choices of an operation (its folder in pallas_kernels) by name, for the GPU of `gpu`."""
    found = recorded(operation, _MEASURED) | recorded(operation, gpu())
    tried = _tried.get()
    if tried and tried[0] == operation:
        found[tried[1]] = {**found.get(tried[1], {}), **tried[2]}
    return found


def choice(operation: str, name: str, otherwise: Choice) -> Choice:
    """The recorded choice of this name; `otherwise` says what it leaves open, or all where it was never tuned."""
    return {**otherwise, **tiles(operation).get(name, {})}


def by_shape(*sizes: int, what: str = "") -> str:
    """A name of choices that hold for one shape: '4096x2048', or 'down 4096x2048' where several products have it."""
    return " ".join(filter(None, (what, "x".join(map(str, sizes)))))


@functools.cache
def recorded(operation: str, gpu: str) -> dict[str, Choice]:
    """What one GPU's file says, {} without one."""
    path = file(operation, gpu)
    return json.loads(path.read_text()) if path.is_file() else {}


@contextlib.contextmanager
def trying(operation: str, name: str, choice: Choice) -> Iterator[None]:
    """Kernels traced inside take this choice; what it leaves open is as recorded."""
    token = _tried.set((operation, name, choice))
    try:
        yield
    finally:
        _tried.reset(token)
