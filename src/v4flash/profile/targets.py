"""The GPUs that programs are compiled for, on machines that have none.

Knows: the device descriptions in configs/devices (XLA's GpuTargetConfigProto as text), and that the machine file of the
same name says which bandwidth was measured. Does not know: JAX, any program, or machines of several memories.
"""

import dataclasses
import json
import re
from pathlib import Path

import v4flash
from v4flash.errors import UsageError

MEASURED = "measured"
_FIELD = re.compile(r'\s*(\w+)\s*(?::\s*("[^"]*"|\S+)|\{)|\s*(\})')
_MEMORY = re.compile(r"(device_memory_size:\s*)\d+")


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as its description gives it.

    Attributes:
      name: the description's file name without its ending, as on the command line ("h200").
      product: the vendor's name ("NVIDIA H200").
      capability: compute capability times ten (90, 103).
      cores: streaming multiprocessors.
      memory: bytes.
      bandwidth: bytes/s as published.
      measured_bandwidth: bytes/s of a large copy on the device itself, or None where nobody measured.
      l2: bytes of the second-level cache.
      shared_memory: bytes one block may ask for.
      text: the whole description, for the compiler.
    """

    name: str
    product: str
    capability: int
    cores: int
    memory: int
    bandwidth: int
    measured_bandwidth: float | None
    l2: int
    shared_memory: int
    text: str

    def with_memory(self, size: int) -> "Target":
        """The same device with `size` bytes of memory, for programs whose weights one device does not hold."""
        return dataclasses.replace(self, memory=size, text=_MEMORY.sub(rf"\g<1>{size}", self.text))


def folder() -> Path:
    """The device descriptions beside the source tree, wherever the caller runs."""
    return Path(v4flash.__file__).resolve().parents[2] / "configs" / "devices"


def names() -> list[str]:
    """The targets that have a description."""
    return sorted(file.stem for file in folder().glob("*.txtpb"))


def target(name: str) -> Target:
    """The target of that name. Raises UsageError for a name without a description or a description with gaps."""
    file = folder() / f"{name}.txtpb"
    if not file.is_file():
        raise UsageError(f"no device description {file}; there are {', '.join(names()) or 'none'}")
    text = file.read_text(encoding="utf-8")
    fields = read_fields(text)
    device = "gpu_device_info."

    def number(field: str, default: int | None = None) -> int:
        value = fields.get(device + field, default)
        if not isinstance(value, int):
            raise UsageError(f"{file}: {device}{field} is {value!r}, expected a whole number")
        return value

    return Target(
        name=name,
        product=str(fields.get(device + "name", name)),
        capability=10 * number("cuda_compute_capability.major") + number("cuda_compute_capability.minor", 0),
        cores=number("core_count"),
        memory=number("device_memory_size"),
        bandwidth=number("memory_bandwidth"),
        measured_bandwidth=_measured_bandwidth(name),
        l2=number("l2_cache_size"),
        shared_memory=number("shared_memory_per_block_optin"),
        text=text,
    )


def _measured_bandwidth(name: str) -> float | None:
    """Bytes/s of the first memory in the machine file of that name, if somebody measured them."""
    file = folder() / f"{name}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))["memories"][0].get("bandwidth", {})
    return found["value"] if found.get("label") == MEASURED else None


def read_fields(text: str) -> dict[str, int | float | str]:
    """Scalar fields of a text-format message by dotted path; whole numbers, other numbers, else text."""
    fields: dict[str, int | float | str] = {}
    path: list[str] = []
    for name, value, closing in _FIELD.findall(text):
        if closing:
            path.pop()
        elif not value:
            path.append(name)
        else:
            fields[".".join([*path, name])] = _scalar(value)
    return fields


def _scalar(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip('"')
