"""What the assembler says of Triton kernels inside a compiled program.

Knows: the payload that jax-triton hands to its custom call, and ptxas. Does not know: what the kernels do.
"""

import dataclasses
import importlib.util
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from v4flash.errors import V4FlashError

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_ARCHITECTURE = re.compile(r"^\.target (sm_(\d+)\w*)", re.MULTILINE)
_TEXT_FIELD = 2  # protobuf's wire type of texts and nested messages


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel after assembly: registers per thread and bytes of register spills (stores and loads)."""

    name: str
    registers: int
    spilled: int


def assembly(payload: bytes) -> str:
    """The PTX inside a custom call's payload (a zlib-compressed protobuf message of jax-triton)."""
    for text in _texts(zlib.decompress(payload)):
        if b".version" in text and b".visible .entry" in text:
            return text.decode()
    raise V4FlashError("a Triton call carries no PTX; expected the payload of jax-triton 0.3.1")


def _texts(message: bytes) -> Iterator[bytes]:
    """The innermost length-delimited fields of a protobuf message."""
    found = False
    for field in _fields(message) or ():
        found = True
        yield from _texts(field)
    if not found:
        yield message


def _fields(message: bytes) -> list[bytes] | None:
    """The length-delimited fields of a message, or None where the bytes are no message."""
    fields, at = [], 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _TEXT_FIELD:
            size, at = _varint(message, at)
            fields.append(message[at : at + size])
            at += size
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return None
        if at > len(message) or key >> 3 == 0:
            return None
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def kernel_name(ptx: str) -> str:
    """The name of the kernel in a PTX text."""
    return _ENTRY.search(ptx)[1]


def assembled(kernels: Iterable[str]) -> list[Binary]:
    """Assembles PTX texts with the ptxas that Triton brings along, each different one once."""
    return [_assembled(ptx) for ptx in dict.fromkeys(kernels)]


def _assembled(ptx: str) -> Binary:
    architecture, number = _ARCHITECTURE.search(ptx).groups()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [_ptxas(int(number)), f"-arch={architecture}", "-v", "-o", f"{folder}/kernel.cubin", source]
        done = subprocess.run(command, capture_output=True, text=True)
    name = kernel_name(ptx)
    if done.returncode:
        raise V4FlashError(f"ptxas refuses the Triton kernel {name}: {done.stderr.strip().splitlines()[0]}")
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(done.stderr)]
    registers = [int(count) for count in _REGISTERS.findall(done.stderr)]
    return Binary(name, max(registers), sum(spills))


def _ptxas(capability: int) -> Path:
    """Triton's assembler; it ships a newer one beside it for Blackwell."""
    found = importlib.util.find_spec("triton")
    if found is None:
        raise V4FlashError("reading Triton kernels needs the package triton: pip install -e '.[compile]'")
    binaries = Path(found.origin).parent / "backends" / "nvidia" / "bin"
    newer = binaries / "ptxas-blackwell"
    return newer if capability >= 100 and newer.is_file() else binaries / "ptxas"
