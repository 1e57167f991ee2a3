"""How a Triton kernel is called from JAX.

Knows: the one lowering that keeps Triton kernels inside XLA's command buffer, which GPU generation to compile
for on a machine without one, and how the same call runs in Triton's interpreter. Does not know: any kernel.

jax-triton 0.3.1 lowers to a custom call that XLA cannot capture: the graph is cut at each kernel. jaxlib's CUDA
plugin also holds a typed handler, `triton_kernel_call_ffi`, which takes the same serialised kernel and is
captured. This file sends jax-triton's kernels there; with a later jax-triton that does so itself, it goes away.
"""

import contextlib
import contextvars
import functools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

HANDLER = "triton_kernel_call_ffi"
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
    *operands: jax.Array | int | float,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> list[jax.Array]:
    """Launches a `triton.jit` kernel on operands and fresh outputs, and returns the outputs.

    The kernel's parameters are the operands in order (arrays become pointers, Python numbers scalars), then the
    outputs, then its `tl.constexpr` ones, which `constants` names.

    Args:
      grid: programs along up to three axes.
      outputs: shape and type of each output.
      aliases: {operand index: output index} of outputs that are updated in place; the index counts arrays and
        numbers.
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


@functools.cache
def _jax_triton():
    """jax-triton with its last step, the custom call, sent to the captured handler."""
    import jax_triton
    from jax_triton import triton_lib

    real = jax.ffi.ffi_lowering

    def captured(target, *, api_version, backend_config, operand_output_aliases):
        rule = real(HANDLER, api_version=4, operand_output_aliases=operand_output_aliases)
        return lambda context, *arrays: rule(context, *arrays, opaque=backend_config)

    # The library sees a copy of the jax namespace that differs in this one function.
    seen = types.SimpleNamespace(
        **{name: getattr(jax, name) for name in dir(jax) if not name.startswith("__")}
    )
    seen.ffi = types.SimpleNamespace(ffi_lowering=captured)
    triton_lib.jax = seen
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
    given = [
        value if isinstance(value, int | float) else _HostTensor(np.array(value, copy=True))
        for value in operands
    ]
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
