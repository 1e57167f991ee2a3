"""The accept rules on hand-made cases, and the whole sampler by Monte Carlo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.randomness import Purpose, categorical, round_key, seed_key
from v4flash.speculative.rejection import (
    acceptance_probability,
    propose,
    verify,
    verify_blockwise,
    verify_greedy,
    verify_tokenwise,
)

V, K = 8, 3
SEEDS = 200_000
# Draws are fixed by their seeds, so this is no flake rate: a wrong law shows p-values below 1e-50 here.
CHI_SQUARE_LEVEL = 1e-5
FILTERS = dict(temperature=0.7, top_p=0.8, top_k=4, min_p=0.1)

compiled_verify = jax.jit(verify, static_argnames="rule")
RULES = [verify_tokenwise, verify_blockwise]


def rows_choosing(*tokens):
    """Logits [T, V] whose argmax in row i is tokens[i]."""
    return jnp.asarray(np.eye(V, dtype=np.float32)[list(tokens)] * 3 - 1)


@pytest.mark.parametrize(
    ("drafts", "live", "accepted", "token"),
    [
        ([1, 2, 3], 3, 3, 4),
        ([1, 2, 3], 2, 2, 3),
        ([1, 2, 3], 0, 0, 1),
        ([1, 2, 3], -5, 0, 1),
        ([1, 2, 3], 99, 3, 4),
        ([1, 2, 7], 3, 2, 3),
        ([1, 7, 3], 3, 1, 2),
        ([7, 2, 3], 3, 0, 1),
        ([7, 7, 7], 1, 0, 1),
    ],
)
def test_greedy_accepts_the_leading_matches(drafts, live, accepted, token):
    logits = rows_choosing(1, 2, 3, 4, 5, 6)
    verdict = jax.jit(verify_greedy)(jnp.asarray(drafts), logits, jnp.int32(live))
    assert verdict == (accepted, token)
    # One-hot laws make the token-wise rule say the same whatever the coins are.
    laws = jax.nn.one_hot(jnp.asarray([1, 2, 3, 4, 5, 6]), V)
    verdict = jax.jit(verify_tokenwise)(
        jnp.asarray(drafts),
        jax.nn.one_hot(jnp.asarray(drafts), V),
        laws,
        jnp.int32(live),
        jnp.full(3, 0.9999),
        jnp.full((4, 2), 0.5),
    )
    assert verdict == (accepted, token)


def test_greedy_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[0, 1, 1, 0], [2, 0, 2, 2]], jnp.float32)
    assert verify_greedy(jnp.asarray([1]), logits, 1) == (1, 0)
    assert verify_greedy(jnp.asarray([2]), logits, 1) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("live", range(K + 1))
def test_rows_past_the_live_ones_are_never_used(temperature, live, rule):
    params = SamplingParams.make(temperature=temperature, top_p=0.9 if temperature else 1.0)
    generator = np.random.default_rng(live)
    logits = generator.normal(size=(K + 1, V)).astype(np.float32)
    law = np.asarray(jax.nn.softmax(jnp.asarray(generator.normal(size=(K, V)), jnp.float32)))
    drafts = law.argmax(axis=-1).astype(np.int32)
    soiled = [drafts.copy(), law.copy(), logits.copy()]
    soiled[0][live:] = 2**30
    soiled[1][live:] = np.nan
    soiled[2][live + 1 :] = np.nan
    for seed in range(8):
        clean, dirty = (
            compiled_verify(*block, jnp.int32(live), params, seed_key(seed), jnp.int32(40), rule=rule)
            for block in ((drafts, law, logits), soiled)
        )
        assert clean == dirty and 0 <= int(dirty.token) < V


def test_no_drafts_is_plain_sampling_and_one_program_serves_every_temperature():
    traces = []

    @jax.jit
    def plain(logits, params, key, position):
        traces.append(logits.shape)
        none = jnp.zeros(0, jnp.int32), jnp.zeros((0, V), jnp.float32)
        return verify(*none, logits, jnp.int32(0), params, key, position)

    drawn = jax.jit(lambda law, key, position: categorical(law, key, position, Purpose.RESAMPLE))
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(K + 1, V)), jnp.float32)
    for options in ({"temperature": 0}, {}, FILTERS, {"top_p": 0}):
        params = SamplingParams.make(**options)
        law = jax.jit(target_law)(logits[0], params)
        for position in range(5):
            verdict = plain(logits, params, seed_key(9), jnp.int32(position))
            assert verdict == (0, drawn(law, seed_key(9), position))
            # The same token comes out of a block of three drafts none of which is live.
            block = np.zeros(K, np.int32), np.full((K, V), 1 / V, np.float32)
            assert verdict == compiled_verify(
                *block, logits, jnp.int32(0), params, seed_key(9), jnp.int32(position)
            )
    assert len(traces) == 1


def test_verdicts_repeat_with_the_seed_and_differ_between_seeds():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(K + 1, V)), jnp.float32)
    block = (
        jnp.asarray([1, 2, 3], jnp.int32),
        jnp.full((K, V), 1 / V),
        logits,
        jnp.int32(K),
        SamplingParams.make(),
    )
    verdicts = [compiled_verify(*block, seed_key(seed), jnp.int32(7)) for seed in (1, 1, 2, 3, 4, 5, 6)]
    assert verdicts[0] == verdicts[1]
    assert len({(int(a), int(t)) for a, t in verdicts}) > 2


def test_a_greedy_proposal_is_the_argmax_with_a_one_hot_law():
    logits = jnp.asarray([0, 2, 1, 2, 0, 0, 0, 0], jnp.float32)
    proposal = propose(logits, SamplingParams.make(temperature=0), seed_key(1), 3)
    assert proposal.token == 1 and proposal.token.dtype == jnp.int32
    np.testing.assert_array_equal(proposal.law, np.eye(V)[1])


# The toy model of the Monte Carlo: logits depend on the previous token only.
MODEL = np.random.default_rng(17)
TARGET = (MODEL.normal(size=(V, V)) * 1.2).astype(np.float32)
DRAFT = (TARGET + MODEL.normal(size=(V, V)) * 0.8).astype(np.float32)
START = 5


def next_rows(tokens, table):
    """Logits rows [..., V] after the given tokens."""
    return jnp.asarray(table)[tokens]


@functools.partial(jax.jit, static_argnames="rule")
def sample_texts(seeds, params, judging_params, greedy_draft, depth, rule, fresh):
    """Two tokens and the first step's accepted count per seed, by two speculative steps.

    depth 0..3 fixes the live drafts; 4 lets them depend on drafts already drawn. `judging_params` are the
    options of the law that drafts are judged by: the drafting options, unless a test wants it wrong. `fresh`
    gives every step its own key.
    """

    judged = target_law(jnp.asarray(DRAFT), judging_params)

    def step(carry, _):
        seed, text, length, anchor, first = carry
        key = jnp.where(fresh, round_key(seed, length), seed)

        def draft(previous, i):
            logits = next_rows(previous, DRAFT)
            drawn, _ = propose(logits, params, key, length + i)
            best = jnp.argmax(logits).astype(jnp.int32)
            law = jnp.where(greedy_draft, jax.nn.one_hot(best, V), judged[previous])
            token = jnp.where(greedy_draft, best, drawn)
            return token, (token, law)

        _, (drafts, laws) = jax.lax.scan(draft, anchor, jnp.arange(K))
        adaptive = jnp.where(drafts[0] % 2 == 1, 1, jnp.where(drafts[1] < 4, 2, 3))
        live = jnp.where(depth == 4, adaptive, depth)
        logits = next_rows(jnp.concatenate([anchor[None], drafts]), TARGET)
        accepted, last = verify(drafts, laws, logits, live, params, key, length, rule)
        block = jnp.where(jnp.arange(K + 1) < accepted, jnp.append(drafts, 0), last)
        # What lies past the accepted tokens is overwritten by the next step or cut off at the end.
        text = jax.lax.dynamic_update_slice(text, block, (length,))
        first = jnp.where(length == 0, accepted, first)
        return (seed, text, jnp.minimum(length + accepted + 1, 2), last, first), None

    def one(seed):
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), seed))
        start = (key, jnp.zeros(2 + K + 1, jnp.int32), jnp.int32(0), jnp.int32(START), jnp.int32(0))
        (_, text, _, _, first), _ = jax.lax.scan(step, start, None, length=2)
        return text[:2], first

    return jax.vmap(one)(seeds)


def run(options, *, judging=None, greedy_draft=False, depth=K, rule=verify_tokenwise, fresh=False):
    judging = options if judging is None else judging
    texts, first = sample_texts(
        jnp.arange(SEEDS),
        SamplingParams.make(**options),
        SamplingParams.make(**judging),
        jnp.asarray(greedy_draft),
        jnp.int32(depth),
        rule=rule,
        fresh=jnp.asarray(fresh),
    )
    return np.asarray(texts), np.asarray(first)


def p_value(counts, law):
    """Chi-square of counts against a law; cells expected fewer than five times are pooled."""
    counts, expected = counts.ravel().astype(np.float64), law.ravel() * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1] * counts[:-1].sum() / expected[:-1].sum()
    return stats.chisquare(counts, expected).pvalue


def check_text_law(texts, options):
    """p-values of the first token and the first pair against the filtered target."""
    law = np.asarray(target_law(jnp.asarray(TARGET), SamplingParams.make(**options)), np.float64)
    one = law[START]
    two = one[:, None] * law
    values = []
    for tokens, expected in ((1, one), (2, two)):
        index = np.ravel_multi_index(texts[:, :tokens].T, (V,) * tokens)
        counts = np.bincount(index, minlength=V**tokens)
        assert counts[expected.ravel() == 0].sum() == 0, "a token outside the filtered support was emitted"
        values.append(p_value(counts, expected / expected.sum()))
    return values


@pytest.mark.parametrize("greedy_draft", [False, True], ids=["drawn", "greedy draft"])
@pytest.mark.parametrize("depth", [0, 1, 3, 4], ids=["no drafts", "one", "three", "adaptive"])
def test_texts_follow_the_target_law(greedy_draft, depth):
    texts, _ = run({}, greedy_draft=greedy_draft, depth=depth)
    assert min(check_text_law(texts, {})) > CHI_SQUARE_LEVEL


@pytest.mark.parametrize("greedy_draft", [False, True], ids=["drawn", "greedy draft"])
def test_texts_follow_the_filtered_target_law(greedy_draft):
    texts, _ = run(FILTERS, greedy_draft=greedy_draft, depth=4)
    assert min(check_text_law(texts, FILTERS)) > CHI_SQUARE_LEVEL


@pytest.mark.parametrize("options", [{}, FILTERS], ids=["plain", "filtered"])
def test_measured_acceptance_is_the_overlap_of_the_laws(options):
    texts, first = run(options)
    assert min(check_text_law(texts, options)) > CHI_SQUARE_LEVEL
    params = SamplingParams.make(**options)
    laws = [target_law(jnp.asarray(rows[START]), params) for rows in (TARGET, DRAFT)]
    chance = float(acceptance_probability(*laws))
    deviation = abs((first > 0).mean() - chance)
    assert deviation < 5 * np.sqrt(chance * (1 - chance) / SEEDS)


def test_the_monte_carlo_sees_drafts_judged_by_the_unfiltered_law():
    options = dict(temperature=0.7, min_p=0.2)
    texts, _ = run(options, judging={})
    assert min(check_text_law(texts, options)) < 1e-50


@pytest.mark.parametrize(
    ("options", "greedy_draft", "depth"),
    [({}, False, 3), ({}, True, 3), ({}, False, 4), (FILTERS, False, 3)],
    ids=["drawn", "greedy draft", "adaptive", "filtered"],
)
def test_texts_follow_the_target_law_blockwise(options, greedy_draft, depth):
    texts, first = run(options, greedy_draft=greedy_draft, depth=depth, rule=verify_blockwise, fresh=True)
    assert min(check_text_law(texts, options)) > CHI_SQUARE_LEVEL


def test_the_block_rule_needs_fresh_noise_in_every_step():
    texts, _ = run({}, rule=verify_blockwise, fresh=False)
    assert min(check_text_law(texts, {})) < 1e-50
