"""The choice of a depth: against a plain search, in order where it must be, and never out of its range."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.errors import UsageError
from v4flash.speculative.depth import (
    MAX_DRAFT,
    DepthPolicy,
    calibrated,
    choose_depth,
    expected_tokens,
    observed,
    worth_drafting,
)

K = 5
STAIRS = (1.0, 1.2, 1.2, 1.2, 1.8, 1.8, 1.8)
SLOPED = (1.0, 1.26, 1.59, 1.91, 2.23, 2.54, 2.84)
FLAT = (1.0,)
compiled_choice = jax.jit(choose_depth)
# Float64 sums of a handful of numbers near 1.
EXACT = 1e-12


def policy(costs=SLOPED, margin=0.04, adaptive=True, **changes):
    return DepthPolicy.make(adaptive=adaptive, costs=costs, margin=margin, **changes)


def choose(chance, ahead=(0.7,) * K, costs=SLOPED, wanted=K, free=False, **changes):
    chosen = compiled_choice(
        jnp.asarray(chance, jnp.float32),
        jnp.asarray(ahead, jnp.float32),
        policy(costs, **changes),
        jnp.int32(wanted),
        jnp.asarray(free),
    )
    assert chosen.dtype == jnp.int32 and 0 <= int(chosen) <= wanted
    return int(chosen)


def rate(chance, depth, costs):
    """Tokens per cost of verifying `depth` drafts of these chances."""
    return (1 + sum(np.prod(chance[:i]) for i in range(1, depth + 1))) / costs[depth + 1]


def searched(chance, ahead, costs, wanted, free, margin):
    """The rule in words: stop where that beats every way of going on, and going on to the end by the margin."""
    if free:
        best = max(range(wanted + 1), key=lambda depth: rate(chance, depth, costs))
        return best if rate(chance, best, costs) > (1 + margin) * rate(chance, wanted, costs) else wanted
    for depth in range(wanted):
        assumed = [*chance[: depth + 1], *ahead[depth + 1 :]]
        ways = [rate(assumed, further, costs) for further in range(depth + 1, wanted + 1)]
        here = rate(chance, depth, costs)
        if here > max(ways) and here > (1 + margin) * ways[-1]:
            return depth
    return wanted


@pytest.mark.parametrize("free", [False, True], ids=["in order", "free"])
@pytest.mark.parametrize("costs", [SLOPED, STAIRS, FLAT * 7], ids=["sloped", "stairs", "flat"])
def test_choice_equals_a_plain_search(costs, free):
    random = np.random.default_rng(len(costs) + free)
    seen = set()
    for case in range(60):
        chance, ahead = random.uniform(0.02, 0.99, (2, K))
        wanted, margin = int(random.integers(0, K + 1)), [0.0, 0.04, 0.3][case % 3]
        expected = searched(chance, ahead, costs, wanted, free, margin)
        assert choose(chance, ahead, costs, wanted, free, margin=margin) == expected
        seen.add(expected)
    assert len(seen) > 2


def test_a_decision_never_depends_on_later_chances():
    random = np.random.default_rng(3)
    differing = 0
    for costs in (SLOPED, STAIRS):
        for _ in range(40):
            ahead, chance = random.uniform(0.3, 0.99, (2, K))
            for known in range(1, K + 1):
                other = np.append(chance[:known], random.uniform(0.05, 0.99, K - known))
                # Draft `known - 1` is the last whose own chance is shared: both agree on every draft up to it.
                first, second = (min(choose(c, ahead, costs), known) for c in (chance, other))
                assert first == second
            differing += choose(chance, ahead, costs) != choose(chance, ahead, costs, free=True)
    assert differing > 0


def test_free_rows_are_all_verified_and_a_fixed_policy_chooses_nothing():
    for wanted, free in itertools.product(range(K + 1), (False, True)):
        assert choose((0.01,) * K, costs=FLAT, wanted=wanted, free=free) == wanted
        assert choose((0.01,) * K, wanted=wanted, free=free, adaptive=False) == wanted


def test_flat_part_of_a_staircase_is_walked_to_its_end():
    # The second row costs as much as three rows do: stopping at the first descent would verify nothing.
    assert choose((0.4, 0.6, 0.6, 0.2, 0.2), ahead=(0.6, 0.6, 0.6, 0.2, 0.2), costs=STAIRS) == 2


def test_costs_that_rows_cannot_pay_for_verify_nothing():
    steep = (1.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0)
    assert choose((0.6,) * K, costs=steep) == choose((0.6,) * K, costs=steep, free=True) == 0


@pytest.mark.parametrize("depth", range(K + 1))
def test_a_stop_can_be_asked_for(depth):
    made = DepthPolicy.stopping_at(depth)
    for confidence, free in itertools.product((1e-4, 0.5, 0.9999), (False, True)):
        chance, ahead = calibrated(jnp.full((K,), confidence), made), made.acceptance[:K]
        assert bool(worth_drafting(ahead, made, jnp.int32(K)))
        assert int(compiled_choice(chance, ahead, made, jnp.int32(K), jnp.asarray(free))) == depth


def test_margin_keeps_what_was_wanted():
    chance = (0.9, 0.9, 0.9, 0.9, 0.1)
    costs = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1)
    assert choose(chance, costs=costs, margin=0.0, free=True) == 4
    assert choose(chance, costs=costs, margin=0.1, free=True) == K


def test_margin_is_asked_of_the_whole_block_only():
    # Verifying two promises 1 % more than three, too little to count, but 6 % more than all five.
    costs = (1.0, 1.25, 1.8, 2.275, 2.64, 2.9, 3.06)
    chance = (0.75, 0.7, 0.65, 0.5, 0.5)
    rates = [rate(chance, depth, costs) for depth in range(K + 1)]
    assert max(rates) == rates[2] < 1.05 * rates[3] and rates[2] > 1.05 * rates[5]
    for free in (False, True):
        assert choose(chance, chance, costs, margin=0.05, free=free) == 2


def test_drafting_is_left_out_where_plain_steps_are_faster():
    def worth(ahead, wanted=K, **settings):
        return bool(worth_drafting(jnp.asarray(ahead, jnp.float32), policy(**settings), jnp.int32(wanted)))

    assert worth((0.8,) * K) and worth((0.8,) * K, wanted=1)
    assert not worth((0.1,) * K)
    assert worth((0.1,) * K, costs=FLAT) and worth((0.1,) * K, adaptive=False)
    assert not worth((0.8,) * K, wanted=0) and not worth((0.8,) * K, wanted=0, adaptive=False)
    # A loss within the margin is no reason to stop drafting: 1.26 tokens for 1.3 of the cost.
    assert worth((0.26,), wanted=1, costs=(1.0, 1.3, 1.3)) and not worth(
        (0.2,), costs=(1.0, 1.3, 1.3), wanted=1
    )


def test_running_average_counts_what_was_seen():
    usual, chance = np.full(4, 0.7), np.array([0.9, 0.8, 0.25, 0.1])
    after = functools.partial(observed, jnp.asarray(usual), jnp.asarray(usual), jnp.asarray(chance))
    change = np.asarray(after(jnp.int32(1), jnp.int32(3), jnp.asarray(True))) - usual
    assert change[0] > 0 > change[1] and abs(change[2]) < 1e-6 and abs(change[3]) < 1e-6
    # All verified were accepted: the first one not verified counts with its chance.
    change = np.asarray(after(jnp.int32(2), jnp.int32(2), jnp.asarray(True))) - usual
    assert change[0] > 0 and change[1] > 0 and change[2] < 0 and abs(change[3]) < 1e-6
    moved = jnp.asarray([0.1, 0.9, 0.7, 0.7])
    back = observed(moved, jnp.asarray(usual), jnp.asarray(chance), 0, 0, jnp.asarray(False))
    assert 0.1 < back[0] < 0.2 and 0.8 < back[1] < 0.9


def test_running_average_finds_the_rate():
    average, random = jnp.asarray([0.7, 0.7]), np.random.default_rng(0)
    step = jax.jit(observed)
    path = []
    for _ in range(600):
        accepted = 0 if random.random() > 0.4 else 1 if random.random() > 0.9 else 2
        average = step(average, jnp.asarray([0.7, 0.7]), jnp.zeros(2), accepted, 2, jnp.asarray(True))
        path.append(np.asarray(average))
    # 400 steps of an average over about 16: the standard error is below 0.03.
    np.testing.assert_allclose(np.mean(path[200:], axis=0), [0.4, 0.9], atol=0.1)


def test_calibration():
    confidence = jnp.asarray([0.2, 0.5, 0.9, 1.0, 0.0])
    np.testing.assert_allclose(calibrated(confidence, policy()), confidence, atol=2e-6)
    changed = policy(slope=(0.5,), bias=(0.0, -1.0))
    found = calibrated(confidence, changed)
    np.testing.assert_allclose(found[0], 1 / (1 + np.sqrt(0.8 / 0.2)), rtol=1e-5)
    np.testing.assert_allclose(found[1], 1 / (1 + np.e), rtol=1e-5)
    assert np.isfinite(found).all()


def test_expected_tokens():
    with jax.enable_x64(True):
        found = expected_tokens(jnp.asarray([0.5, 0.5, 0.1], jnp.float64))
    np.testing.assert_allclose(found, [1, 1.5, 1.75, 1.775], atol=EXACT)


def test_policies_are_filled_up_and_checked():
    made = DepthPolicy.make(adaptive=True, costs=(1.0, 2.0), slope=(1.0, 0.5), acceptance=(0.9, 0.8))
    assert made.costs.tolist() == [1.0] + [2.0] * (MAX_DRAFT + 1)
    assert made.slope.tolist() == [1.0] + [0.5] * (MAX_DRAFT - 1)
    for wrong in (
        {"costs": (1.0, 0.0)},
        {"costs": (1.0, float("nan"))},
        {"acceptance": (1.2,)},
        {"slope": (-0.1,)},
        {"bias": (float("inf"),)},
        {"margin": -0.1},
        {"margin": float("nan")},
    ):
        with pytest.raises(UsageError, match="expected"):
            DepthPolicy.make(adaptive=True, **wrong)


def test_one_program_serves_fixed_and_adaptive_policies():
    traces = []

    @jax.jit
    def traced(chance, made, wanted, free):
        traces.append(chance.shape)
        return choose_depth(chance, chance, made, wanted, free)

    for adaptive, costs, free in itertools.product((False, True), (FLAT, STAIRS), (False, True)):
        traced(jnp.full((K,), 0.5), policy(costs, adaptive=adaptive), jnp.int32(K), jnp.asarray(free))
    assert len(traces) == 1
