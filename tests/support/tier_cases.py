"""Steps of a layer whose experts lie in two memories, for every body of its launches: one test, one oracle.

The oracle is a dictionary in Python that keeps the least recently used slots last; the products of a body must have
the bits of the same body with all experts on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts import early, reference, tiers
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import Routes
from pallas_kernels.experts.specs import ExpertSpec
from pallas_kernels.experts.tiers import Kept, TieredExperts

LAYERS, LAYER = 3, 1
POISON = 0x7F7F7F7F


@dataclasses.dataclass(frozen=True)
class Body:
    """One body of the launches: (spec, x, experts, shared, routes) -> partial outputs, resident and tiered.

    `plan` and `fetch` as in `early`.
    """

    place: Callable
    resident: Callable
    tiered: Callable
    plan: Callable
    fetch: Callable


@dataclasses.dataclass(frozen=True)
class World:
    """Experts of one layer in both forms.

    Attributes:
      routed: all of them on the device. shared: the shared one.
      experts, table: `hot` in a mixed order on the device, the others poisoned there and in host memory.
    """

    spec: ExpertSpec
    routed: PackedExperts
    shared: PackedExperts
    experts: TieredExperts
    table: jax.Array


def world(spec: ExpertSpec, hot: Sequence[int], seed: int = 0) -> World:
    """A layer whose `hot` experts are on the device; other layers' rows of the table are wrong on purpose."""
    routed, shared = expert_cases.packed(spec, seed)
    rng = np.random.default_rng(seed)
    cold = [expert for expert in range(spec.experts) if expert not in hot]
    hot, cold = list(rng.permutation(hot)), list(rng.permutation(cold))
    table = np.full((LAYERS, spec.experts, 2), 1 << 20, np.int32)
    for tier, members in enumerate((hot, cold)):
        for slot, expert in enumerate(members):
            table[LAYER, expert] = tier, slot

    def stack(records: np.ndarray, members: list) -> jax.Array:
        return jnp.asarray(records[members] if members else np.full((1, records.shape[1]), POISON), jnp.int32)

    records = np.asarray(tiers.to_records(routed))
    on_device = tiers.from_records(stack(records, hot), routed)
    return World(spec, routed, shared, TieredExperts(on_device, stack(records, cold)), jnp.asarray(table))


def start(world: World, slots: int, poison: bool) -> Kept:
    """Nothing kept, in slots of zeros: padding of a record is never read from the link, so it must be there before."""
    kept = tiers.empty(LAYERS, slots, tiers.record_words(world.routed))
    return kept.with_records(LAYER, jnp.full_like(kept.records[LAYER], POISON)) if poison else kept


@functools.partial(jax.jit, static_argnums=2)
def _routes(ids, live, entries) -> Routes:
    weights = 0.1 + ids % 7 / 8 + jnp.arange(ids.shape[0])[:, None] / 16
    return reference.routes(ids, weights.astype(jnp.float32), jnp.arange(8) < live, entries)


def routes(spec: ExpertSpec, rows: Sequence[Sequence[int]]) -> Routes:
    """The list of given choices of the first rows; the others are dead, and name experts all the same."""
    ids = np.asarray([*rows, *[range(spec.chosen)] * (8 - len(rows))], np.int32).reshape(8, spec.chosen)
    return _routes(jnp.asarray(ids), len(rows), spec.entries)


class Oracle:
    """Which cold expert lies in which slot of the layer, by the rules."""

    def __init__(self, hot: Sequence[int], slots: int):
        self.hot, self.owner, self.idle = set(hot), [-1] * slots, [0] * slots
        self.counts, self.fetched, self.early = np.zeros(3, int), np.zeros(2, int), {}

    def guess(self, named: Sequence[int]) -> set[int]:
        """Updates the slots for guessed experts; returns the slots that are fetched into."""
        used = [
            expert
            for slot, expert in self.early.items()
            if self.owner[slot] == expert and not self.idle[slot]
        ]
        cold = sorted({expert for expert in named if expert >= 0} - self.hot)
        kept = {slot for slot, expert in enumerate(self.owner) if expert in cold}
        coming = [expert for expert in cold if expert not in self.owner]
        victims = sorted(set(range(len(self.owner))) - kept, key=lambda slot: (-self.idle[slot], slot))
        self.early = dict(zip(victims, coming, strict=False))
        for slot, expert in self.early.items():
            self.owner[slot], self.idle[slot] = expert, 1
        self.fetched += len(self.early), len(used)
        return set(self.early)

    def step(self, listed: Sequence[int]) -> set[int]:
        """Updates the slots for a list of experts in its order; returns the slots that are written."""
        cold = [expert for expert in listed if expert not in self.hot]
        missed = [expert for expert in cold if expert not in self.owner]
        used = {slot for slot, expert in enumerate(self.owner) if expert in cold}
        victims = sorted(set(range(len(self.owner))) - used, key=lambda slot: (-self.idle[slot], slot))
        filled = dict(zip(victims, dict.fromkeys(missed), strict=False))
        for slot in range(len(self.owner)):
            self.idle[slot] = 0 if slot in used or slot in filled else min(self.idle[slot] + 1, tiers.OLDEST)
        for slot, expert in filled.items():
            self.owner[slot] = expert
        self.counts += len(cold), len(missed), len(filled)
        return set(filled)


def check_steps(
    body: Body,
    spec: ExpertSpec,
    hot: Sequence[int],
    slots: int,
    steps,
    poison: bool = False,
    guesses: Sequence[Sequence[int]] = (),
) -> None:
    """Runs steps (choices of the live rows of each) and compares everything after each of them.

    With `guesses`, experts named before each step, what they name is fetched first.
    """
    here, oracle = world(spec, hot), Oracle(hot, slots)
    kept, packed = start(here, slots, poison), np.asarray(tiers.to_records(here.routed))
    if guesses:
        kept = early.empty(kept, early.nothing_seen(1, LAYERS, 8, spec.chosen))
    for number, rows in enumerate(steps):
        listed = routes(spec, rows)
        before, fetched = np.asarray(kept.records[LAYER]), set()
        if guesses:
            fetched = oracle.guess(guesses[number])
            kept = _fetched(body, here, kept, guesses[number])
            for slot in fetched:
                np.testing.assert_array_equal(kept.records[LAYER][slot], packed[oracle.owner[slot]])
            assert kept.early.counts[LAYER].tolist() == oracle.fetched.tolist(), number
        written = fetched | oracle.step(listed.expert_ids[: int(listed.count[0])].tolist())
        places, kept = body.place(jnp.int32(LAYER), here.table, listed, kept)
        x = expert_cases.rounded_rows(spec, number)
        expected = np.asarray(body.resident(spec, x, here.routed, here.shared, listed))[: len(rows)]
        found, records = body.tiered(spec, x, here.experts, here.shared, listed, places, kept.records[LAYER])
        kept = kept.with_records(LAYER, records)
        np.testing.assert_array_equal(np.asarray(found)[: len(rows)], expected, err_msg=f"step {number}")
        assert (kept.owners[LAYER] - 1).tolist() == oracle.owner, number
        assert kept.ages[LAYER].tolist() == oracle.idle, number
        assert kept.counts[LAYER].tolist() == oracle.counts.tolist(), number
        after = np.asarray(records)
        for slot, expert in enumerate(oracle.owner):
            if slot in written:
                np.testing.assert_array_equal(after[slot], packed[expert], err_msg=f"step {number}")
            else:
                np.testing.assert_array_equal(after[slot], before[slot], err_msg=f"step {number}")
    for layer in set(range(LAYERS)) - {LAYER}:
        assert not any(np.asarray(part[layer]).any() for part in (kept.owners, kept.ages, kept.counts))


def _fetched(body: Body, here: World, kept: Kept, guessed: Sequence[int]) -> Kept:
    """What is kept when the layer's guessed experts have been fetched; other layers guess nothing."""
    named = np.zeros((LAYERS, 20), np.int32)
    named[LAYER, 20 - len(guessed) :] = np.asarray(guessed, np.int32) + 1
    kept = body.plan(here.table, jnp.asarray(named), kept)
    records, turn = body.fetch(
        jnp.int32(LAYER),
        here.experts.cold,
        here.table,
        kept.early.fetches,
        kept.early.turn,
        kept.records[LAYER],
    )
    return kept.with_records(LAYER, records)._replace(early=kept.early._replace(turn=turn))


SMALL = ExpertSpec(32, 32, 8, 2, 32, limit=0.5, dtype="float32")
HOT = (0, 2, 3, 6)  # of SMALL's eight
# Name: (hot experts, spare slots, steps).
CASES = {
    "all hot": (range(8), 2, [[(0, 1), (5, 7)]]),
    "all cold": ((), 8, [[(0, 1), (5, 7)], [(7, 0)]]),
    "mixed": (HOT, 3, [[(0, 1), (4, 2), (6, 3)]]),
    "kept since the step before": (HOT, 2, [[(0, 1), (4, 2)], [(1, 4), (1, 0)], [(4, 3)]]),
    "more misses than slots": (HOT, 2, [[(1, 4), (5, 7)], [(5, 7), (1, 4)], [(7, 5)]]),
    "the least recently used goes": (HOT, 2, [[(1, 0)], [(4, 0)], [(1, 2)], [(5, 1)], [(4, 5)], [(0, 2)], [(7, 3)]]),
    "a used slot stays": (HOT, 1, [[(1, 0)], [(1, 4), (5, 7)], [(1, 0)]]),
    "one row": (HOT, 2, [[(7, 0)], [(0, 7)]]),
    "no rows": (HOT, 2, [[(1, 0)], [], [(1, 0)]]),
    "eight rows": (HOT, 3, [[(1, 0), (4, 2), (1, 5), (6, 7), (7, 1), (3, 2), (0, 6), (5, 4)]] * 2),
    "an expert twice in a row": (HOT, 2, [[(1, 1), (0, 1)], [(1, 1)]]),
}  # fmt: skip
# Name: (hot experts, spare slots, steps, experts guessed before each).
GUESSED = {
    "right": (HOT, 2, [[(0, 1), (4, 2)], [(5, 7)]], [(1, 4), (7, 5)]),
    "wrong": (HOT, 2, [[(0, 1), (4, 2)], [(1, 4)], [(1, 0)]], [(5, 7), (7,), (5, 7)]),
    "nothing": (HOT, 2, [[(0, 1)], [(1, 4)]], [(), ()]),
    "hot ones and the same again": (HOT, 3, [[(0, 1), (4, 2)]] * 2, [(0, 1, 1, 3, 1, 6), (1, 4, 4)]),
    "more than slots": (HOT, 2, [[(7, 5), (4, 1)], [(7, 5)]], [(7, 5, 4, 1), (7, 5, 1)]),
    "one slot": (HOT, 1, [[(1, 0)], [(1, 4)], [(5, 0)]], [(1,), (4,), (1, 5)]),
    "a guessed slot is kept from the other guesses": (HOT, 2, [[(1, 4)], [(0, 2)], [(5, 1)]], [(1,), (1,), (1, 5)]),
    "a wrong guess goes before what is older": (HOT, 3, [[(1, 4)], [(1, 4)], [(7, 0)]], [(1, 4), (5,), ()]),
    "no rows": (HOT, 2, [[(1, 0)], [], [(1, 0)]], [(1,), (4,), (4, 1)]),
}  # fmt: skip


def reference_body() -> Body:
    """The definitions."""
    return Body(
        jax.jit(tiers.place),
        _reference_resident,
        _reference_tiered,
        jax.jit(early.plan),
        jax.jit(early.fetch),
    )


def _options(spec: ExpertSpec) -> tuple[dict, dict]:
    dtype = jnp.dtype(spec.dtype)
    return dict(limit=spec.limit, dtype=dtype), dict(chosen=spec.chosen, round_block=spec.block, dtype=dtype)


@functools.partial(jax.jit, static_argnums=0)
def _reference_resident(spec, x, routed, shared, listed):
    first, second = _options(spec)
    return reference.down(
        reference.gate_up(x, routed, shared, listed, **first), routed, shared, listed, **second
    )


@functools.partial(jax.jit, static_argnums=0)
def _reference_tiered(spec, x, experts, shared, listed, places, records):
    first, second = _options(spec)
    hidden, records = tiers.gate_up(x, experts, shared, listed, places, records, **first)
    return tiers.down(hidden, experts, shared, listed, places, records, **second)


def fused_body() -> Body:
    """The launches."""
    from pallas_kernels.experts import early_fused, fused, tiered

    def resident(spec, x, routed, shared, listed):
        first, second = (own | dict(scale_block=spec.block) for own in _options(spec))
        return fused.down(fused.gate_up(x, routed, shared, listed, **first), routed, shared, listed, **second)

    def both(spec, x, experts, shared, listed, places, records):
        first, second = (own | dict(scale_block=spec.block) for own in _options(spec))
        hidden, records = tiered.gate_up(x, experts, shared, listed, places, records, **first)
        return tiered.down(hidden, experts, shared, listed, places, records, **second)

    return Body(tiered.place, resident, both, early_fused.plan, early_fused.fetch)
