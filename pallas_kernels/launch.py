"""How a Triton kernel is called from JAX.

Knows: the one lowering that makes Triton kernels plain kernels of XLA's command buffer, which GPU generation to compile
for on a machine without one, and how the same call runs in Triton's interpreter. Does not know: any kernel.

jax-triton 0.3.1 lowers to a custom call of its own that XLA cannot capture: the graph is cut at each kernel. The typed
handler of jaxlib's CUDA plugin (`triton_kernel_call_ffi`) is captured, but as a graph within the graph: XLA then spends
some 25 us of host time on every kernel of every step, more than most kernels take. So the PTX that jax-triton made is
handed to XLA itself, which launches it like a kernel of its own in 8.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_kernels import ptx_text

TARGET = "__gpu$xla.gpu.ptx"
# Triton ends the parameters of every kernel with two pointers to scratch memory, which none of ours uses.
_SCRATCH = 2
_WARP = 32
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)

# Triton decides at import whether its decorators compile or interpret.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Kernels traced inside compile for this compute capability (90 is H200, 103 is GB300), GPU or not."""
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def capability() -> int | None:
    """Compute capability that kernels traced now compile for; None without a GPU and outside `compiling_for`."""
    wanted = _capability.get()
    if wanted is None and jax.default_backend() == "gpu":
        return int(jax.local_devices()[0].compute_capability.replace(".", ""))
    return wanted


def call(
    kernel,
    *operands: jax.Array,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> list[jax.Array]:
    """Launches a `triton.jit` kernel on operands and fresh outputs, and returns the outputs.

    The kernel's parameters are the operands in order (arrays become pointers), then the outputs, then its
    `tl.constexpr` ones, which `constants` names.

    Args:
      grid: programs along up to three axes.
      outputs: shape and type of each output.
      aliases: {operand index: output index} of outputs that are updated in place.
      num_warps, num_stages: as in Triton.

    With TRITON_INTERPRET=1 in the environment at import the kernel runs in Triton's interpreter on concrete
    arrays, one program after another.
    """
    if INTERPRETED:
        return _interpreted(kernel, operands, grid, outputs, dict(aliases or {}), constants)
    made = _jax_triton().triton_call(
        *operands,
        kernel=kernel,
        out_shape=list(outputs),
        grid=grid,
        name=kernel.fn.__name__,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=_capability.get(),
        input_output_aliases=dict(aliases or {}),
        **constants,
    )
    return list(made)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A compiled kernel: its name, warps of a program, bytes of shared memory, and PTX."""

    name: str
    warps: int
    shared: int
    ptx: str


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A kernel over a grid: what XLA is told instead of jax-triton's own message."""

    kernel: _Kernel
    grid: tuple[int, int, int]

    def to_proto(self, name: str, metadata: bytes | None) -> "_Launch":
        return self

    def attributes(self, offsets: tuple[int, ...], outputs: int) -> dict[str, Any]:
        """The attributes of XLA's custom call for PTX; outputs stand between operands and scratch.

        Args: offsets, of each operand in bytes; outputs, their number.
        """
        sizes = zip(("grid_x", "grid_y", "grid_z"), self.grid, strict=True)
        return {name: np.int32(size) for name, size in sizes} | {
            "name": self.kernel.name,
            "kernel_type": "ptx",
            "kernel_data": ptx_text.with_offsets(self.kernel.ptx, self.kernel.name, offsets),
            "block_x": np.int32(_WARP * self.kernel.warps),
            "block_y": np.int32(1),
            "block_z": np.int32(1),
            "shared_mem_bytes": np.int32(self.kernel.shared),
            "output_indices": tuple(np.int32(len(offsets) + place) for place in range(outputs)),
        }


def _kernel(name, warps, clusters, shared, ptx, ttir, capability) -> _Kernel:
    if clusters != 1:
        raise ValueError(f"kernel {name} asks for clusters of {clusters} programs, expected 1")
    text, asked = ptx_text.with_static_memory(ptx_text.short(ptx), shared)
    return _Kernel(name, warps, asked, text)


def _no_scalar(value, dtype):
    raise ValueError(f"a kernel takes the number {value} as a parameter; make it a tl.constexpr")


def _lowering(target, *, api_version, backend_config: _Launch, operand_output_aliases):
    """The rule that jax-triton asks of `jax.ffi.ffi_lowering`, for XLA's own custom call."""
    kept = dict(operand_output_aliases)

    def rule(context, *arrays):
        placed = [(array, 0) if place in kept else _address(array) for place, array in enumerate(arrays)]
        unused = np.zeros((1,), np.int32)
        operands = [array for array, _ in placed] + [mlir.ir_constant(unused)] * _SCRATCH
        lowered = jax.ffi.ffi_lowering(TARGET, api_version=4, operand_output_aliases=kept)
        attributes = backend_config.attributes(tuple(offset for _, offset in placed), len(context.avals_out))
        shapes = [jax.core.ShapedArray(array.type.shape, unused.dtype) for array in operands]
        return lowered(context.replace(avals_in=shapes), *operands, **attributes)

    return rule


def _address(array) -> tuple[Any, int]:
    """The array that a contiguous slice is cut out of, and where the slice begins in it, in bytes.

    XLA would copy the slice for a kernel that is not its own; so the kernel gets the whole array and an offset.
    """
    found, offset, value = array, 0, array
    while (operation := getattr(value.owner, "opview", None)) is not None:
        source = operation.operands[0] if len(operation.operands) == 1 else None
        if operation.name == "stablehlo.slice" and _contiguous(operation):
            width = (value.type.element_type.width + 7) // 8
            offset += width * operation.start_indices[0] * math.prod(source.type.shape[1:])
            found = source
        elif operation.name != "stablehlo.reshape":
            break
        value = source
    return found, offset


def _contiguous(operation) -> bool:
    """Whether a slice takes whole rows one behind the other."""
    shape = operation.operands[0].type.shape
    whole = list(zip(operation.start_indices, operation.limit_indices, strict=True))[1:]
    return set(operation.strides) == {1} and whole == [(0, size) for size in shape[1:]]


@functools.cache
def _jax_triton():
    """jax-triton with its last steps, the message about a compiled kernel and the custom call, replaced."""
    import jax_triton
    from jax_triton import triton_lib

    def seen(module, **replaced):
        """A copy of a module's names in which a few differ: the library sees these."""
        names = {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
        return types.SimpleNamespace(**names | replaced)

    triton_lib.jax = seen(jax, ffi=types.SimpleNamespace(ffi_lowering=_lowering))
    triton_lib.zlib = types.SimpleNamespace(compress=lambda launch: launch)
    triton_lib.triton_kernel_call_lib = seen(
        triton_lib.triton_kernel_call_lib,
        TritonKernel=_kernel,
        TritonKernelCall=lambda kernel, x, y, z, parameters: _Launch(kernel, (x, y, z)),
        create_array_parameter=lambda zeroed_bytes, divisibility: None,
        create_scalar_parameter=_no_scalar,
    )
    # A rule whose result JAX keeps for similar calls would not see what a call's operands are cut out of.
    mlir.register_lowering(
        triton_lib.triton_kernel_call_p,
        functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend),
        platform="cuda",
        cacheable=False,
    )
    return jax_triton


class _HostTensor:
    """What Triton's interpreter asks of a tensor and of its storage, over a contiguous numpy array."""

    def __init__(self, array: np.ndarray | None = None):
        self.array = array

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def new_empty(self, size: int, device: str) -> "_HostTensor":
        return _HostTensor()

    def set_(self, storage: "_HostTensor", *layout) -> None:
        self.array = storage.array

    def copy_(self, other: "_HostTensor") -> None:
        """Nothing: the interpreter worked on this very array."""


def _interpreted(
    kernel, operands, grid, outputs, aliases: dict[int, int], constants: dict
) -> list[jax.Array]:
    """The call in Triton's interpreter; outputs that are not aliased start poisoned."""
    given = [_HostTensor(np.array(value, copy=True)) for value in operands]
    made = [_HostTensor(_poisoned(output)) for output in outputs]
    for source, place in aliases.items():
        made[place].array[...] = given[source].array
        given[source] = made[place]
    kernel[grid](*given, *made, **constants)
    return [jax.numpy.asarray(tensor.array) for tensor in made]


def _poisoned(output: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array that no correct kernel leaves unwritten: NaN, or a large integer."""
    array = np.empty(output.shape, output.dtype)
    array.view(np.uint8).fill(0x7F)
    return array
