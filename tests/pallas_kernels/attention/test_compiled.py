"""The fused attention core compiles for both GPUs at real shapes, and keeps its values in registers."""

import compile_for_gpu
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.attention import kernels
from pallas_kernels.attention.reference import Block, Chosen, Visible
from pallas_kernels.attention.specs import DEMO, V4_FLASH, V41_FLASH
from pallas_kernels.rows import Columns

ROWS, CONTEXT = 8, 65536
SHARED_BYTES = 232448  # what one program may use on either GPU
CASES = {
    "window": (V4_FLASH, None),
    "ratio 4": (V4_FLASH, Chosen),
    "ratio 128": (V4_FLASH, Visible),
    "block": (V4_FLASH, Block),
    "shared window": (V41_FLASH, None),
    "shared choice": (V41_FLASH, Chosen),
    "demo": (DEMO, Chosen),
}
QUICK = ("ratio 4", "shared window")  # compiled every time; the others with the slow tests


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(spec, kind):
    far = {
        type(None): None,
        Chosen: Chosen(
            shape(spec.type, CONTEXT // 4 + 2, spec.width),
            shape(jnp.int32, ROWS, 512),
            shape(jnp.int32, ROWS),
        ),
        Visible: Visible(shape(spec.type, CONTEXT // 128 + 1, spec.width), 128),
        Block: Block(shape(spec.type, ROWS, spec.width)),
    }[kind or type(None)]
    return (
        Columns(shape(jnp.float32, 1, ROWS, spec.heads * spec.width), 0, spec.heads * spec.width),
        shape(jnp.float32, ROWS, 2, spec.rope // 2),
        shape(jnp.float32, spec.heads),
        shape(spec.type, spec.window + ROWS, spec.width),
        shape(jnp.int32),
        shape(jnp.int32),
        far,
        shape(jnp.int32, kernels.counter_lines(ROWS, spec) * device_barrier.LINE_WORDS),
    )


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_no_spills_at_real_shapes(name, capability):
    spec, kind = CASES[name]
    (kernel,) = compile_for_gpu.kernels(
        lambda *arrays: kernels.attend(*arrays, spec),
        *operands(spec, kind),
        capability=capability,
    )
    assert kernel.spilled_bytes == 0
    assert kernel.shared <= SHARED_BYTES
