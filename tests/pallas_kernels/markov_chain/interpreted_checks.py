"""The fused Markov chain against its meaning, in Triton's interpreter, round by round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.markov_chain import fused, reference
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import ChainSpec
from pallas_kernels.sampling_law.reference import Filters

TOKENS, ANCHOR = 4, jnp.int32(7)
# Products of 16 terms summed in another order.
TOLERANCE = 1e-5
# (vocabulary, programs): slices of one tile, of several tiles, and a vocabulary that ends inside a slice.
CHAINS = [(96, 132), (1000, 20), (1000, 3)]
REFERENCE = jax.jit(reference.chain, static_argnums=0)


def operands(vocabulary: int, dtype=jnp.bfloat16):
    random = np.random.default_rng(vocabulary)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    tables = noise(vocabulary, 16, dtype=dtype), noise(vocabulary, 16, dtype=dtype)
    return noise(TOKENS, vocabulary) * 3, tables, jnp.asarray(random.uniform(size=(TOKENS, 2)), jnp.float32)


# Top-k, top-p and min-p of drawn chains.
FILTERS = {
    "drawn": (0, 1.0, 0.0),
    "min-p": (0, 1.0, 0.01),
    "top-k": (5, 1.0, 0.0),
    "top-k of one": (1, 1.0, 0.0),
    "top-k of all": (5000, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "top-p of one": (0, 0.0, 0.0),
    "top-k and top-p": (20, 0.8, 0.02),
}


def draw_of(how: str, uniforms) -> Draw | None:
    if how == "greedy":
        return None
    top_k, top_p, min_p = FILTERS[how]
    return Draw(Filters(jnp.float32(1.5), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)), uniforms)


# A token with filters has many rounds: those run on slices of many blocks, where most can go wrong.
@pytest.mark.parametrize(
    "vocabulary,programs,how",
    [
        *[(*chain, how) for chain in CHAINS for how in ("greedy", "drawn")],
        *[(1000, 3, how) for how in FILTERS if how != "drawn"],
    ],
)
def test_chain(vocabulary, programs, how):
    spec = ChainSpec(vocabulary, 16)
    base, tables, uniforms = operands(vocabulary)
    draw = draw_of(how, uniforms)
    for count in (TOKENS, 1, 0) if how in ("greedy", "drawn") else (2,):
        wanted = jnp.int32(count)
        expected_ids, expected = REFERENCE(spec, base, ANCHOR, *tables, wanted, draw)
        ids, by, _ = fused.chain(
            spec, base, ANCHOR, *tables, wanted, device_barrier.counters(1), draw, programs
        )
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(by[:count], expected[:count], rtol=TOLERANCE, atol=TOLERANCE)
        if draw is not None:
            np.testing.assert_array_equal(by[:count] > 0, expected[:count] > 0)
            np.testing.assert_array_equal(by[count:], 0)


@pytest.mark.parametrize("top_k,top_p", [(40, 1.0), (0, 0.5), (400, 0.5)])
def test_of_equal_tokens_the_lowest_ids_stay(top_k, top_p):
    """Logits of three values, each of them a third of the vocabulary, across slices and blocks."""
    vocabulary, programs = 1000, 3
    spec = ChainSpec(vocabulary, 16)
    base = jnp.broadcast_to(jnp.asarray([0.25, -0.0, 0.5])[jnp.arange(vocabulary) % 3], (2, vocabulary))
    zero = jnp.zeros((vocabulary, 16))
    draw = Draw(
        Filters(jnp.float32(1.0), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(0)),
        jnp.asarray(np.random.default_rng(3).uniform(size=(2, 2)), jnp.float32),
    )  # fmt: skip
    wanted = jnp.int32(2)
    expected_ids, expected = REFERENCE(spec, base, ANCHOR, zero, zero, wanted, draw)
    ids, laws, _ = fused.chain(
        spec, base, ANCHOR, zero, zero, wanted, device_barrier.counters(1), draw, programs
    )
    np.testing.assert_array_equal(laws > 0, expected > 0)
    np.testing.assert_allclose(laws, expected, rtol=TOLERANCE)
    np.testing.assert_array_equal(ids, expected_ids)


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
    for how in ("greedy", "drawn", "top-k and top-p"):
        ids, _, _ = fused.chain(
            spec,
            base.at[1].set(jnp.nan),
            ANCHOR,
            *tables,
            jnp.int32(TOKENS),
            device_barrier.counters(1),
            draw_of(how, uniforms),
        )
        assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 96))
