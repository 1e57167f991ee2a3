"""Copying from the text: what is found, when it is taken, and how its success is remembered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.errors import UsageError
from v4flash.speculative.depth import MAX_DRAFT
from v4flash.speculative.lookup import (
    LONGEST,
    USUAL_RATE,
    Copy,
    LookupPolicy,
    find,
    observed_rate,
    should_copy,
)

K, PLACES = 5, 64
found_in = jax.jit(find, static_argnames="k")
decided, rate_after = jax.jit(should_copy), jax.jit(observed_rate)


def searched(tokens, k):
    """(copied ids, shared tokens) by comparing the text with itself, one place after another."""
    newest = len(tokens) - 1
    best = (0, -1)
    for place in range(newest):
        shared = 0
        while shared < LONGEST and place - shared >= 0 and tokens[place - shared] == tokens[newest - shared]:
            shared += 1
        best = max(best, (shared, place))
    shared, place = best
    if shared == 0:
        return None, 0
    return [tokens[place + 1 + step % (newest - place)] for step in range(k)], shared


def find_in(tokens, k=K, rest=7):
    """The product's answer for a text in a longer history whose unused places hold `rest`."""
    history = np.full(PLACES, rest, np.int32)
    history[: len(tokens)] = tokens
    copy = found_in(jnp.asarray(history), jnp.int32(len(tokens) - 1), k=k)
    return copy.ids.tolist(), int(copy.shared)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 6, 50])
def test_find_equals_a_plain_search(alphabet):
    random = np.random.default_rng(alphabet)
    for length in (1, 2, 3, 10, 30, PLACES - 1):
        for _ in range(6):
            tokens = random.integers(0, alphabet, length).tolist()
            ids, shared = find_in(tokens)
            expected, count = searched(tokens, K)
            assert shared == count
            if count:
                assert ids == expected


def test_the_longest_occurrence_wins_and_the_latest_of_equals():
    assert find_in([1, 2, 3, 9, 8, 2, 3, 5, 5, 1, 2, 3]) == ([9, 8, 2, 3, 5], 3)
    assert find_in([2, 3, 9, 4, 2, 3, 6, 4, 2, 3], k=2) == ([6, 4], 3)
    assert find_in([4, 4, 4], k=3) == ([4, 4, 4], 2)


def test_what_lies_behind_the_newest_token_is_never_read():
    tokens = [1, 2, 3, 4, 1, 2]
    assert find_in(tokens, rest=1) == find_in(tokens, rest=2) == ([3, 4, 1, 2, 3], 2)


def taken(shared=6, likely=0.5, drafted=True, rate=USUAL_RATE, ahead=0.6, wanted=K, room=K, **policy):
    copy = Copy(jnp.asarray([2, 0, 1, 0, 1], jnp.int32), jnp.int32(shared))
    law = jnp.asarray([0.0, 1 - likely, likely], jnp.float32)
    made = LookupPolicy.make(**{"on": True, "shortest": 6, "agreement": 0.3} | policy)
    facts = copy, law, jnp.asarray(drafted), jnp.float32(rate), jnp.full((K,), ahead)
    return bool(decided(*facts, made, jnp.int32(wanted), jnp.int32(room)))


def test_when_a_step_copies():
    assert taken()
    assert not taken(on=False)
    assert not taken(shared=5) and taken(shared=5, shortest=5)
    assert not taken(likely=0.29) and taken(likely=0.29, agreement=0.2)
    assert not taken(room=0) and not taken(length=0)
    # Copies that failed lately, or a drafter that does as well, are not worth it.
    assert not taken(rate=0.4) and not taken(ahead=0.95)
    # One copied token promises less than five drafts, but more than none.
    assert not taken(room=1, wanted=5) and taken(room=1, wanted=0)


def test_without_the_drafters_opinion_twice_as_much_must_match():
    assert not taken(drafted=False, shared=11, likely=0.0) and taken(drafted=False, shared=12, likely=0.0)
    assert taken(drafted=False, shared=LONGEST, shortest=12)
    assert not taken(drafted=False, shared=LONGEST - 1, shortest=12)


def test_rate_follows_what_became_of_copies():
    def after(rate, accepted, live, copied=True):
        return float(rate_after(jnp.float32(rate), jnp.int32(accepted), jnp.int32(live), jnp.asarray(copied)))

    assert after(0.5, 5, 5) > after(0.5, 3, 3) > after(0.5, 3, 5) > 0.5 > after(0.5, 0, 5)
    assert after(0.2, 0, 0, copied=False) > 0.2 and after(USUAL_RATE, 3, 5, copied=False) == pytest.approx(
        USUAL_RATE
    )
    rate, random = 0.9, np.random.default_rng(1)
    path = []
    for _ in range(400):
        accepted = int(np.argmin([*(random.random(5) < 0.6), False]))
        rate = after(rate, accepted, 5)
        path.append(rate)
    # Single outcomes of chance .6 averaged over about eight: means of hundreds of steps are within .06.
    assert abs(np.mean(path[50:]) - 0.6) < 0.06


def test_policies_are_checked():
    assert int(LookupPolicy.make(on=True).length) == MAX_DRAFT
    for wrong in (
        {"shortest": 0},
        {"shortest": LONGEST + 1},
        {"agreement": 1.1},
        {"agreement": float("nan")},
    ):
        with pytest.raises(UsageError, match="lookup"):
            LookupPolicy.make(on=True, **wrong)
