"""The boundary with its products: its meaning in Triton's interpreter, and its compiled form at published shapes."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device_barrier, tuning
from pallas_kernels.attention_input import fused
from pallas_kernels.dense.specs import EXACT_PRODUCTS, PRODUCTS
from pallas_kernels.hyper_connections import fused as boundaries
from pallas_kernels.hyper_connections.reference import Output, Projection
from pallas_kernels.hyper_connections.specs import SPECS


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize(
    ("model", "exact"),
    [("v4-flash", "ratio 4"), ("v4-flash", None), ("v4.1-flash", "ratio 2"), ("demo", "ratio 2")],
)
def test_nothing_spills_and_products_find_room_beside_the_boundary(model, exact, capability):
    spec, low = SPECS[model], PRODUCTS[f"{model} wq_a wkv"]
    weight = EXACT_PRODUCTS[f"{model} {exact}"].weight() if exact else None
    rows, width = 8, spec.width

    def joined(streams, norm, projection, matrix, counters, weight, coefficients, output):
        return fused.boundary_and_products(
            spec,
            streams,
            norm,
            projection,
            matrix,
            counters,
            weight,
            coefficients,
            output,
            scale_block=low.block,
        )

    (made,) = compile_for_gpu.kernels(
        joined, array(rows, spec.streams, width, dtype=spec.type), array(width),
        Projection(array(spec.mixes, spec.streams * width), array(spec.mixes), array(3)), low.matrix(),
        array(fused.COUNTER_LINES * device_barrier.LINE_WORDS, dtype=jnp.int32), weight, array(rows, spec.mixes),
        Output(experts=array(rows, 7, width, dtype=spec.type), count=array(dtype=jnp.int32)), capability=capability,
    )  # fmt: skip
    assert made.name == "boundary_and_products" and made.spilled_bytes == 0
    sizes = 32 * low.matrix().words.shape[0], 0 if weight is None else weight.shape[0], width
    tile = fused.TILE._replace(**tuning.choice("attention_input", tuning.by_shape(*sizes), {}))
    at_once = compile_for_gpu.programs_at_once(made, tile.warps)
    assert at_once >= 3
    first = width // tile.columns + rows * (boundaries.SHARES + 1)
    assert first < compile_for_gpu.PROCESSORS * at_once
