"""The fused boundary against its meaning, in Triton's interpreter at reduced widths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.hyper_connections import fused, reference, specs
from pallas_kernels.hyper_connections.reference import Output, Projection

ptx_emulator.teach_interpreter()

# float32 sums in another order. Coefficients pass 2 * 20 divisions, but every one renormalises.
TOLERANCE = 3e-6
# A last bit of bfloat16 may fall the other way where a float32 sum differs in its last bit.
BFLOAT16_TOLERANCE = 2.0**-7
# One model keeps its 20 Sinkhorn steps, which take most of the interpreter's time.
V4 = dataclasses.replace(specs.V4_FLASH, width=128, iterations=3)
V41 = dataclasses.replace(specs.V41_FLASH, width=160, iterations=2)
DEMO = dataclasses.replace(specs.DEMO, width=64)
EXACT = dataclasses.replace(specs.TWIN, width=64, block=0)


REFERENCE = jax.jit(reference.boundary, static_argnums=0, static_argnames=("last", "tap"))


@functools.cache
def operands(spec: specs.BoundarySpec, rows: int, last: bool):
    random = np.random.default_rng(rows)
    width, streams = spec.width, spec.streams
    mixes = streams if last else spec.mixes

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    projection = Projection(
        jnp.asarray(random.normal(size=(mixes, streams * width)).astype(np.float32) / np.float32(16)),
        noise(mixes), noise(1 if last else 3),
    )  # fmt: skip
    norm = jnp.asarray(random.uniform(0.8, 1.2, width).astype(np.float32), jnp.bfloat16)
    coefficients = jnp.asarray(random.uniform(0, 1, (rows, spec.mixes)).astype(np.float32))
    return (
        noise(rows, streams, width, dtype=spec.type), norm, None if last and spec.delayed else projection,
        coefficients, noise(3, rows, width), noise(rows, 4, width, dtype=spec.type),
    )  # fmt: skip


def assert_same(found: reference.Boundary, expected: reference.Boundary, rows=slice(None)) -> None:
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        tolerance = TOLERANCE if theirs.dtype == jnp.float32 else BFLOAT16_TOLERANCE
        np.testing.assert_allclose(
            np.asarray(ours, np.float32)[rows], np.asarray(theirs, np.float32)[rows],
            rtol=tolerance, atol=tolerance, err_msg=field.name,
        )  # fmt: skip


@pytest.mark.parametrize(
    "spec,last", [(V4, False), (V41, False), (DEMO, False), (EXACT, False), (V4, True), (V41, True)], ids=str
)
def test_a_boundary_behind_a_split_product(spec, last):
    streams, norm, projection, coefficients, partials, _ = operands(spec, 8, last)
    arguments = (norm, projection, coefficients, Output(partials))
    expected = REFERENCE(spec, streams, *arguments, last=last, tap=last)
    counters = device_barrier.counters(fused.COUNTER_LINES)
    found, counters = fused.boundary(
        spec, streams, norm, projection, counters, coefficients, Output(partials), last=last, tap=last
    )
    assert_same(found, expected)
    assert not np.any(counters), "counters are left at zero"


@pytest.mark.parametrize("spec,count", [(V4, 1), (V41, 8)], ids=str)
def test_a_boundary_behind_experts_reads_live_rows_only(spec, count):
    streams, norm, projection, coefficients, _, experts = operands(spec, 8, False)
    experts = experts.at[count:, :-1].set(jnp.nan)
    output = Output(experts=experts, count=jnp.int32(count))
    expected = REFERENCE(spec, streams, norm, projection, coefficients, output, tap=True)
    found, _ = fused.boundary(
        spec, streams, norm, projection, device_barrier.counters(1), coefficients, output, tap=True
    )
    assert_same(found, expected)
    assert np.all(np.isfinite(np.asarray(found.streams, np.float32)))


@pytest.mark.parametrize("spec", [V4, V41], ids=str)
def test_the_first_boundary_and_one_without_a_sublayer_before_it(spec):
    streams, norm, projection, _, _, _ = operands(spec, 8, False)
    table, tokens = (
        jax.random.normal(jax.random.key(5), (20, spec.width)),
        jnp.arange(8, dtype=jnp.int32) * 2 + 3,
    )
    start = reference.first_coefficients(8, spec)
    expected = REFERENCE(spec, reference.embedded(table, tokens, spec), norm, projection, start)
    found, counters = fused.boundary(
        spec, (table, tokens), norm, projection, device_barrier.counters(1), start
    )
    assert_same(found, expected)
    expected = REFERENCE(spec, streams, norm, projection, start)
    assert_same(fused.boundary(spec, streams, norm, projection, counters, start)[0], expected)


def test_a_row_gives_the_same_bits_whatever_its_neighbours_hold():
    streams, norm, projection, coefficients, partials, _ = operands(V4, 8, False)
    counters = device_barrier.counters(1)
    alone, _ = fused.boundary(V4, streams, norm, projection, counters, coefficients, Output(partials))
    others = Output(partials.at[:, 1:].multiply(3.0))
    beside, _ = fused.boundary(
        V4, streams.at[1:].set(jnp.nan), norm, projection, counters, coefficients, others
    )
    for field in ("streams", "coefficients", "x", "rounded"):
        np.testing.assert_array_equal(
            np.asarray(getattr(beside, field)[0], np.float32),
            np.asarray(getattr(alone, field)[0], np.float32),
        )


def test_zero_streams_stay_finite():
    streams, norm, projection, coefficients, partials, _ = operands(V41, 8, False)
    zero = Output(jnp.zeros_like(partials))
    found, _ = fused.boundary(
        V41, jnp.zeros_like(streams), norm, projection, device_barrier.counters(1), coefficients, zero
    )
    assert not np.any(np.asarray(found.x, np.float32)) and np.all(np.isfinite(found.coefficients))
