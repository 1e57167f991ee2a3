"""The kernels around an Engram layer's product against their meaning, in Triton's interpreter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.engram import fused, reference, specs
from pallas_kernels.engram.reference import Memory
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections.reference import Output

ROWS = 8
# float32 sums in another order, through a square root and a sigmoid.
TOLERANCE = 1e-5
PRIMES = (97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197,
          199, 211, 223)  # fmt: skip
V41 = dataclasses.replace(specs.V41_FLASH, width=160, head_dim=64, heads=2)


def noise(seed: int, *shape: int, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32), dtype)


def memory(spec: specs.EngramSpec, packed: bool) -> tuple[Memory, list[int]]:
    random = np.random.default_rng(0)
    primes = np.asarray(PRIMES[: spec.columns], np.int32)
    offsets = np.concatenate([[0], np.cumsum(primes)[:-1]]).astype(np.int32)
    factors = [int(factor) * 2 + 1 for factor in random.integers(2**40, 2**46, spec.ngrams)]
    halves = jnp.asarray([[factor & 0xFFFFFFFF, factor >> 32] for factor in factors], jnp.uint32)
    shape = int(primes.sum()), spec.head_dim
    table, scale = noise(1, *shape), None
    if packed:
        payload = random.integers(0, 256, shape).astype(np.uint8)
        table = jnp.asarray(np.where(payload & 0x7F == 0x7F, 0, payload), jnp.uint8)
        scale = jnp.asarray(random.integers(118, 131, (shape[0], shape[1] // 32)), jnp.uint8)
    token_map = jnp.asarray(random.integers(0, 99092, 500), jnp.int32)
    return Memory(table, scale, token_map, halves, jnp.asarray(primes), jnp.asarray(offsets)), factors


@pytest.mark.parametrize(
    "spec,packed", [(V41, True), (dataclasses.replace(specs.DEMO, block=0), False)], ids=str
)
@pytest.mark.parametrize("start", [0, 1001])
def test_lookup(spec, packed, start):
    table, _ = memory(spec, packed)
    ring = jnp.asarray(np.random.default_rng(2).integers(0, 500, 40), jnp.int32)
    expected = reference.lookup(spec, table, ring, jnp.int32(start), ROWS)
    found = fused.lookup(spec, table, ring, jnp.int32(start), ROWS)
    np.testing.assert_array_equal(found, expected)


def test_hashes_are_those_of_long_integers():
    table, factors = memory(V41, False)
    ids = np.random.default_rng(3).integers(0, 99092, (ROWS, V41.ngrams))
    found = np.asarray(reference.table_rows(V41, table, jnp.asarray(ids, jnp.int32)))
    for row in range(ROWS):
        mixed = 0
        for place in range(V41.ngrams):
            mixed ^= int(ids[row, place]) * factors[place]
            for head in range(V41.heads) if place else ():
                column = (place - 1) * V41.heads + head
                assert found[row, column] == mixed % PRIMES[column] + int(table.offsets[column])


@pytest.mark.parametrize("behind", ["streams", "product", "experts"])
@pytest.mark.parametrize("spec", [V41, specs.DEMO], ids=str)
def test_merge(spec, behind):
    width, streams = spec.width, noise(4, ROWS, spec.streams, spec.width, dtype=spec.type)
    partials = noise(5, 3, ROWS, (spec.streams + 1) * width)
    weights = noise(6, spec.streams, width), noise(7, spec.streams, width)
    coefficients = jnp.abs(noise(8, ROWS, (2 + spec.streams) * spec.streams)) / 2
    output, before = None, streams
    if behind == "product":
        output = Output(noise(9, 2, ROWS, width))
    elif behind == "experts":
        experts = noise(9, ROWS, 3, width, dtype=spec.type).at[5:, :-1].set(jnp.nan)
        output = Output(experts=experts, count=jnp.int32(5))
    if output is not None:
        before = boundaries.spread(coefficients, boundaries.output_rows(output, spec.type), streams)
    expected = reference.merge(spec, before, partials, *weights)
    found = fused.merge(spec, streams, partials, *weights, coefficients, output)
    tolerance = TOLERANCE if spec.type == jnp.float32 else 2.0**-7  # a last bit of bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
    )
