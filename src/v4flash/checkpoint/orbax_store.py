"""Checkpoints kept by Orbax: a converted model that loads without re-assembly, and training states.

Knows: the layout of a converted folder and how to tell a finished one. Does not know: published tensor names;
arrays are stored in packed form under their module paths.

    manifest.json               written last: format, parts, and the size of every file
    config.json, tokenizer.json, ... copied from the published folder
    weights/backbone/           embedding, head, final norm, token map
    weights/backbone.layers.0/  one Orbax checkpoint for each layer and drafter stage
"""

import dataclasses
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from v4flash.checkpoint import published
from v4flash.checkpoint.folders import complete_folder, is_unfinished
from v4flash.checkpoint.inventory import Parameter, parameters
from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.checkpoint.shards import INDEX_NAME, CheckpointFiles, listed
from v4flash.config import ModelConfig
from v4flash.errors import CheckpointError, UsageError

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights"
FORMAT = "v4flash-orbax"
SCHEMA_VERSION = 1


def part_of(parameter: Parameter) -> str:
    """The Orbax checkpoint a parameter lies in: its layer, its drafter stage, or the rest of the backbone."""
    path = parameter.path
    depth = 3 if path[1] in ("layers", "stages") else 1
    return ".".join(map(str, path[:depth]))


def key_of(parameter: Parameter) -> str:
    """Name of a parameter inside its part."""
    return ".".join(map(str, parameter.path))


def convert(src: str | Path, dst: str | Path, *, overwrite: bool = False) -> int:
    """Stores a published checkpoint as an Orbax folder that `load` accepts; returns the stored bytes.

    Memory: one layer at a time. The folder `dst` appears only when it is complete, with its manifest written
    last; an interrupted run leaves `dst` + '.partial', which the next run clears.

    Raises CheckpointError for a damaged source or a full disk, UsageError when `dst` exists and `overwrite`
    is False or when `src` is a converted folder already.
    """
    src = Path(src)
    if is_store(src):
        raise UsageError(f"{src} is a converted checkpoint already; give a folder with safetensors files")
    files = CheckpointFiles.open(src)
    config = ModelConfig.from_file(files.directory)
    published.check_tensors(files, config, config)
    parts: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters(config):
        parts[part_of(parameter)].append(parameter)
    stored = 0
    with complete_folder(dst, files.data_bytes, overwrite=overwrite) as folder:
        for file in side_files(files.directory):
            shutil.copyfile(file, folder / file.name)
        for name, members in parts.items():
            arrays = {key_of(member): published.read_parameter(files, config, member) for member in members}
            ocp.save(folder.resolve() / WEIGHTS_NAME / name, arrays)
            stored += sum(array.nbytes for array in arrays.values())
        _write_manifest(folder, sorted(parts), stored)
    return stored


def side_files(directory: Path) -> Iterator[Path]:
    """The files beside the weights: configuration, tokenizer, encodings, licence."""
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX_NAME, MANIFEST_NAME):
            yield file


def _write_manifest(folder: Path, parts: list[str], stored: int) -> None:
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "data_bytes": stored,
        "parts": parts,
        "files": sizes,
    }
    write_atomically(folder / MANIFEST_NAME, [json.dumps(manifest, indent=1).encode() + b"\n"])


def is_store(path: Path) -> bool:
    """Whether `path` is a folder that `convert` made or began to make."""
    return path.is_dir() and ((path / MANIFEST_NAME).exists() or (path / WEIGHTS_NAME).is_dir())


@dataclasses.dataclass
class Store:
    """An opened, complete converted folder."""

    path: Path
    config: ModelConfig
    data_bytes: int
    parts: tuple[str, ...]
    _part: str = ""
    _arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Checks the manifest and the size of every file.

        Raises CheckpointError when the folder is unfinished, of another format, or has lost files.
        """
        path = Path(path)
        if is_unfinished(path) or not (path / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{path} is an unfinished conversion (no {MANIFEST_NAME}); convert it again"
            )
        try:
            manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
            kind, sizes, parts = (
                (manifest["format"], manifest["schema"]),
                manifest["files"],
                manifest["parts"],
            )
            data_bytes = manifest["data_bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path / MANIFEST_NAME} is damaged ({error!r}); convert it again"
            ) from None
        if kind != (FORMAT, SCHEMA_VERSION):
            raise CheckpointError(
                f"{path / MANIFEST_NAME} is {kind[0]} schema {kind[1]}, expected {FORMAT} schema "
                f"{SCHEMA_VERSION}; convert the checkpoint again"
            )
        wrong = [name for name, size in sizes.items() if _size(path / name) != size]
        if wrong:
            raise CheckpointError(
                f"{path} has {len(wrong):,} files missing or of another size ({listed(wrong, 3)}); "
                "convert it again"
            )
        return cls(path, ModelConfig.from_file(path), data_bytes, tuple(parts))

    def read(self, parameter: Parameter) -> np.ndarray:
        """One parameter in packed form. Parts are read whole, so ask for parameters in module order."""
        part, key = part_of(parameter), key_of(parameter)
        if self._part != part:
            self._arrays = {}  # frees the part before, so that never two are held
            self._part, self._arrays = part, self._load_part(part)
        value = self._arrays.get(key)
        if value is None or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            found = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise CheckpointError(
                f"{self.path}: {key} is {found}, expected {parameter.dtype} {list(parameter.shape)}; "
                "convert it again"
            )
        return value

    def _load_part(self, part: str) -> dict[str, np.ndarray]:
        if part not in self.parts:
            raise CheckpointError(f"{self.path} holds no part {part}; convert the checkpoint again")
        try:
            return ocp.load(self.path.resolve() / WEIGHTS_NAME / part)
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged data
            raise CheckpointError(
                f"{self.path}: part {part} cannot be read ({error}); convert it again"
            ) from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def save_training_state(path: str | Path, state: Any) -> None:
    """Stores a pytree of arrays (parameters, optimiser moments, step, random key data) at `path`.

    An older state at `path` is replaced when the new one is complete.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    with complete_folder(path, size, overwrite=True) as folder:
        ocp.save(folder.resolve() / "state", state)


def load_training_state(path: str | Path, abstract: Any) -> Any:
    """Reads a stored pytree into the structure, shapes and types of `abstract` (arrays or ShapeDtypeStructs).

    Raises CheckpointError when there is none, or when it has another structure.
    """
    folder = Path(path).resolve() / "state"
    if not folder.is_dir():
        raise CheckpointError(f"no training state at {path}; start without resuming, or give another folder")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here)

    target = jax.tree.map(described, abstract)
    try:
        return ocp.load(folder, target)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the training state at {path} does not fit this run: {reason}") from error
