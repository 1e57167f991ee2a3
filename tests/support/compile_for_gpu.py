"""Compiles the Triton kernels of a function for a GPU that need not be there, and reads ptxas' report of them."""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from pallas_kernels import launch

CAPABILITIES = (90, 103)
# Of an H200, which has the fewest processors in mind; each launch takes a kilobyte of shared memory for itself.
PROCESSORS, REGISTERS, SHARED_BYTES, OWN_SHARED_BYTES = 132, 65536, 232448, 1024


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel; `shared` counts the bytes that its launch asks for."""

    name: str
    registers: int
    spilled_bytes: int
    shared: int


def programs_at_once(kernel: Kernel, warps: int) -> int:
    """How many programs of so many warps a processor has room for."""
    return min(
        REGISTERS // (kernel.registers * 32 * warps), SHARED_BYTES // (kernel.shared + OWN_SHARED_BYTES)
    )


def kernels(function: Callable, *arguments: jax.ShapeDtypeStruct, capability: int) -> list[Kernel]:
    """Every distinct Triton kernel that `function` launches, compiled for `capability` (90 or 103)."""
    from jax_triton import triton_lib

    found, original = [], triton_lib.compile_ttir_to_ptx_inplace

    def recording(*args):
        made = original(*args)
        found.append(_assembled(made.binary, made.name, made.shared_mem_bytes))
        return made

    triton_lib.compile_ttir_to_ptx_inplace = recording
    triton_lib._COMPILED_KERNEL_CACHE.clear()
    try:
        with launch.compiling_for(capability):
            # A function of its own: a trace kept from another capability would be used again.
            jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=("cuda",))
    finally:
        triton_lib.compile_ttir_to_ptx_inplace = original
    return found


def _assembled(ptx: str, name: str, shared: int) -> Kernel:
    import triton

    target = re.search(r"\.target (\w+)", ptx).group(1)
    tool = "ptxas-blackwell" if target.startswith("sm_1") else "ptxas"
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        run = subprocess.run(
            [path, "-v", f"--gpu-name={target}", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    log = run.stderr + run.stdout
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", log))
    return Kernel(name, int(re.search(r"Used (\d+) registers", log).group(1)), spilled, shared)
