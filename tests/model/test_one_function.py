"""Prefill, one-token decode and verification are one function at different row counts."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import FAMILIES, assert_same_state, toy

# Sums over many rows and over few are taken in another order; the largest difference seen is 4e-6.
LOGIT_TOLERANCE = 5e-5
STATE_TOLERANCE = 5e-5
LONG, SHORT, CONTEXT = 144, 8, 1280


@functools.cache
def runner(family: str, quantise: bool, rows: int):
    """Jitted pass of `rows` rows that commits the live ones: (state, tokens, count) -> (state, logits)."""
    model = toy(family, quantise)

    @jax.jit
    def run(params, state, tokens, count):
        merged = nnx.merge(model.graphdef, params)
        trunk, written = merged.backbone.trunk(tokens, state, count)
        written = merged.drafter.commit(written, trunk.taps, state.length, count)
        return written.advance(count), merged.backbone.logits(trunk.hidden)

    return functools.partial(run, model.params)


def feed(family, quantise, state, tokens, rows, chunk=None, filler=0):
    """Feeds tokens in passes of `rows` rows with `chunk` live ones; returns state and all live logits."""
    chunk, logits = chunk or rows, []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.full((rows,), filler, np.int32)
        padded[: len(part)] = part
        state, out = runner(family, quantise, rows)(state, jnp.asarray(padded), jnp.int32(len(part)))
        logits.append(np.asarray(out)[: len(part)])
    return state, np.concatenate(logits)


def prompt(length: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 95, length).astype(np.int32)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_prefill_of_one_less_and_one_token(family):
    tokens = prompt(140)
    model = toy(family)
    empty = model.state(CONTEXT, LONG)
    _, reference = feed(family, False, empty, tokens, LONG)
    for length in range(1, 141):
        whole, logits = feed(family, False, empty, tokens[:length], LONG)
        state, _ = feed(family, False, empty, tokens[: length - 1], LONG) if length > 1 else (empty, None)
        state, last = feed(family, False, state, tokens[length - 1 : length], SHORT)
        np.testing.assert_allclose(
            last[-1], logits[-1], atol=LOGIT_TOLERANCE, rtol=0, err_msg=f"length {length}"
        )
        np.testing.assert_allclose(logits[-1], reference[length - 1], atol=LOGIT_TOLERANCE, rtol=0)
        if length % 4 in (0, 3) or length > 120:
            assert_same_state(model.config, state, whole, STATE_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 8, 31, 127, 128, 129])
def test_chunking_never_changes_logits(family, chunk):
    tokens = prompt(290)
    empty = toy(family).state(CONTEXT, LONG)
    expected_state, expected = feed(family, False, empty, tokens, LONG)
    state, logits = feed(family, False, empty, tokens, SHORT if chunk <= SHORT else LONG, chunk)
    np.testing.assert_allclose(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)
    assert_same_state(toy(family).config, state, expected_state, STATE_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_equal_one_less_and_one_token(family):
    tokens = prompt(1030)
    empty = toy(family).state(CONTEXT, LONG)
    for around in (256, 512, 1024):
        for length in range(around - 2, around + 4):
            whole, logits = feed(family, False, empty, tokens[:length], LONG)
            state, _ = feed(family, False, empty, tokens[: length - 1], LONG)
            state, last = feed(family, False, state, tokens[length - 1 : length], SHORT)
            np.testing.assert_allclose(
                last[-1], logits[-1], atol=LOGIT_TOLERANCE, rtol=0, err_msg=f"{length}"
            )
            assert_same_state(toy(family).config, state, whole, STATE_TOLERANCE)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 126, 127])
def test_rows_of_one_pass_equal_one_token_at_a_time(family, quantise, start):
    """With the same row count each row has the same bits, however many rows are live beside it."""
    tokens = prompt(start + 8)
    state = toy(family, quantise).state(CONTEXT, LONG)
    state, _ = feed(family, quantise, state, tokens[:start], SHORT) if start else (state, None)
    together_state, together = feed(family, quantise, state, tokens[start:], SHORT, 8)
    single_state, single = feed(family, quantise, state, tokens[start:], SHORT, 1)
    np.testing.assert_array_equal(together, single)
    assert_same_state(toy(family, quantise).config, together_state, single_state, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_dead_rows_change_nothing(family):
    tokens = prompt(37)
    empty = toy(family).state(CONTEXT, LONG)
    state, logits = feed(family, False, empty, tokens, SHORT, 3, filler=0)
    other_state, other = feed(family, False, empty, tokens, SHORT, 3, filler=61)
    np.testing.assert_array_equal(other, logits)
    assert_same_state(toy(family).config, other_state, state, 0.0)
    untouched, _ = runner(family, False, SHORT)(state, jnp.full((SHORT,), 5, jnp.int32), jnp.int32(0))
    for kept, before in zip(jax.tree.leaves(untouched), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_selection_really_drops_entries(family):
    """The sparse path is exercised: enlarging top-k changes the logits once more entries are visible."""
    import dataclasses

    tokens = prompt(60)
    model = toy(family)
    config = dataclasses.replace(model.config, index_topk=4096, candidate_topk_blocks=4096)
    wide = type(model.model)(config, model.numerics)
    nnx.update(wide, model.params)
    trunk, _ = wide.backbone.trunk(jnp.asarray(tokens), model.state(CONTEXT, LONG), jnp.int32(60))
    dense = np.asarray(wide.backbone.logits(trunk.hidden))
    _, sparse = feed(family, False, model.state(CONTEXT, LONG), tokens, LONG)
    gap = np.max(np.abs(dense - sparse), axis=1)
    visible_before_switch = 6  # entries 0 .. index_topk - 1 are all kept
    assert np.all(gap[:visible_before_switch] < LOGIT_TOLERANCE)
    assert np.max(gap[30:]) > 1e-2
