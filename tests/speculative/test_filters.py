"""The sampling laws against a plain sorted reference, and at every edge of the options' ranges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.errors import UsageError
from v4flash.speculative import filters
from v4flash.speculative.filters import SamplingParams, greedy_token, has_usable_logits, target_law

compiled_law = jax.jit(target_law)

# Float32 exponentials and one sum of at most a few hundred terms.
FLOAT32_TOLERANCE = 2e-6
# The same in float64; the temperature itself is a float32 and the reference reads it as such.
FLOAT64_TOLERANCE = 1e-12
REAL_VOCABULARY = 129_280


def law_of(logits, **options):
    """The product's law of float32 logits, through one compiled program per shape."""
    return compiled_law(jnp.asarray(logits, jnp.float32), SamplingParams.make(**options))


def reference_law(row, temperature, top_k, top_p, min_p):
    """One row by sorting, in float64, from the float32 values of the options."""
    temperature, top_p, min_p = (float(np.float32(x)) for x in (temperature, top_p, min_p))
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    top = row[ranked[0]]
    if temperature == 0:
        return np.eye(len(row))[ranked[0]]
    weight = {token: math.exp((row[token] - top) / temperature) for token in ranked}
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        target, mass, kept = top_p * sum(weight[token] for token in ranked), 0.0, []
        for token in ranked:
            if kept and mass >= target:
                break
            kept.append(token)
            mass += weight[token]
        ranked = kept
    ranked = [token for token in ranked if weight[token] >= min_p]
    law = np.zeros(len(row))
    law[ranked] = [weight[token] for token in ranked]
    return law / law.sum()


OPTIONS = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.0, 0.3, 1.0, 2.5)
    for k, p, m in [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.0, 0.0),
        (0, 0.37, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.05),
        (20, 0.8, 0.02),
        (60, 0.9, 1.0),
    ]
]
ROWS = np.random.default_rng(3).normal(size=(4, 50)) * 2
TIED_ROWS = np.round(ROWS * 2) / 2


@pytest.mark.parametrize("rows", [ROWS, TIED_ROWS], ids=["distinct", "tied"])
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_the_law_equals_the_sorted_reference(rows, wide):
    with jax.enable_x64(wide):
        logits = jnp.asarray(rows, jnp.float64 if wide else jnp.float32)
        for options in OPTIONS:
            law = compiled_law(logits, SamplingParams.make(**options))
            assert law.dtype == logits.dtype
            expected = np.stack([reference_law(row, **options) for row in np.asarray(logits, np.float64)])
            np.testing.assert_array_equal(np.asarray(law) > 0, expected > 0, err_msg=str(options))
            tolerance = FLOAT64_TOLERANCE if wide else FLOAT32_TOLERANCE
            np.testing.assert_allclose(law, expected, atol=tolerance, err_msg=str(options))


def test_changing_options_does_not_retrace_and_filters_stay_behind_branches():
    traces = []

    @jax.jit
    def traced(logits, params):
        traces.append(logits.shape)
        return target_law(logits, params)

    logits = jnp.asarray(ROWS, jnp.float32)
    for options in OPTIONS:
        traced(logits, SamplingParams.make(**options))
    assert traces == [logits.shape]
    program = traced.lower(logits, SamplingParams.make()).compile().as_text()
    assert program.count(" conditional(") >= 3
    assert " sort(" not in program


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_passes_of_several_bits_find_the_same_cut(wide):
    """What a GPU does, in a loop or not, against a bit a pass; sums of these weights are exact."""
    random = np.random.default_rng(8)
    with jax.enable_x64(wide):
        word, number = (jnp.uint64, jnp.float64) if wide else (jnp.uint32, jnp.float32)
        for bits, seats in ((jnp.iinfo(word).bits, 2**31), (17, 2**17), (6, 50), (3, 8)):
            rank = jnp.asarray(random.integers(0, seats, (40, 60)), word)
            rank = rank.at[20:].set(rank[20:] // (seats // 7 + 1) * (seats // 8))  # many alike
            weights = jnp.asarray(random.integers(0, 9, rank.shape) / 16, number)
            share = jnp.asarray([1e-9, 0.1, 0.5, 0.95, 1.0, 1.1, np.nan, 0.7] * 5, number)
            target = share * weights.sum(axis=1)
            for rows in (slice(None), 3):  # the rows of a pass, and one row alone
                bit_by_bit = filters._search(
                    rank[rows], weights[rows], target[rows], bits=bits, width=1, unroll=False
                )
                assert len(np.unique(bit_by_bit)) > 1 or rows == 3
                for unroll in (False, True):
                    found = filters._search(
                        rank[rows],
                        weights[rows],
                        target[rows],
                        bits=bits,
                        width=filters._GPU_BITS,
                        unroll=unroll,
                    )
                    np.testing.assert_array_equal(found, bit_by_bit)


def test_temperature_zero_is_the_lowest_of_equal_tokens():
    logits = jnp.asarray([[1.0, 5.0, 5.0, 0.0], [-1.0, -0.0, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    law = law_of(logits, temperature=0, top_k=3, top_p=0.5, min_p=0.2)
    np.testing.assert_array_equal(law, np.eye(4)[[1, 1, 0]])
    np.testing.assert_array_equal(greedy_token(logits), [1, 1, 0])


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1.2e-38, 1e-40, 1e-45])
def test_tiny_temperatures_are_finite(temperature):
    logits = jnp.asarray([[3e4, 2.0, -3e4, 2.9e4], [0.5, 0.25, -jnp.inf, 0.4]], jnp.float32)
    for extra in ({}, {"top_p": 1e-4}, {"top_k": 2, "min_p": 0.5}):
        law = law_of(logits, temperature=temperature, **extra)
        np.testing.assert_array_equal(law, np.eye(4)[[0, 0]])


def test_a_tiny_temperature_still_shares_between_equal_logits():
    law = law_of([2.0, 7.0, 7.0, 1.0], temperature=1e-4)
    np.testing.assert_array_equal(law, [0, 0.5, 0.5, 0])


def test_a_huge_temperature_is_uniform():
    law = law_of([2.0, 7.0, -50.0, 1.0], temperature=3e38)
    np.testing.assert_array_equal(law, [0.25] * 4)


@pytest.mark.parametrize("top_p", [0, 1e-45, 1e-4])
def test_a_tiny_top_p_keeps_exactly_one_token(top_p):
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(law_of(logits, top_p=top_p), np.eye(4)[[1, 0]])


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_k": 50}, {"top_k": 51}, {"top_k": 2**40}, {"top_p": 1}]
)
def test_disabled_filters_leave_the_softmax(options):
    logits = jnp.asarray(ROWS, jnp.float32)
    law = law_of(logits, **options)
    np.testing.assert_allclose(law, jax.nn.softmax(logits), atol=FLOAT32_TOLERANCE)


def test_ties_at_a_cut_go_to_the_lowest_ids():
    logits = jnp.asarray([0.0, 1.0, 0.0, 1.0, 0.0, -0.0, 0.0, 0.0])
    kept = law_of(logits, top_k=5) > 0
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1, 2, 3, 4])
    flat = law_of(jnp.zeros(8), top_p=0.5)
    np.testing.assert_array_equal(flat, [0.25] * 4 + [0] * 4)
    just_over = law_of(jnp.zeros(8), top_p=0.501)
    np.testing.assert_array_equal(np.flatnonzero(just_over), [0, 1, 2, 3, 4])


def test_min_p_is_relative_to_the_most_likely_token_and_inclusive():
    logits = jnp.log(jnp.asarray([0.5, 0.25, 0.2, 0.05]))
    np.testing.assert_array_equal(law_of(logits, min_p=0.45) > 0, [1, 1, 0, 0])
    equal_best = law_of([1.0, 3.0, 3.0, 0.0], min_p=1)
    np.testing.assert_array_equal(equal_best, [0, 0.5, 0.5, 0])


def test_top_p_counts_only_what_top_k_left():
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1]))
    # After top-k 2 the best token holds 4/7 = 0.57 of the mass, enough for 0.55; of the whole it holds 0.4.
    np.testing.assert_allclose(law_of(logits, top_k=2, top_p=0.55), [1, 0, 0, 0])
    np.testing.assert_array_equal(law_of(logits, top_p=0.55) > 0, [1, 1, 0, 0])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9999}, {"min_p": 0.1}, {"temperature": 0}])
def test_forbidden_tokens_stay_forbidden(options):
    logits = jnp.asarray([-jnp.inf, 1.0, -jnp.inf, 0.5])
    law = np.asarray(law_of(logits, **options))
    assert np.all(law[[0, 2]] == 0) and math.isclose(law.sum(), 1, abs_tol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 1}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}]
)
def test_a_row_without_a_law_is_reported_and_spoils_no_other_row(options):
    nan, inf = jnp.nan, jnp.inf
    logits = jnp.asarray([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [0.0, 2.0, -inf]])
    np.testing.assert_array_equal(has_usable_logits(logits), [False, False, False, True])
    law = np.asarray(law_of(logits, **options))
    assert np.isnan(law[:3]).any(axis=-1).all()
    alone = law_of(jnp.tile(logits[3], (4, 1)), **options)
    np.testing.assert_array_equal(law[3], alone[3])


def test_bfloat16_logits_are_judged_in_float32():
    logits = jnp.asarray(ROWS, jnp.bfloat16)
    law = compiled_law(logits, SamplingParams.make(top_p=0.9))
    assert law.dtype == jnp.float32
    np.testing.assert_array_equal(law, law_of(logits, top_p=0.9))


def test_the_real_vocabulary():
    logits = np.random.default_rng(5).normal(size=(2, REAL_VOCABULARY)).astype(np.float32) * 3
    law = np.asarray(law_of(logits, top_k=50))
    for row in range(2):
        best = np.argsort(-logits[row], kind="stable")[:50]
        np.testing.assert_array_equal(np.flatnonzero(law[row]), np.sort(best))
    law = np.asarray(law_of(logits, temperature=0.7, top_p=0.95))
    expected = reference_law(logits[0].astype(np.float64), 0.7, 0, 0.95, 0)
    # A float32 sum over the whole vocabulary may move the cut by a token or two of the thousands kept.
    assert abs(np.count_nonzero(law[0]) - np.count_nonzero(expected)) <= 2
    np.testing.assert_allclose(law[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "legal"),
    [
        ({"temperature": -0.1}, "0 or more"),
        ({"temperature": math.nan}, "0 or more"),
        ({"temperature": math.inf}, "0 or more"),
        ({"temperature": 1e39}, "0 or more"),
        ({"temperature": "warm"}, "0 or more"),
        ({"temperature": None}, "0 or more"),
        ({"top_p": -1e-9}, "from 0 (one token) to 1 (off)"),
        ({"top_p": 1.0001}, "from 0 (one token) to 1 (off)"),
        ({"top_p": math.nan}, "from 0 (one token) to 1 (off)"),
        ({"top_k": -1}, "whole number, 0 (off) or more"),
        ({"top_k": 2.5}, "whole number, 0 (off) or more"),
        ({"top_k": math.nan}, "whole number, 0 (off) or more"),
        ({"top_k": True}, "whole number, 0 (off) or more"),
        ({"min_p": -0.5}, "from 0 (off) to 1"),
        ({"min_p": 2}, "from 0 (off) to 1"),
        ({"min_p": math.nan}, "from 0 (off) to 1"),
    ],
)
def test_illegal_options_are_refused_with_their_range(options, legal):
    (name,) = options
    with pytest.raises(UsageError) as refusal:
        SamplingParams.make(**options)
    assert str(refusal.value).startswith(f"{name}: expected") and legal in str(refusal.value)
