"""The emitted law is the target's to rounding, for every combination of rule, draft, depth, and filter.

Exact enumeration in float64 with the shipped law, depth, accept and residual functions over the toy laws.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_laws import (
    EXACT,
    FILTERS,
    PATHS,
    POLICY,
    K,
    V,
    closed_form,
    emitted_blockwise,
    emitted_by,
    error,
    golden_laws,
    rows_of,
)

from v4flash.speculative.depth import DepthPolicy, calibrated, choose_depth
from v4flash.speculative.filters import SamplingParams, target_law

DRAFTS = {"drawn": {}, "drawn warmer": {"temperature": 1.6}, "greedy": {"temperature": 0.0}}


@functools.cache
def confidences() -> np.ndarray:
    """Confidence [paths, K] in each draft of every path; that of draft i depends on the drafts before i."""
    random = np.random.default_rng(24)
    tables = [random.uniform(0.02, 0.98, V**i) for i in range(K)]
    return np.stack([tables[i][rows_of(i)] for i in range(K)], axis=1)


@functools.cache
def depths(free: bool, adaptive: bool = True) -> np.ndarray:
    """Live drafts of every path, by the shipped choice."""
    policy = DepthPolicy.make(adaptive=adaptive, **POLICY)
    with jax.enable_x64(True):

        def one(confidence):
            chance = calibrated(confidence, policy)
            return choose_depth(chance, policy.acceptance[:K], policy, jnp.int32(K), jnp.asarray(free))

        return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(confidences())))


@functools.cache
def filtered(name: str, draft: str):
    """Target and draft laws under the same filters, and the draft at its own temperature."""
    _, p, q = golden_laws()
    options = FILTERS[name]
    with jax.enable_x64(True):
        law = jax.jit(target_law)
        target, drafting = SamplingParams.make(**options), SamplingParams.make(**options | DRAFTS[draft])
        laws = [
            [np.asarray(law(jnp.log(jnp.asarray(rows)), params)) for rows in side]
            for side, params in ((p, target), (q, drafting))
        ]
    assert laws[0][0].dtype == np.float64
    return laws


@pytest.mark.parametrize("depth", ["fixed", "adaptive"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_emitted_law_is_the_targets(rule, draft, depth, name):
    p, q = filtered(name, draft)
    if depth == "fixed":
        choices = [np.full(len(PATHS), live) for live in (1, 3)]
    else:
        # Greedy drafts are not drawn, so their depth may be chosen by all chances at once.
        choices = [depths(free=draft == "greedy")]
        assert len(set(choices[0].tolist())) > 2
    for live in choices:
        emits = emitted_by(rule, p, q, live)
        assert abs(sum(law.sum() for law in emits) - 1) < EXACT
        assert error(emits, p) < EXACT
        if rule == "token" and depth == "fixed":
            for ours, expected in zip(emits, closed_form(p, q, live[0]), strict=True):
                np.testing.assert_allclose(ours, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", FILTERS)
def test_block_rule_never_accepts_less(name):
    p, q = filtered(name, "drawn")
    for live in (np.full(len(PATHS), K), depths(free=False)):
        means = [
            np.array([law.sum() for law in emitted_by(rule, p, q, live)]) @ np.arange(K + 1)
            for rule in ("token", "block")
        ]
        assert means[1] > means[0] - EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_comparing_all_chances_of_drawn_drafts_would_bend_the_law(rule):
    """Why the choice goes in order: the confidence in a later draft tells what an earlier one was."""
    p, q = filtered("temperature", "drawn")
    live = depths(free=True)
    assert (live != depths(free=False)).any()
    if rule == "token":
        anticipated = emitted_anticipating(p, q, live)
    else:
        anticipated = emitted_blockwise(p, q, lambda path: live[np.ravel_multi_index(path, (V,) * K)])
    assert error(anticipated, p) > 1e-4


def emitted_anticipating(p, q, live):
    """Token-wise emission when the depth of a path is fixed by all of its drafts."""
    total = [np.zeros((V**i, V)) for i in range(K + 1)]
    for depth in range(K + 1):
        chosen = live == depth
        # Paths of this depth only: their share of each prefix weighs what the rule makes of the prefix.
        mass = np.ones(len(PATHS))
        for i in range(K):
            mass = mass * q[i][rows_of(i), PATHS[:, i]]
        reach = mass * chosen
        for i in range(depth + 1):
            row = rows_of(i)
            target = p[i][row]
            draft = q[i][row] if i < depth else np.zeros_like(target)
            ratio = np.ones(len(PATHS))
            if i < depth:
                at = np.arange(len(PATHS)), PATHS[:, i]
                ratio = np.minimum(
                    1, np.divide(target[at], draft[at], where=draft[at] > 0, out=np.zeros(len(PATHS)))
                )
            rest = np.maximum(target - draft, 0)
            sums = rest.sum(axis=1, keepdims=True)
            rest = np.where(sums > 0, rest / np.where(sums > 0, sums, 1), target)
            stopping = reach * (1 - ratio) if i < depth else reach
            np.add.at(total[i], row, stopping[:, None] * rest)
            reach = reach * ratio
    return total


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FILTERS)
def test_copied_drafts_leave_the_law_alone(rule, name):
    """Copies are one-hot laws at tokens that the text fixes; any depth chosen without draws is exact."""
    p, _ = filtered(name, "drawn")
    for ids in itertools.islice(itertools.product((0, 3, 6), (1, 5), (2, 7)), 0, None, 4):
        q = [np.tile(np.eye(V)[token], (V**i, 1)) for i, token in enumerate(ids)]
        for depth in (1, K):
            assert error(emitted_by(rule, p, q, np.full(len(PATHS), depth)), p) < EXACT


def test_copying_because_of_the_drawn_token_would_bend_the_law():
    """Copy token 2 exactly when the drafter drew it: what is left to the drafter no longer follows its law."""
    p, q = filtered("temperature", "drawn")
    copied = np.tile(np.eye(V)[2], (1, 1))
    passed = np.minimum(1, np.divide(p[0], q[0]))[0]
    refused = np.maximum(p[0] - q[0], 0)[0]
    refused = refused / refused.sum()
    # Not copied: tokens other than 2 are judged by q although they were drawn from q without 2.
    kept = np.where(np.arange(V) == 2, 0, q[0][0] * passed)
    lost = np.where(np.arange(V) == 2, 0, q[0][0] * (1 - passed)).sum()
    # Copied, with probability q(2): accepted with p(2), else p without 2.
    accepted = q[0][0, 2] * p[0][0, 2]
    elsewhere = np.where(copied[0] > 0, 0, p[0][0])
    law = kept + lost * refused + accepted * copied[0]
    law = law + q[0][0, 2] * (1 - p[0][0, 2]) * elsewhere / elsewhere.sum()
    assert abs(law.sum() - 1) < EXACT and np.abs(law - p[0][0]).max() > 1e-2
