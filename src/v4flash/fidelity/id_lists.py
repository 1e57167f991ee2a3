"""Lists of token ids from JSON, and arrays to safetensors under one naming rule.

Knows: the input's two shapes, the vocabulary's limits, and that several lists give numbered arrays. Does not
know: what is computed from them.

    [1, 2, 3]            one list: arrays are called `logits`, ...
    [[1, 2], [3, 4, 5]]  several: `logits.0`, `logits.1`, ...
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from v4flash.checkpoint.safetensors_file import write_safetensors
from v4flash.errors import UsageError, V4FlashError

_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}


@dataclasses.dataclass(frozen=True)
class IdLists:
    """Token id lists and whether the file held several; `where` names it in messages."""

    lists: list[list[int]]
    several: bool
    where: str

    def name(self, array: str, index: int) -> str:
        """Name of an array that belongs to list `index`."""
        return f"{array}.{index}" if self.several else array

    def label(self, index: int) -> str:
        """How messages call list `index`."""
        return f"{self.where}, list {index}" if self.several else self.where

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises UsageError for an id outside 0 to vocab_size - 1."""
        for index, ids in enumerate(self.lists):
            for place, token in enumerate(ids):
                if not 0 <= token < vocab_size:
                    raise UsageError(
                        f"{self.label(index)}: id {token} at place {place} is outside the vocabulary, which has "
                        f"ids 0 to {vocab_size - 1}"
                    )

    def check_lengths(self, minimum: int, why: str) -> None:
        """Raises UsageError for a list shorter than `minimum`."""
        for index, ids in enumerate(self.lists):
            if len(ids) < minimum:
                raise UsageError(
                    f"{self.label(index)} has {len(ids)} ids, expected at least {minimum}: {why}"
                )


def read_id_lists(path: str | Path) -> IdLists:
    """Reads a JSON file. Raises UsageError when it is missing, not JSON, or of another shape."""
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); give a JSON file of token ids") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); expected a list of token ids") from None
    expected = "expected one list of whole numbers, or a list of such lists"
    if not isinstance(data, list):
        raise UsageError(f"{path} holds a JSON {type(data).__name__}; {expected}")
    if not data:
        raise UsageError(f"{path} holds an empty list; {expected}")
    several = isinstance(data[0], list)
    lists = data if several else [data]
    for index, ids in enumerate(lists):
        label = f"{path}, list {index}" if several else str(path)
        if not isinstance(ids, list):
            raise UsageError(f"{label} is {ids!r} among lists; {expected}")
        bad = next((token for token in ids if isinstance(token, bool) or not isinstance(token, int)), None)
        if bad is not None:
            raise UsageError(f"{label} holds {json.dumps(bad)[:40]}; {expected}")
    return IdLists(lists, several, str(path))


def check_output(path: str | Path, *, overwrite: bool = False) -> None:
    """Raises UsageError where `write_arrays` could not, or should not, write."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another name, or pass --overwrite to replace it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for {path.name}; make it first")


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Writes float32 and int32 arrays; returns their bytes. Raises V4FlashError when the disk refuses."""
    try:
        return write_safetensors(
            path, {name: (_DTYPES[array.dtype], array) for name, array in arrays.items()}, metadata
        )
    except OSError as error:
        raise V4FlashError(
            f"writing {path} failed ({error.strerror or error}); check disk and rights"
        ) from None


def rounded_context(lengths: Iterable[int], minimum: int = 512) -> int:
    """The longest length rounded up to a power of two, so that lists of similar length share a program."""
    return max(minimum, 1 << (max(lengths) - 1).bit_length())
