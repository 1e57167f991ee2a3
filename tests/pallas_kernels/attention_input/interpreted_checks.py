"""The boundary with its products against its meaning, in Triton's interpreter. Run by test_kernels.py."""

import dataclasses

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.attention_input import fused, reference
from pallas_kernels.dense import packing
from pallas_kernels.dense import reference as dense
from pallas_kernels.hyper_connections import specs
from pallas_kernels.hyper_connections.reference import Output, Projection, first_coefficients, round_input

ptx_emulator.teach_interpreter()

ROWS = 8
# float32 sums in another order.
TOLERANCE = 3e-6
# A last bit of bfloat16 may fall the other way where a float32 sum differs in its last bit.
BFLOAT16_TOLERANCE = 2.0**-7
SUM_TOLERANCE = 1e-5
V4 = dataclasses.replace(specs.V4_FLASH, width=256, iterations=2)
V41 = dataclasses.replace(specs.V41_FLASH, width=320, iterations=2)
DEMO = dataclasses.replace(specs.DEMO, width=128, iterations=2)
# Wide enough that every warp of a product holds whole chunks before it waits.
WIDE = dataclasses.replace(specs.V41_FLASH, width=1024, iterations=1)
REFERENCE = jax.jit(reference.boundary_and_products, static_argnums=0, static_argnames="tap")


def noise(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def shared_operands(spec: specs.BoundarySpec):
    width, mixes = spec.width, spec.mixes
    projection = Projection(noise(1, mixes, spec.streams * width) / 16, noise(2, mixes), noise(3, 3))
    coefficients = jnp.abs(noise(4, ROWS, mixes))
    streams = noise(5, ROWS, spec.streams, width, dtype=spec.type)
    return streams, 1 + noise(6, width) / 10, projection, coefficients


def matrices(spec: specs.BoundarySpec, tiles: int, exact: int):
    """An FP8 matrix of `tiles` tiles of rows and, unless `exact` is 0, a BF16 one of so many rows."""
    block = 128 if spec.block == 128 else 32
    weight = expert_cases.fp8(np.random.default_rng(7), 32 * tiles, spec.width, block)
    plain = packing.join_bf16([noise(8, exact, spec.width) / 16]) if exact else None
    return packing.pack_fp8([weight], block), plain, block


def assert_same(spec, found, expected, matrix, weight) -> None:
    """What is made of rows is compared on the rows that were made, of which a rounding may fall to the other side."""
    made, low, exact, counters = found
    wanted, wanted_low, wanted_exact = expected
    for field in dataclasses.fields(wanted):
        ours, theirs = getattr(made, field.name), getattr(wanted, field.name)
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if field.name == "rounded":
            theirs = round_input(made.x, spec)
        bound = TOLERANCE if theirs.dtype == jnp.float32 else BFLOAT16_TOLERANCE
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=bound, atol=bound,
            err_msg=field.name,
        )  # fmt: skip
    products = [(low, dense.product(made.rounded, matrix), wanted_low)]
    if weight is None:
        assert exact is None and wanted_exact is None
    else:
        products.append((exact, dense.exact_product(made.x, weight), wanted_exact))
    for ours, theirs, shape in products:
        assert ours.shape[1:] == shape.shape[1:] and ours.dtype == shape.dtype
        bound = SUM_TOLERANCE * np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(ours).sum(0), theirs[0], rtol=0, atol=bound)
    assert not np.any(counters), "counters are left at zero"


def both(spec, source, norm, projection, coefficients, output, matrix, weight, block, tap=False, **options):
    counters = device_barrier.counters(fused.COUNTER_LINES)
    streams = source
    if isinstance(source, tuple):
        streams = reference.boundaries.embedded(*source, spec)
    expected = REFERENCE(spec, streams, norm, projection, matrix, weight, coefficients, output, tap=tap)
    found = fused.boundary_and_products(
        spec, source, norm, projection, matrix, counters, weight, coefficients, output, scale_block=block, tap=tap,
        **options,
    )  # fmt: skip
    return found, expected


@pytest.mark.parametrize(
    ("spec", "tiles", "exact"), [(V4, 3, 40), (V4, 2, 0), (V41, 9, 32), (DEMO, 1, 96)], ids=str
)
def test_behind_experts_and_tapped(spec, tiles, exact):
    streams, norm, projection, coefficients = shared_operands(spec)
    matrix, weight, block = matrices(spec, tiles, exact)
    experts = noise(9, ROWS, 4, spec.width, dtype=spec.type).at[3:, :-1].set(jnp.nan)
    output = Output(experts=experts, count=jnp.int32(3))
    pair = both(
        spec, streams, norm, projection, coefficients, output, matrix, weight, block, tap=True
    )  # fmt: skip
    assert_same(spec, *pair, matrix, weight)


@pytest.mark.parametrize("programs", [528, 1])
def test_weights_that_are_held_before_the_rows_are_there(programs):
    """One turn for each warp, and two of which the first is held."""
    streams, norm, projection, coefficients = shared_operands(WIDE)
    matrix, weight, block = matrices(WIDE, 2, 32)
    tile = fused.Tile(programs=programs)
    output = Output(noise(10, 1, ROWS, WIDE.width, dtype=jnp.bfloat16).astype(jnp.float32))
    pair = both(
        WIDE, streams, norm, projection, coefficients, output, matrix, weight, block, tile=tile
    )  # fmt: skip
    assert pair[0][2].shape[0] == (2 if programs > 1 else 1)
    assert_same(WIDE, *pair, matrix, weight)


@pytest.mark.parametrize("spec", [V4, V41], ids=str)
def test_in_front_of_the_first_layer(spec):
    _, norm, projection, _ = shared_operands(spec)
    matrix, weight, block = matrices(spec, 1, 0)
    table, tokens = noise(11, 20, spec.width), jnp.arange(8, dtype=jnp.int32) * 2 + 3
    start = first_coefficients(ROWS, spec) if spec.delayed else None
    pair = both(spec, (table, tokens), norm, projection, start, None, matrix, weight, block)
    assert_same(spec, *pair, matrix, weight)


def test_without_a_sublayer_before_it():
    """As behind an n-gram memory."""
    streams, norm, projection, coefficients = shared_operands(V41)
    matrix, weight, block = matrices(V41, 1, 32)
    pair = both(V41, streams, norm, projection, coefficients, None, matrix, weight, block)
    assert_same(V41, *pair, matrix, weight)


def test_shapes_are_checked():
    streams, norm, projection, coefficients = shared_operands(V4)
    matrix, _, block = matrices(V41, 1, 0)
    with pytest.raises(ValueError, match="packed words have shape"):
        both(V4, streams, norm, projection, coefficients, None, matrix, None, block)
