"""Tables of places: made from counts, checked, and changed by swaps."""

import numpy as np
import pytest

from v4flash.errors import UsageError
from v4flash.placement.table import COLD, HOT, Placement

LAYERS, EXPERTS, HOT_COUNT = 3, 8, 5


def counted(seed: int) -> Placement:
    counts = np.random.default_rng(seed).integers(0, 50, (LAYERS, EXPERTS))
    return Placement.from_counts(counts, HOT_COUNT)


def test_the_most_chosen_experts_are_hot():
    counts = np.array([[5, 0, 9, 1], [2, 2, 2, 2]])
    made = Placement.from_counts(counts, 2)
    assert made.tier.tolist() == [[HOT, COLD, HOT, COLD], [HOT, HOT, COLD, COLD]]
    assert made.slot.tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    assert made.tier.dtype == made.slot.dtype == np.int32
    assert made.held(0, HOT).tolist() == [0, 2] and made.held(0, COLD).tolist() == [1, 3]
    assert made.cold_share(counts) == (1 + 4) / 23
    assert made.cold_share(np.zeros_like(counts)) == 0


def test_without_counts_the_first_experts_are_hot():
    made = Placement.in_order(LAYERS, EXPERTS, HOT_COUNT)
    assert (made.layers, made.experts, made.hot) == (LAYERS, EXPERTS, HOT_COUNT)
    assert made.tier.tolist() == [[HOT] * 5 + [COLD] * 3] * LAYERS


def test_a_swap_exchanges_two_places_and_leaves_the_table_it_came_from():
    before = counted(0)
    hot, cold = before.held(1, HOT)[2], before.held(1, COLD)[0]
    after = before.swapped(1, hot, cold)
    assert after.held(1, HOT)[2] == cold and after.held(1, COLD)[0] == hot
    assert before.held(1, HOT)[2] == hot
    assert np.array_equal(before.tier[[0, 2]], after.tier[[0, 2]])
    again = after.swapped(1, hot, cold)
    assert np.array_equal(again.tier, before.tier) and np.array_equal(again.slot, before.slot)


@pytest.mark.parametrize("seed", range(5))
def test_another_hot_set_comes_by_the_fewest_swaps(seed):
    before, wanted = counted(seed), counted(seed + 100)
    after, swaps = before.towards(wanted)
    assert np.array_equal(after.tier, wanted.tier)
    assert len(swaps) == np.sum((before.tier == HOT) & (wanted.tier == COLD))
    stayed = before.tier == after.tier
    assert np.array_equal(before.slot[stayed], after.slot[stayed])


@pytest.mark.parametrize(
    "hot,said", [(1, "2 to 7"), (8, "use --experts resident"), (-3, "2 to 7"), (9, "are 9")]
)
def test_a_number_of_hot_experts_that_cannot_be(hot, said):
    with pytest.raises(UsageError, match=said):
        Placement.in_order(LAYERS, EXPERTS, hot, chosen=2)


def broken(change) -> tuple[np.ndarray, np.ndarray]:
    tier, slot = (table.copy() for table in (counted(0).tier, counted(0).slot))
    change(tier, slot)
    return tier, slot


def two_in_one_slot(tier, slot):
    first, second = np.flatnonzero(tier[2] == COLD)[:2]
    slot[2, first] = slot[2, second]


def one_hot_more(tier, slot):
    tier[1, np.flatnonzero(tier[1] == COLD)[0]] = HOT


def no_such_tier(tier, slot):
    tier[:, 0] = 2


@pytest.mark.parametrize(
    "change,said",
    [
        (two_in_one_slot, "layer 2 has slots"),
        (one_hot_more, "layer 1 has 6 hot"),
        (no_such_tier, "in tier 2"),
    ],
)
def test_a_table_that_names_no_place_or_one_twice(change, said):
    with pytest.raises(UsageError, match=said):
        Placement(*broken(change))


def test_tables_of_other_shapes_or_types():
    made = counted(0)
    with pytest.raises(UsageError, match="int64"):
        Placement(made.tier.astype(np.int64), made.slot)
    with pytest.raises(UsageError, match="expected as many"):
        Placement(made.tier, made.slot[:2])
    with pytest.raises(UsageError, match="cannot follow"):
        made.towards(Placement.in_order(LAYERS, EXPERTS, 4))
    with pytest.raises(UsageError, match="layers, experts"):
        Placement.from_counts(np.zeros(3), 1)
