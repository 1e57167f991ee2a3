"""What the assembler says of Triton kernels inside a compiled program.

Knows: ptxas and how it reports. Does not know: what the kernels do.
"""

import dataclasses
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pallas_kernels import ptx_text
from v4flash.errors import V4FlashError

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel after assembly: registers per thread and bytes of register spills (stores and loads)."""

    name: str
    registers: int
    spilled: int


def assembled(kernels: Iterable[str]) -> list[Binary]:
    """Assembles PTX texts with the ptxas that Triton brings along, each different one once."""
    return [_assembled(ptx) for ptx in dict.fromkeys(kernels)]


def _assembled(ptx: str) -> Binary:
    architecture, number = ptx_text.architecture(ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [_ptxas(number), f"-arch={architecture}", "-v", "-o", f"{folder}/kernel.cubin", source]
        done = subprocess.run(command, capture_output=True, text=True)
    name = ptx_text.kernel_name(ptx)
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
