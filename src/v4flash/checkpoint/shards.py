"""The weight files of one checkpoint folder, seen as one table of tensors.

Knows: the index file, which shard holds which tensor, and how index and shards can disagree. Does not know:
which tensors a model needs, or what they mean.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from v4flash.checkpoint.safetensors_file import SafetensorsFile, TensorInfo
from v4flash.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN = 5


def listed(names, shown: int = _SHOWN) -> str:
    """The first few names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class CheckpointFiles:
    """All shards of one checkpoint, with their headers read and checked against the index.

    Attributes:
      directory: the checkpoint's folder.
      shards: {file name: SafetensorsFile}.
      tensors: {name: TensorInfo} over all shards.
    """

    def __init__(self, directory: Path, shards: dict[str, SafetensorsFile], index: dict[str, str] | None):
        self.directory = directory
        self.shards = shards
        self.tensors: dict[str, TensorInfo] = {}
        self._file_of: dict[str, str] = {}
        for file_name, shard in shards.items():
            self.tensors.update(shard.tensors)
            self._file_of.update(dict.fromkeys(shard.tensors, file_name))
        if index is not None:
            _check_index(directory, shards, index)

    @classmethod
    def open(cls, path: str | Path) -> "CheckpointFiles":
        """Opens a folder with an index and shards, a folder with model.safetensors, or one such file.

        Only headers are read. Raises CheckpointError for a folder without weights, for missing shards (all of
        them, with the tensors they hold), for damaged shards, and where index and shards disagree.
        """
        path = Path(path)
        if path.suffix == ".safetensors" and not path.is_dir():
            return cls(path.parent, {path.name: SafetensorsFile(path)}, None)
        if not path.is_dir():
            raise CheckpointError(_nothing_at(path))
        if (path / INDEX_NAME).exists():
            index = read_index(path / INDEX_NAME)
            return cls(path, _open_shards(path, index), index)
        if (path / SINGLE_NAME).exists():
            return cls(path, {SINGLE_NAME: SafetensorsFile(path / SINGLE_NAME)}, None)
        raise CheckpointError(_nothing_at(path))

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(info.nbytes for info in self.tensors.values())

    def shard_of(self, name: str) -> str:
        """Name of the file that holds a tensor; raises CheckpointError when no file does."""
        if name not in self._file_of:
            raise CheckpointError(
                f"tensor {name} was never in this checkpoint ({self.directory} does not list it)"
            )
        return self._file_of[name]

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor, memory-mapped and read-only."""
        return self.shards[self.shard_of(name)].tensor(name)


def read_index(path: Path) -> dict[str, str]:
    """{tensor name: shard file name} of an index file, checked for form only."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        sound = all(isinstance(shard, str) and Path(shard).name == shard for shard in index.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable index ({error!r}); copy this file again") from None
    if not sound or not index:
        raise CheckpointError(f"{path} must map tensor names to files beside it; copy this file again")
    return index


def _open_shards(directory: Path, index: dict[str, str]) -> dict[str, SafetensorsFile]:
    by_shard: dict[str, list[str]] = defaultdict(list)
    for name, shard in index.items():
        by_shard[shard].append(name)
    missing = [shard for shard in sorted(by_shard) if not (directory / shard).exists()]
    if missing:
        lines = [
            f"{shard} ({len(by_shard[shard]):,} tensors: {listed(by_shard[shard], 3)})" for shard in missing
        ]
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of {len(by_shard)} shards: {'; '.join(lines)}; copy them there"
        )
    return {shard: SafetensorsFile(directory / shard) for shard in sorted(by_shard)}


def _check_index(directory: Path, shards: dict[str, SafetensorsFile], index: dict[str, str]) -> None:
    lacking: dict[str, list[str]] = defaultdict(list)
    for name, shard in index.items():
        if name not in shards[shard].tensors:
            lacking[shard].append(name)
    if lacking:
        lines = [
            f"{shard} lacks {len(names):,} ({listed(names, 3)})" for shard, names in sorted(lacking.items())
        ]
        raise CheckpointError(
            f"{directory}: the index and the shards are of different revisions: {'; '.join(lines)}; copy the "
            "index and these shards from one revision"
        )
    for file_name, shard in shards.items():
        stray = [name for name in shard.tensors if index.get(name) != file_name]
        if stray:
            raise CheckpointError(
                f"{directory}: {file_name} holds {len(stray):,} tensors that the index does not place there "
                f"({listed(stray, 3)}); copy the index and this shard from one revision"
            )


def _nothing_at(path: Path) -> str:
    if not path.exists():
        return f"no checkpoint at {path}: no such folder; give the one with config.json and its shards"
    if path.is_file():
        return f"no checkpoint at {path}: it is a file; give the folder with config.json and its shards"
    found = len(list(path.glob("*.safetensors")))
    config = "a" if (path / "config.json").exists() else "no"
    nested = sorted(child.parent for child in path.glob("*/config.json"))
    hint = f"; did you mean {nested[0]}?" if nested else ""
    need = "" if not found else f" but neither {INDEX_NAME} nor {SINGLE_NAME}"
    return f"no checkpoint at {path}: found {found} .safetensors{need}, {config} config.json{hint}"
