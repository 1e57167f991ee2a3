"""Draws repeat from their seed, differ wherever they should, and follow the law they are given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from v4flash.errors import UsageError
from v4flash.speculative.randomness import Purpose, categorical, invert, round_key, seed_key, uniform

# The draws are fixed by their seeds, so a test either always passes or always fails. The level only has to
# be far below what a right sampler shows by chance and far above what a wrong one shows (below 1e-50).
CHI_SQUARE_LEVEL = 1e-5

compiled_categorical = jax.jit(categorical, static_argnums=3)


def chi_square(counts, law):
    """p-value of counts against a law; a token outside the law's support is refused at once."""
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    assert counts[law == 0].sum() == 0
    expected = counts.sum() * law[law > 0] / law.sum()
    return stats.chisquare(counts[law > 0], expected).pvalue


def test_a_seed_keeps_its_meaning_between_processes():
    # Recorded once; a different value means that every sampled text of every seed has changed.
    drawn = [float(uniform(seed_key(7), 100, purpose)) for purpose in Purpose]
    assert drawn == [0.10054123401641846, 0.9872211217880249, 0.7955338954925537]


def test_a_draw_depends_on_its_own_position_only():
    key = seed_key(11)
    together = uniform(key, jnp.arange(20).reshape(4, 5), Purpose.DRAFT, draws=(2,))
    assert together.shape == (4, 5, 2) and together.dtype == jnp.float32
    np.testing.assert_array_equal(together[2, 3], uniform(key, 13, Purpose.DRAFT, draws=(2,)))
    np.testing.assert_array_equal(
        together[1, 1], jax.jit(lambda at: uniform(key, at, Purpose.DRAFT, draws=(2,)))(6)
    )


def test_seeds_positions_and_purposes_all_matter():
    # The last two seeds differ from the first in their upper half only.
    seeds = [1, 2, 1 + 2**32, 1 + 2**63]
    drawn = [
        float(uniform(seed_key(seed), position, purpose))
        for seed in seeds
        for position in (0, 1, 2, 1_048_576)
        for purpose in Purpose
    ]
    assert len(set(drawn)) == len(seeds) * 4 * 3


def test_every_step_key_is_its_own():
    keys = [seed_key(1), *(round_key(seed_key(seed), position) for seed in (1, 2) for position in range(4))]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == len(keys)
    np.testing.assert_array_equal(jax.jit(round_key)(seed_key(1), 3), round_key(seed_key(1), 3))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", None, True])
def test_seeds_outside_the_range_are_refused(seed):
    with pytest.raises(UsageError, match="seed: expected a whole number from 0"):
        seed_key(seed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, Purpose.DRAFT), (0, Purpose.ACCEPT)),
        ((0, Purpose.DRAFT), (0, Purpose.RESAMPLE)),
        ((0, Purpose.ACCEPT), (0, Purpose.RESAMPLE)),
        ((0, Purpose.DRAFT), (1, Purpose.DRAFT)),
        ((0, Purpose.RESAMPLE), (1, Purpose.DRAFT)),
    ],
)
def test_draws_are_independent(one, other):
    positions = jnp.arange(100_000)
    bins = [
        np.asarray(uniform(seed_key(5), positions + shift, purpose) * 12).astype(int)
        for shift, purpose in (one, other)
    ]
    table = np.bincount(bins[0] * 12 + bins[1], minlength=144)
    assert chi_square(table, np.ones(144)) > CHI_SQUARE_LEVEL


@pytest.mark.parametrize("vocabulary", [1, 2, 8, 600])
def test_tokens_follow_their_law_and_its_support(vocabulary):
    generator = np.random.default_rng(vocabulary)
    law = generator.exponential(size=vocabulary) + 0.1
    law[generator.random(vocabulary) < 0.3] = 0
    law[-1] += 0.5
    # Not normalised on purpose: only proportions count.
    draws = 50_000
    laws = jnp.broadcast_to(jnp.asarray(law, jnp.float32), (draws, vocabulary))
    tokens = compiled_categorical(laws, seed_key(3), jnp.arange(draws), Purpose.RESAMPLE)
    assert tokens.dtype == jnp.int32
    counts = np.bincount(tokens, minlength=vocabulary)
    if vocabulary == 1:
        assert counts[0] == draws
    else:
        assert chi_square(counts, law) > CHI_SQUARE_LEVEL


def test_two_seeds_give_different_tokens():
    law = jnp.full((50, 8), 0.125)
    texts = [compiled_categorical(law, seed_key(seed), jnp.arange(50), Purpose.DRAFT) for seed in (1, 2)]
    assert not np.array_equal(*texts)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_extreme_uniforms_never_leave_the_support(wide):
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        ends = jnp.asarray([0, jnp.finfo(dtype).tiny, 0.5, 1 - jnp.finfo(dtype).epsneg], dtype)
        uniforms = jnp.stack(jnp.meshgrid(ends, ends), axis=-1).reshape(-1, 2)
        generator = np.random.default_rng(0)
        for vocabulary in (1, 8, 37, 1000):
            laws = generator.exponential(size=(20, vocabulary)) ** 8
            laws[generator.random(laws.shape) < 0.8] = 0
            laws[np.arange(20), generator.integers(vocabulary, size=20)] = 1e-30
            laws = np.repeat(laws, len(uniforms), axis=0).astype(dtype)
            tokens = np.asarray(jax.jit(invert)(laws, jnp.tile(uniforms, (20, 1))))
            assert np.all(np.take_along_axis(laws, tokens[:, None], axis=1) > 0)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_row_without_mass_still_gives_an_id_of_the_vocabulary(value):
    tokens = invert(jnp.full((3, 37), value), jnp.asarray([[0.0, 0.0], [0.5, 0.5], [0.99, 0.99]]))
    assert np.all((0 <= np.asarray(tokens)) & (np.asarray(tokens) < 37))


def test_inversion_selects_by_running_sums():
    # Four blocks of four tokens; each block holds a quarter, and inside a block the law is 1:2:3:2 of 8.
    law = jnp.tile(jnp.asarray([1.0, 2, 3, 2]) / 32, 4)
    assert law.size == 16
    picks = invert(
        jnp.broadcast_to(law, (4, 16)), jnp.asarray([[0.0, 0.0], [0.26, 0.13], [0.74, 0.70], [0.75, 0.80]])
    )
    np.testing.assert_array_equal(picks, [0, 5, 10, 15])
