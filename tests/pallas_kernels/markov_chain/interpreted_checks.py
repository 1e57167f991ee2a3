"""The fused Markov chain against its meaning, in Triton's interpreter, round by round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.markov_chain import fused, reference
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import ChainSpec

TOKENS, ANCHOR = 4, jnp.int32(7)
# Products of 16 terms summed in another order.
TOLERANCE = 1e-5
# (vocabulary, programs): slices of one tile, of several tiles, and a vocabulary that ends inside a slice.
CHAINS = [(96, 132), (1000, 132), (1000, 3)]
REFERENCE = jax.jit(reference.chain, static_argnums=0)


def operands(vocabulary: int, dtype=jnp.bfloat16):
    random = np.random.default_rng(vocabulary)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    tables = noise(vocabulary, 16, dtype=dtype), noise(vocabulary, 16, dtype=dtype)
    return noise(TOKENS, vocabulary) * 3, tables, jnp.asarray(random.uniform(size=(TOKENS, 2)), jnp.float32)


def draws(uniforms):
    return [
        None,
        Draw(jnp.float32(1.5), jnp.float32(0.01), uniforms),
        Draw(jnp.float32(0), jnp.float32(0), uniforms),
    ]


@pytest.mark.parametrize("vocabulary,programs", CHAINS)
@pytest.mark.parametrize("how", [0, 1, 2], ids=["greedy", "drawn", "drawn at temperature 0"])
def test_chain(vocabulary, programs, how):
    spec = ChainSpec(vocabulary, 16)
    base, tables, uniforms = operands(vocabulary)
    draw = draws(uniforms)[how]
    for count in (TOKENS, 1, 0) if how == 0 else (TOKENS,):
        wanted = jnp.int32(count)
        expected_ids, expected_logits = REFERENCE(spec, base, ANCHOR, *tables, wanted, draw)
        ids, logits, _ = fused.chain(
            spec, base, ANCHOR, *tables, wanted, device_barrier.counters(1), draw, programs
        )
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(logits[:count], expected_logits[:count], rtol=TOLERANCE, atol=TOLERANCE)


def test_equal_logits_go_to_the_lower_id_forwards_and_backwards():
    spec = ChainSpec(1000, 16)
    _, tables, _ = operands(1000)
    base = jnp.zeros((TOKENS, 1000)).at[:, jnp.asarray([333, 340, 700, 990])].set(9.0)
    zero = jnp.zeros_like(tables[0])
    ids, _, _ = fused.chain(
        spec, base, ANCHOR, zero, zero, jnp.int32(TOKENS), device_barrier.counters(1), None, 3
    )
    assert list(ids) == [333] * TOKENS


def test_ids_stay_inside_the_vocabulary_whatever_the_logits_are():
    spec = ChainSpec(96, 16)
    base, tables, uniforms = operands(96)
    for draw in draws(uniforms):
        ids, _, _ = fused.chain(
            spec,
            base.at[1].set(jnp.nan),
            ANCHOR,
            *tables,
            jnp.int32(TOKENS),
            device_barrier.counters(1),
            draw,
        )
        assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 96))
