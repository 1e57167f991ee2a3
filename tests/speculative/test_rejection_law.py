"""The law a step emits, by exact enumeration in float64 of the shipped accept and residual formulas.

The toy laws have V = 8 and three drafts (see toy_laws.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_laws import EXACT, K, closed_form, continued, emitted, emitted_blockwise, golden_laws, joint, one_hot

from v4flash.speculative.rejection import accept_ratio, acceptance_probability, residual

# The golden laws were computed from the float32 laws of the file and stored as float32: half a unit in the
# last place of numbers up to 0.5, twice.
STORED = 6e-8


@pytest.fixture(scope="module")
def laws():
    return golden_laws()


def test_token_rule_equals_the_golden_laws(laws):
    golden, p, q = laws
    emits = emitted(p, q, lambda i, prefix: True)
    for n, law in enumerate(emits, start=1):
        np.testing.assert_allclose(law, golden[f"law.token.emit{n}"], atol=STORED, rtol=0)
    accepted = np.array([law.sum() for law in emits])
    np.testing.assert_allclose(accepted, golden["law.token.accepted"], atol=STORED, rtol=0)
    mean = accepted @ np.arange(K + 1)
    np.testing.assert_allclose(mean, golden["law.token.mean_accepted"][0], atol=STORED * K, rtol=0)


@pytest.mark.parametrize("sharpen", [lambda q: q, one_hot], ids=["drawn", "greedy draft"])
@pytest.mark.parametrize("depth", range(K + 1))
def test_every_depth_equals_the_closed_form_and_emits_the_target_law(laws, depth, sharpen):
    _, p, q = laws
    q = sharpen(q)
    emits = emitted(p, q, lambda i, prefix: i < depth)
    for ours, expected in zip(emits, closed_form(p, q, depth), strict=True):
        np.testing.assert_allclose(ours, expected, atol=EXACT, rtol=0)
    assert abs(sum(law.sum() for law in emits) - 1) < EXACT
    for tokens in range(1, K + 2):
        np.testing.assert_allclose(continued(emits, p, tokens), joint(p, tokens), atol=EXACT, rtol=0)


def test_a_depth_that_looks_at_accepted_drafts_only_emits_the_target_law(laws):
    _, p, q = laws
    emits = emitted(p, q, lambda i, prefix: sum(prefix) % 3 != 1)
    assert 0 < emits[1].sum() < 1
    for tokens in range(1, K + 2):
        np.testing.assert_allclose(continued(emits, p, tokens), joint(p, tokens), atol=EXACT, rtol=0)


def test_block_rule_equals_the_golden_laws(laws):
    golden, p, q = laws
    emits = emitted_blockwise(p, q, lambda path: K)
    for n, law in enumerate(emits, start=1):
        np.testing.assert_allclose(law, golden[f"law.block.emit{n}"], atol=STORED, rtol=0)
    accepted = np.array([law.sum() for law in emits])
    np.testing.assert_allclose(accepted, golden["law.block.accepted"], atol=STORED, rtol=0)
    mean = accepted @ np.arange(K + 1)
    np.testing.assert_allclose(mean, golden["law.block.mean_accepted"][0], atol=STORED * K, rtol=0)
    assert mean > golden["law.token.mean_accepted"][0]


@pytest.mark.parametrize("sharpen", [lambda q: q, one_hot], ids=["drawn", "greedy draft"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, "stopping time"])
def test_block_rule_emits_the_target_law_at_every_depth(laws, depth, sharpen):
    _, p, q = laws
    q = sharpen(q)

    def live(path):
        if depth != "stopping time":
            return depth
        return 1 if path[0] % 2 else 2 if path[1] < 4 else 3

    emits = emitted_blockwise(p, q, live)
    for tokens in range(1, K + 2):
        np.testing.assert_allclose(continued(emits, p, tokens), joint(p, tokens), atol=EXACT, rtol=0)
    if depth == 1:
        for block, token in zip(emits, closed_form(p, q, 1), strict=True):
            np.testing.assert_allclose(block, token, atol=EXACT, rtol=0)


def test_a_draft_judged_by_a_law_it_was_not_drawn_from_bends_the_output(laws):
    _, p, q = laws
    with jax.enable_x64(True):
        passed = q[0] * np.asarray(accept_ratio(jnp.asarray(p[0]), jnp.asarray(p[0] * 0.5 + q[0] * 0.5)))
        first = passed + (1 - passed.sum()) * np.asarray(residual(jnp.asarray(p[0]), jnp.asarray(q[0])))
    assert np.abs(first - p[0]).sum() > 1e-2


def test_acceptance_probability_is_one_minus_total_variation(laws):
    golden, p, q = laws
    with jax.enable_x64(True):
        chance = np.asarray(acceptance_probability(jnp.asarray(p[0]), jnp.asarray(q[0])))
    np.testing.assert_allclose(chance, 1 - np.abs(p[0] - q[0]).sum(axis=-1) / 2, atol=EXACT)
    np.testing.assert_allclose(1 - chance[0], golden["law.token.accepted"][0], atol=STORED)


def test_accept_ratio_at_the_edges():
    p = jnp.asarray([0.0, 0.5, 1.0, 0.3, 1e-37, 0.2, 0.0])
    q = jnp.asarray([0.5, 1.0, 1e-38, 0.3, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(accept_ratio(p, q), [0, 0.5, 1, 1, 1e-37, 1, 0], rtol=1e-6)


def test_residual_at_the_edges():
    p = jnp.asarray([0.5, 0.25, 0.25, 0.0])
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.zeros(4)), p)
    np.testing.assert_array_equal(residual(p, jnp.asarray([0.0, 0, 0, 1])), p)
    np.testing.assert_allclose(residual(p, jnp.asarray([1.0, 0, 0, 0])), [0, 0.5, 0.5, 0])
    one_sided = residual(p, jnp.asarray([0.5, 0.25, 0.25 - 1e-7, 1e-7]))
    np.testing.assert_array_equal(one_sided, [0, 0, 1, 0])
