"""Tile choices that were measured on one GPU, read from `<operation>/tuning/<gpu>.json`."""

import functools
import json
from pathlib import Path


@functools.cache
def tiles(operation: str, gpu: str = "h200") -> dict[str, dict[str, int]]:
    """Tile choices of an operation's variants, by name. `operation` is its folder in pallas_kernels."""
    return json.loads((Path(__file__).parent / operation / "tuning" / f"{gpu}.json").read_text())
