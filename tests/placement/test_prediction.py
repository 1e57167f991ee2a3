"""Guesses at cold experts against a slow account of the same thing, step by step."""

import numpy as np
import pytest

from v4flash.placement.prediction import Predictions

LAYERS, EXPERTS, CHOSEN, ROWS, TOKENS = 3, 8, 2, 4, 5
HASHED = np.asarray([True, False, False])


@pytest.fixture(scope="module")
def text():
    """Token ids [N] and routes [L, N, K]; the first layer's experts follow from the token."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, TOKENS, 50)
    scores = random.gumbel(size=(LAYERS, 50, EXPERTS)) - np.log(1 + np.arange(EXPERTS))
    routes = np.argsort(-scores, axis=2)[:, :, :CHOSEN]
    routes[0] = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])[tokens]
    return tokens, routes


@pytest.fixture(scope="module")
def hot():
    """Nothing hot, and other experts in every layer."""
    some = np.zeros((LAYERS, EXPERTS), bool)
    for layer in range(LAYERS):
        some[layer, [layer, layer + 3]] = True
    return {0: np.zeros((LAYERS, EXPERTS), bool), 2: some}


@pytest.fixture(scope="module")
def found(text, hot):
    tokens, routes = text
    made = Predictions(hot, ROWS, HASHED)
    made.add(tokens[:30], routes[:, :30])
    made.add(tokens[30:], routes[:, 30:])
    return {row["hot"]: row for row in made.to_json()}


def steps(text):
    """(is it the first of a stretch, its rows) of every whole step of the two stretches."""
    for first, last in ((0, 30), (30, 50)):
        for start in range(first, last - ROWS + 1, ROWS):
            yield start == first, range(start, start + ROWS)


def chosen(text, hot, layer, rows) -> set[int]:
    return {int(expert) for row in rows for expert in text[1][layer, row]} - set(np.flatnonzero(hot[layer]))


def share(part, whole):
    return round(part / whole, 4) if whole else None


@pytest.mark.parametrize("count", [0, 2])
def test_cold_experts_of_a_step(text, hot, found, count):
    wanted = [
        sum(len(chosen(text, hot[count], layer, rows)) for layer in range(LAYERS)) for _, rows in steps(text)
    ]
    by_id = sum(len(chosen(text, hot[count], 0, rows)) for _, rows in steps(text))
    assert found[count]["steps"] == len(wanted) == 12
    assert found[count]["cold_experts_a_step"] == share(sum(wanted), len(wanted))
    assert found[count]["in_hash_layers"] == share(by_id, sum(wanted))


@pytest.mark.parametrize("count", [0, 2])
def test_guess_by_the_previous_step(text, hot, found, count):
    named = right = wanted = 0
    for layer in range(LAYERS):
        before: set[int] = set()
        for first, rows in steps(text):
            now = chosen(text, hot[count], layer, rows)
            before = set() if first else before
            named, right, wanted = named + len(before), right + len(before & now), wanted + len(now)
            before = now
    assert found[count]["previous_step"] == {"ready": share(right, wanted), "used": share(right, named)}
    assert 0 < right < named


@pytest.mark.parametrize("count", [0, 2])
def test_guess_by_the_same_tokens(text, hot, found, count):
    named = right = wanted = 0
    for layer in range(LAYERS):
        known: dict[int, set[int]] = {}
        for _, rows in steps(text):
            now = chosen(text, hot[count], layer, rows)
            guess = set().union(*(known.get(int(text[0][row]), set()) for row in rows))
            named, right, wanted = named + len(guess), right + len(guess & now), wanted + len(now)
            for row in rows:
                known[int(text[0][row])] = chosen(text, hot[count], layer, [row])
    assert found[count]["same_token"] == {"ready": share(right, wanted), "used": share(right, named)}
    assert 0 < right < named


def test_a_token_seen_before_says_the_experts_of_a_hash_layer(text, hot):
    tokens, routes = text
    made = Predictions({0: hot[0][:1]}, ROWS, HASHED[:1])
    made.add(tokens, routes[:1])
    warm = made.to_json()[0]["same_token"]
    assert warm["used"] == 1.0 and warm["ready"] > 0.8, "all that is missed is what was never seen"


@pytest.mark.parametrize("count", [0, 2])
def test_cache_of_recently_used_experts(text, hot, found, count):
    entries = found[count]["recently_used"]
    assert [entry["slots"] for entry in entries] == ([1, 2, 4, 8] if count == 0 else [1, 2, 4])
    for entry in entries:
        ready = wanted = 0
        for layer in range(LAYERS):
            recent: list[int] = []
            for _, rows in steps(text):
                now = chosen(text, hot[count], layer, rows)
                ready += len(now & set(recent[: entry["slots"]]))
                wanted += len(now)
                recent = sorted(now) + [expert for expert in recent if expert not in now]
        assert entry["ready"] == share(ready, wanted)
    shares = [entry["ready"] for entry in entries]
    assert 0 < shares[0] < shares[-1] < 1 and shares == sorted(shares)


def test_nothing_cold_leaves_nothing_to_guess(text):
    made = Predictions({EXPERTS: np.ones((LAYERS, EXPERTS), bool)}, ROWS, HASHED)
    made.add(*text)
    (row,) = made.to_json()
    assert row["cold_experts_a_step"] == 0 and row["recently_used"] == []
    assert row["in_hash_layers"] is None and row["previous_step"] == {"ready": None, "used": None}


def test_text_shorter_than_a_step_has_none(text, hot):
    made = Predictions(hot, ROWS, HASHED)
    made.add(text[0][: ROWS - 1], text[1][:, : ROWS - 1])
    assert made.to_json()[0]["steps"] == 0 and made.to_json()[0]["cold_experts_a_step"] is None
