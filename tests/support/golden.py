"""Golden data: results that other implementations computed on two small checkpoints, and the checkpoints.

Two sources hold them. The *complete* data are a folder with README.md, v4-tiny/, v41-tiny/, dspark/ and qat/. The
*cut* lies in tests/data/golden: all of formats and pieces, and for each checkpoint one packed file with the
weights and results of some layers and of the drafter (`cut_golden.py` writes it). The complete data are used
when the environment variable V4FLASH_GOLDEN names their folder, or when a folder `golden` lies inside a folder
beside the checkout; V4FLASH_GOLDEN=cut asks for the cut in any case.

Knows: where the data are, what is in them, and how a checkpoint is rebuilt from the cut. Does not know: what is
computed or compared.
"""

import dataclasses
import functools
import hashlib
import json
import lzma
import os
import re
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from v4flash.checkpoint.inventory import PublishedTensor, inventory
from v4flash.checkpoint.published import TOKEN_MAP_NAME
from v4flash.checkpoint.safetensors_file import DTYPES, SafetensorsFile, write_safetensors
from v4flash.checkpoint.shards import SINGLE_NAME
from v4flash.config import ModelConfig

CUT = Path(__file__).parents[1] / "data" / "golden"
VARIABLE = "V4FLASH_GOLDEN"
NAMES = ("v4-tiny", "v41-tiny")
WEIGHTS, VOCABULARY = "weights/", "vocabulary"
IMAGE_MARKERS = ("image_start", "image_end", "image_newline")  # the golden checkpoints leave them out
_CHECKOUT = Path(__file__).parents[2]
_NEUTRAL_SCALE = 127  # the scale byte of 1
_LAYER = re.compile(r"layers\.(\d+)\.")


def _is_complete(folder: Path) -> bool:
    return (folder / "README.md").is_file() and all(
        (folder / name / "config.json").is_file() for name in NAMES
    )


@functools.cache
def complete_folder() -> Path | None:
    """The folder of the complete data, or None where only the cut is at hand."""
    wanted = os.environ.get(VARIABLE)
    if wanted == "cut":
        return None
    if wanted:
        if not _is_complete(Path(wanted)):
            raise FileNotFoundError(
                f"{VARIABLE} is {wanted}, expected a folder with README.md, {', '.join(NAMES)}"
            )
        return Path(wanted)
    found = sorted(folder for folder in _CHECKOUT.parent.glob("*/golden") if _is_complete(folder))
    return found[0] if found else None


def description() -> str:
    """Which data the tests use, in a few words."""
    folder = complete_folder()
    return f"complete, {folder}" if folder else "the committed cut (single layers, drafter, formulas)"


@dataclasses.dataclass(frozen=True)
class Packed:
    """One tensor of a packed file: `kept` lists the leading indices `array` holds; None means all of them."""

    dtype: str
    shape: tuple[int, ...]
    array: np.ndarray
    kept: np.ndarray | None

    def whole(self) -> np.ndarray:
        """The tensor in its own shape, zero where nothing is kept."""
        if self.kept is None:
            return self.array
        full = np.zeros(self.shape, self.array.dtype)
        full[self.kept] = self.array
        return full


def packed_path(name: str) -> Path:
    return CUT / f"{name}.xz"


@functools.cache
def packed(name: str) -> dict[str, Packed]:
    """All tensors of a packed file: 'vocabulary', 'weights/<tensor>' and '<result file>/<key>'.

    The file is an xz stream of a safetensors file with one U8 tensor [itemsize, n] for each number type, the
    n values' bytes plane by plane (that compresses far better), and a U8 tensor 'index': JSON, a list of
    [name, dtype, shape, whether only the rows of 'vocabulary' are kept] in the order of the values.
    """
    stored = safetensors.numpy.load(lzma.decompress(packed_path(name).read_bytes()))
    index = json.loads(stored.pop("index").tobytes())
    values = {
        dtype: np.ascontiguousarray(planes.T).reshape(-1).view(DTYPES[dtype])
        for dtype, planes in stored.items()
    }
    position = dict.fromkeys(values, 0)
    tensors: dict[str, Packed] = {}
    for tensor, dtype, shape, by_row in index:
        kept = tensors[VOCABULARY].array if by_row else None
        held = (len(kept), *shape[1:]) if by_row else tuple(shape)
        start = position[dtype]
        position[dtype] = start + int(np.prod(held))
        array = values[dtype][start : position[dtype]].reshape(held)
        tensors[tensor] = Packed(dtype, tuple(shape), array, kept)
    return tensors


@functools.cache
def read(file: str) -> dict[str, np.ndarray]:
    """{key: array} of a result file by its path without ending: 'formats', 'qat/v4-tiny', 'v4-tiny/golden'.

    From the cut, the results of a checkpoint are fewer; logits hold the columns of `vocabulary`, single layers
    those of `layers`.
    """
    folder = complete_folder() or CUT
    if complete_folder() or "/" not in file:
        opened = SafetensorsFile(folder / f"{file}.safetensors")
        return {key: np.array(opened.tensor(key)) for key in opened.tensors}
    name = next(name for name in NAMES if name in file)
    start = f"{file}/"
    return {key.removeprefix(start): one.array for key, one in packed(name).items() if key.startswith(start)}


def layers(name: str) -> tuple[int, ...]:
    """Backbone layers whose weights are at hand, in order."""
    if folder := complete_folder():
        return tuple(layer.index for layer in ModelConfig.from_file(folder / name).layers)
    found = {int(match[1]) for key in packed(name) if (match := _LAYER.match(key.removeprefix(WEIGHTS)))}
    return tuple(sorted(found))


def vocabulary(name: str) -> np.ndarray:
    """Token ids whose rows of the embedding, the head and the Markov tables are at hand, ascending."""
    if folder := complete_folder():
        return np.arange(ModelConfig.from_file(folder / name).vocab_size)
    return packed(name)[VOCABULARY].array


def checkpoint(name: str, scratch: Path) -> Path:
    """Folder of the checkpoint that golden results were computed with; from the cut it is made in `scratch`."""
    if folder := complete_folder():
        return folder / name
    return rebuild(name, scratch / name)


def rebuild(name: str, directory: Path) -> Path:
    """Writes the checkpoint of the cut with every published tensor; those not kept are zero, their scales 1."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", TOKEN_MAP_NAME):
        if (CUT / name / file).is_file():
            shutil.copyfile(CUT / name / file, directory / file)
    kept = packed(name)
    tensors = {
        tensor.name: (tensor.dtype, _filled(tensor, kept.get(WEIGHTS + tensor.name)))
        for tensor in inventory(ModelConfig.from_file(directory)).values()
        if tensor.name not in IMAGE_MARKERS
    }
    write_safetensors(directory / SINGLE_NAME, tensors)
    return directory


def _filled(tensor: PublishedTensor, kept: Packed | None) -> np.ndarray:
    if kept is not None:
        return kept.whole()
    fill = _NEUTRAL_SCALE if tensor.dtype == "F8_E8M0" else 0
    return np.full(tensor.shape, fill, np.uint8 if tensor.dtype == "F8_E8M0" else DTYPES[tensor.dtype])


def digests() -> dict[str, str]:
    """SHA-256 of every file of the cut, by its path in tests/data/golden."""
    return {
        file: hashlib.sha256((CUT / file).read_bytes()).hexdigest()
        for file in (
            "formats.safetensors", "pieces.safetensors", *(packed_path(name).name for name in NAMES),
            *(f"{name}/config.json" for name in NAMES), f"v41-tiny/{TOKEN_MAP_NAME}",
        )
    }  # fmt: skip
