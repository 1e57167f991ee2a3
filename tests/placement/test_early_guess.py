"""What a pass guesses on the device is what `prediction` tries on recorded routes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import early
from v4flash.placement.prediction import Predictions

LAYERS, EXPERTS, ROWS, CHOSEN, TOKENS, PASSES = 3, 16, 4, 2, 9, 40
guess = jax.jit(early.guess)
noted = jax.jit(early.noted)


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N] and routes [L, N, K], of experts that a token often chooses again."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, TOKENS, PASSES * ROWS)
    own = np.argsort(random.random((LAYERS, TOKENS, EXPERTS)), axis=2)[..., :CHOSEN]
    other = np.argsort(random.random((LAYERS, len(tokens), EXPERTS)), axis=2)[..., :CHOSEN]
    again = random.random((LAYERS, len(tokens), 1)) < 0.7
    return tokens.astype(np.int32), np.where(again, own[:, tokens], other).astype(np.int32)


def passes(accepted):
    """Of each pass: its tokens and routes, how many are accepted, and the guess int32 [L, R K], experts or -1."""
    tokens, routes = text()
    seen, length = early.nothing_seen(TOKENS, LAYERS, ROWS, CHOSEN), 0
    for number in range(PASSES):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        given, chosen = jnp.asarray(tokens[rows]), routes[:, rows]
        named, seen = guess(seen, given, jnp.int32(length), jnp.int32(ROWS))
        yield tokens[rows], chosen, accepted[number], np.asarray(named) - 1
        seen = noted(seen, given, list(jnp.asarray(chosen)), jnp.int32(length), jnp.int32(ROWS))
        length += accepted[number]


def test_accepted_rows_teach_what_their_tokens_chose_last():
    known = {}
    accepted = np.random.default_rng(1).integers(0, ROWS + 1, PASSES)
    for tokens, chosen, count, named in passes(accepted):
        for layer in range(LAYERS):
            wanted = set().union(*(known[token][layer] for token in tokens.tolist() if token in known))
            assert set(named[layer].tolist()) - {-1} == wanted
        for token, row in list(zip(tokens.tolist(), range(ROWS), strict=True))[:count]:
            known[token] = [set(chosen[layer, row].tolist()) for layer in range(LAYERS)]
    assert len(known) == TOKENS


def test_it_is_the_guess_that_predictions_try():
    cold = np.arange(EXPERTS) >= 6
    predictions = Predictions({6: np.tile(~cold, (LAYERS, 1))}, ROWS, np.zeros(LAYERS, bool))
    predictions.add(*text())
    right = named_in_all = wanted = 0
    for _, chosen, _, named in passes(np.full(PASSES, ROWS)):
        for layer in range(LAYERS):
            used = {expert for expert in chosen[layer].reshape(-1).tolist() if cold[expert]}
            guessed = {expert for expert in named[layer].tolist() if expert >= 0 and cold[expert]}
            right, named_in_all, wanted = (
                right + len(used & guessed), named_in_all + len(guessed), wanted + len(used),
            )  # fmt: skip
    (figures,) = predictions.to_json()
    assert figures["same_token"]["ready"] == pytest.approx(right / wanted, abs=1e-4)
    assert figures["same_token"]["used"] == pytest.approx(right / named_in_all, abs=1e-4)


def test_dead_rows_are_neither_learned_nor_guessed_by():
    tokens, routes = (jnp.asarray(part) for part in text())
    seen = early.nothing_seen(TOKENS, LAYERS, ROWS, CHOSEN)
    seen = noted(seen, jnp.arange(ROWS), list(routes[:, :ROWS]), jnp.int32(0), jnp.int32(1))
    _, seen = guess(seen, tokens[:ROWS], jnp.int32(ROWS), jnp.int32(0))
    known = np.asarray(seen.chosen)
    assert known[0].all() and not known[1:].any()
    named, _ = guess(seen, jnp.zeros((ROWS,), jnp.int32), jnp.int32(ROWS), jnp.int32(0))
    assert not named.any()
    named, _ = guess(seen, jnp.asarray([0, 1, 1, 1]), jnp.int32(ROWS), jnp.int32(1))
    np.testing.assert_array_equal(named[:, :CHOSEN], routes[:, 0] + 1)
    assert not named[:, CHOSEN:].any()
