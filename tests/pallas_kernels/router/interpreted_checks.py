"""The fused router, alone and behind its boundary, against its meaning in Triton's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections import specs as boundary_specs
from pallas_kernels.hyper_connections.reference import Output, Projection
from pallas_kernels.router import fused, reference, specs
from pallas_kernels.router.reference import Gate

ptx_emulator.teach_interpreter()

ROWS = 8
# float32 sums in another order, through a square root and a division.
TOLERANCE = 1e-6
V4 = dataclasses.replace(specs.V4_FLASH, width=128)
V41 = dataclasses.replace(specs.V41_FLASH, width=64)
REFERENCE = jax.jit(reference.route, static_argnums=0)


def operands(spec: specs.RouterSpec, hashed: bool, ties: bool, dtype):
    random = np.random.default_rng(spec.experts)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    weight = noise(spec.experts, spec.width, dtype=jnp.bfloat16) / 8
    if ties:
        weight = jnp.repeat(weight[::2], 2, axis=0)
    bias = jnp.zeros(spec.experts) if ties else noise(spec.experts) / 4
    table = random.integers(0, spec.experts, (30, spec.chosen))
    table[7] = table[7, 0]  # a table may name an expert twice
    gate = Gate(weight, None if hashed else bias, jnp.asarray(table, jnp.int32) if hashed else None)
    tokens = jnp.asarray([7, 3, 3, 7, 29, 0, 1, 2], jnp.int32) if hashed else None
    return noise(ROWS, spec.width, dtype=dtype), gate, tokens


def assert_same(found, expected, counters):
    for name, ours, theirs in zip(expected[0]._fields, found[0], expected[0], strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    np.testing.assert_array_equal(found[1], expected[1])
    assert not np.any(counters), "counters are left at zero"


@pytest.mark.parametrize("spec", [V4, V41, specs.DEMO, specs.TWIN], ids=str)
@pytest.mark.parametrize(
    "count,hashed,ties", [(8, False, False), (1, False, True), (0, False, False), (6, True, False)]
)
def test_routes(spec, count, hashed, ties):
    x, gate, tokens = operands(spec, hashed, ties, jnp.bfloat16 if spec in (V4, V41) else jnp.float32)
    expected = REFERENCE(spec, x, gate, jnp.int32(count), tokens)
    *found, counters = fused.route(
        spec, x, gate, jnp.int32(count), device_barrier.counters(fused.COUNTER_LINES), tokens
    )
    assert_same(found, expected, counters)


@pytest.mark.parametrize("spec", [V4, V41, specs.DEMO], ids=str)
def test_all_rows_may_choose_the_same_experts(spec):
    x, gate, _ = operands(spec, False, False, jnp.float32)
    x = jnp.repeat(x[:1], ROWS, axis=0)
    expected = REFERENCE(spec, x, gate, jnp.int32(ROWS), None)
    *found, counters = fused.route(
        spec, x, gate, jnp.int32(ROWS), device_barrier.counters(fused.COUNTER_LINES)
    )
    assert int(found[0].count[0]) == spec.chosen
    assert_same(found, expected, counters)


@pytest.mark.parametrize("spec", [V4, V41], ids=str)
def test_of_many_equal_scores_the_lowest_ids_are_chosen(spec):
    x, gate, _ = operands(spec, False, False, jnp.float32)
    gate = Gate(jnp.zeros_like(gate.weight), jnp.zeros(spec.experts).at[jnp.asarray([130, 131, 7])].set(1.0))
    *found, counters = fused.route(
        spec, x, gate, jnp.int32(ROWS), device_barrier.counters(fused.COUNTER_LINES)
    )
    assert np.asarray(found[1]).tolist() == [[7, 130, 131, 0, 1, 2]] * ROWS
    assert_same(found, REFERENCE(spec, x, gate, jnp.int32(ROWS), None), counters)


def test_dead_rows_may_hold_anything():
    x, gate, _ = operands(V4, False, False, jnp.float32)
    expected = REFERENCE(V4, x, gate, jnp.int32(3))
    *found, counters = fused.route(
        V4, x.at[3:].set(jnp.nan), gate, jnp.int32(3), device_barrier.counters(fused.COUNTER_LINES)
    )
    assert_same(found, expected, counters)


@pytest.mark.parametrize(
    "spec,router",
    [
        (dataclasses.replace(boundary_specs.V4_FLASH, width=128, iterations=2), V4),
        (dataclasses.replace(boundary_specs.V41_FLASH, width=64, iterations=2), V41),
    ],
    ids=["v4", "v4.1"],
)
def test_the_boundary_and_its_router_in_one_launch(spec, router):
    random = np.random.default_rng(3)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    width, mixes = spec.width, spec.mixes
    _, gate, _ = operands(router, False, False, jnp.float32)
    projection = Projection(noise(mixes, spec.streams * width) / 16, noise(mixes), noise(3))
    coefficients = jnp.asarray(random.uniform(0, 1, (ROWS, mixes)).astype(np.float32))
    streams, norm = noise(ROWS, spec.streams, width, dtype=spec.type), 1 + noise(width) / 10
    output, count = Output(noise(2, ROWS, width)), jnp.int32(6)
    counters = device_barrier.counters(fused.COUNTER_LINES)
    made, *found, counters = fused.boundary_and_route(
        spec, router, streams, norm, projection, gate, count, counters, coefficients, output
    )
    boundary = jax.jit(boundaries.boundary, static_argnums=0)
    expected = boundary(spec, streams, norm, projection, coefficients, output)
    for name in ("streams", "coefficients", "x", "rounded"):
        np.testing.assert_allclose(
            np.asarray(getattr(made, name), np.float32), np.asarray(getattr(expected, name), np.float32),
            rtol=3e-6, atol=3e-6, err_msg=name,
        )  # fmt: skip
    assert_same(found, REFERENCE(router, made.x, gate, count), counters)
