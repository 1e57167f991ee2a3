"""Spare slots: what stays, what makes room, and that a pass with many experts takes them in turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.placement import cache
from v4flash.placement.cache import EMPTY, Held

EXPERTS, SLOTS = 12, 4

_plan = jax.jit(cache.plan)


def planned(held: Held, *needed: int) -> tuple[Held, dict[int, int]]:
    """The slots behind a pass that needs these experts, and what was fetched: {expert: slot}."""
    wanted = jnp.zeros((EXPERTS,), bool).at[jnp.asarray(needed, jnp.int32)].set(True)
    held, fetches = _plan(held, wanted)
    count = int(fetches.count)
    pairs = zip(fetches.experts[:count].tolist(), fetches.slots[:count].tolist(), strict=True)
    return held, dict(pairs)


def test_empty_slots_are_filled_and_what_is_there_is_not_fetched_again():
    held, fetched = planned(Held.empty(SLOTS), 3, 7)
    assert fetched == {3: 0, 7: 1}
    held, fetched = planned(held, 7, 3)
    assert fetched == {}
    held, fetched = planned(held, 7, 9)
    assert fetched == {9: 2}
    assert held.expert.tolist() == [3, 7, 9, EMPTY]
    assert cache.places(held, jnp.asarray([[9, 3], [1, EMPTY - 1]])).tolist() == [[2, 0], [-1, -1]]


def test_the_longest_unused_expert_makes_room():
    held = Held.empty(SLOTS)
    for expert in (1, 2, 3, 4):
        held, _ = planned(held, expert)
    held, _ = planned(held, 1)
    held, fetched = planned(held, 5)
    assert fetched == {5: 1}  # 2 was used the longest ago, for 1 was used again
    held, fetched = planned(held, 6, 1)
    assert fetched == {6: 2}
    assert sorted(held.expert.tolist()) == [1, 4, 5, 6]


def test_an_expert_that_is_needed_never_makes_room():
    held, _ = planned(Held.empty(SLOTS), 0, 1, 2, 3)
    held, fetched = planned(held, 0, 1, 2, 3, 4, 5)
    assert fetched == {} and sorted(held.expert.tolist()) == [0, 1, 2, 3]
    held, fetched = planned(held, 4, 5)  # the second turn of that pass
    assert set(fetched) == {4, 5}


@pytest.mark.parametrize("seed", range(3))
def test_turns_serve_every_pass_and_slots_hold_what_was_fetched(seed):
    random = np.random.default_rng(seed)
    held, slots = Held.empty(SLOTS), [EMPTY] * SLOTS
    for _ in range(60):
        left = set(random.choice(EXPERTS, random.integers(1, EXPERTS + 1), replace=False).tolist())
        turns = 0
        while left:
            held, fetched = planned(held, *left)
            for expert, slot in fetched.items():
                assert expert not in slots
                slots[slot] = expert
            assert held.expert.tolist() == slots
            served = left & set(slots)
            assert served
            left -= served
            turns += 1
        assert turns <= -(-EXPERTS // SLOTS) + 1
