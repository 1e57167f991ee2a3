"""One safetensors file: its header, its tensors as memory-mapped arrays, and every way it can be damaged.

Knows: the file format and the number types of the published checkpoints. Does not know: which tensors a model
needs, or that several files may belong together.

    8 bytes, little-endian: length of the header | header, JSON | tensor bytes, in the order of their offsets

Source of the format: the safetensors README. E4M3 payloads come back as ml_dtypes.float8_e4m3fn, scale bytes
(F8_E8M0) as uint8, everything else as the numpy type of the same name.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from v4flash.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # the format's own limit on the header's length
_LFS_PREFIX = b"version https://git-lfs"
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `start` and `end` are byte offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class SafetensorsFile:
    """An opened file whose header has been checked against its size; tensors are read on demand.

    Attributes:
      path: the file.
      tensors: {name: TensorInfo} in the order of their offsets.
      metadata: the header's free-form strings.
    """

    def __init__(self, path: str | Path):
        """Reads and checks the header.

        Raises CheckpointError, naming the file, when it is empty, a Git LFS pointer, cut short (with the
        missing bytes and the first tensor they belong to), has an unreadable header or an unknown dtype.
        """
        self.path = Path(path)
        size, header, data_start = _read_header(self.path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        infos = [_tensor_info(self.path, name, entry, data_start) for name, entry in header.items()]
        infos.sort(key=lambda info: (info.start, info.end))
        _check_layout(self.path, infos, data_start, size)
        self.tensors = {info.name: info for info in infos}
        self._bytes: np.memmap | None = None

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor as a read-only view of the mapped file, in its published shape and type."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.path.name} holds no tensor {name}; it holds {len(self.tensors)} others"
            )
        if info.nbytes == 0:
            return np.zeros(info.shape, DTYPES[info.dtype])
        if self._bytes is None:
            self._bytes = np.memmap(self.path, np.uint8, mode="r")
        return self._bytes[info.start : info.end].view(DTYPES[info.dtype]).reshape(info.shape)


def _read_header(path: Path) -> tuple[int, dict, int]:
    """(file size, decoded header, offset of the first tensor byte)."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory, expected a safetensors file; remove or rename it")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_LENGTH_BYTES)
            if size == 0:
                raise CheckpointError(f"{path} is empty (0 bytes); copy this file again")
            if (head + file.read(64)).startswith(_LFS_PREFIX):
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights; fetch it with `git lfs pull`"
                )
            length = int.from_bytes(head, "little")
            if size < _LENGTH_BYTES or (length <= _HEADER_LIMIT and _LENGTH_BYTES + length > size):
                short = _LENGTH_BYTES + length - size if size >= _LENGTH_BYTES else _LENGTH_BYTES - size
                raise CheckpointError(
                    f"{path} ends inside its header ({size:,} bytes, {short:,} or more lost); copy it again"
                )
            if not 2 <= length <= _HEADER_LIMIT:
                raise CheckpointError(
                    f"{path} is not a safetensors file: its header would be {length:,} bytes; copy it again"
                )
            file.seek(_LENGTH_BYTES)
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}; expected a safetensors file there") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from None
    try:
        header = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header ({error}); copy this file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header (not a JSON object); copy this file again")
    return size, header, _LENGTH_BYTES + length


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} has a damaged header entry for tensor {name}; copy this file again")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {name} ({dtype} {list(shape)}) needs {needed:,} bytes, its header gives it "
            f"{end - begin:,}; copy this file again"
        )
    return TensorInfo(name, dtype, shape, data_start + begin, data_start + end)


def _check_layout(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    """Tensors must follow one another without overlap or gap and fill the file exactly."""
    position = data_start
    for info in infos:
        if info.start != position:
            how = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {info.name} {how} (starts at byte {info.start:,}, expected {position:,}); "
                "copy this file again"
            )
        position = info.end
    if size < position:
        lost = next(info.name for info in infos if info.end > size)
        raise CheckpointError(
            f"{path} is {position - size:,} bytes short ({size:,} of {position:,}; first lost tensor: "
            f"{lost}); copy this file again"
        )
    if size > position:
        raise CheckpointError(
            f"{path} is {size - position:,} bytes longer than its header says ({size:,}, expected "
            f"{position:,}); copy this file again"
        )


def write_safetensors(
    path: str | Path, tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes {name: (dtype name, array)} to `path`; the final name appears only when the file is complete.

    The array's item size must be that of the dtype name (packed FP4 is uint8 under I8, scale bytes uint8
    under F8_E8M0). Returns the number of tensor bytes.
    """
    path = Path(path)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, array) in tensors.items():
        if dtype not in DTYPES or DTYPES[dtype].itemsize != array.dtype.itemsize:
            raise ValueError(f"tensor {name}: {array.dtype} cannot be written as {dtype}")
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % _ALIGNMENT)
    write_atomically(
        path,
        (
            len(raw).to_bytes(_LENGTH_BYTES, "little"),
            raw,
            *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in tensors.values()),
        ),
    )
    return position


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes the chunks under a temporary name beside `path`, flushes them to disk and renames."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
