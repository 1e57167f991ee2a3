"""The fused index selection compiles for both GPUs at real shapes, and keeps its values in registers."""

import compile_for_gpu
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.index_selection import fused, specs
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.rows import Columns

ROWS, CONTEXT = 8, 65536
SHARED_BYTES = 232448  # what one program may use on either GPU
CASES = {
    "ratio 4": specs.V4_FLASH,
    "ratio 2": specs.V41_RATIO_2,
    "source": specs.V41_SOURCE,
    "member": specs.V41_MEMBER,
    "demo source": specs.DEMO_SOURCE,
}
QUICK = ("ratio 4", "source")  # compiled every time; the others with the slow tests


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(spec):
    listed = None
    if spec.role == "member":
        listed = Listed(shape(jnp.int32, ROWS, spec.kept), shape(jnp.int32, ROWS))
    context = CONTEXT if spec.quantise else 8192
    return (
        Columns(shape(jnp.float32, 1, ROWS, spec.heads * spec.width), 0, spec.heads * spec.width),
        Columns(shape(jnp.float32, 4, ROWS, spec.heads + 64), 64, spec.heads),
        shape(jnp.float32, ROWS, 2, spec.rope // 2),
        shape(spec.type, context // spec.ratio + ROWS, spec.width),
        shape(jnp.int32),
        shape(jnp.int32),
        listed,
    )


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_no_spills_at_real_shapes(name, capability):
    spec = CASES[name]

    def choose(q, weights, table, keys, length, count, candidates):
        return fused.choose(q, weights, table, keys, length, count, spec, candidates)

    found = compile_for_gpu.kernels(choose, *operands(spec), capability=capability)
    assert {kernel.name for kernel in found} == {"index_scores", "index_choice"}
    for kernel in found:
        assert kernel.spilled_bytes == 0, kernel.name
        assert kernel.shared <= SHARED_BYTES, kernel.name


def test_more_entries_than_a_row_can_hold_are_refused():
    q, weights, table, keys, length, count, _ = operands(specs.V4_FLASH)
    keys = shape(keys.dtype, 1 << 18, keys.shape[1])
    with pytest.raises(ValueError, match="choose a shorter context"):
        jax.eval_shape(
            lambda *arrays: fused.choose(q, weights, table, *arrays, specs.V4_FLASH),
            keys,
            length,
            count,
        )
