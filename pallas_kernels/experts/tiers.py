"""Experts in two memories: the hot ones on the device, the cold ones in pinned host memory, some of these kept.

Knows: where the packed bytes of a cold expert lie, which spare device slots of a layer hold which cold expert, and
what a step does with them, in plain jax.numpy. Does not know: who decides what is hot, or how memory is asked for.

    hot      PackedExperts [H, ...]      one layer's, on the device
    cold     int32 [C, P]                one layer's, in host memory; an expert's four arrays in one record of P words
    table    int32 [L, E, 2]             (tier, slot) of each expert; tier 0 is `hot`, tier 1 is `cold`
    records  int32 [S, P]                one layer's spare device slots

A step lists its experts (`reference.routes`). `place` says of every entry where it is read. An entry that is neither
hot nor kept is missed: it is read from host memory, and as long as there are slots that this step does not use, the
least recently used one first, it is written there while it is read. Both launches of a step follow the same places.
The slots then belong to their new experts, for nothing reads them before the next step.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.experts import reference
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import Hidden, Routes
from pallas_kernels.tiles import PackedMatrix

HOT, COLD = 0, 1  # tiers of the table
# Where a program of a launch reads its expert. Hot and cold are the tiers themselves.
NOTHING, KEPT, SHARED = -1, 2, 3
OLDEST = 1 << 30  # ages end there
COUNTED = ("cold", "missed", "kept")


# Places of a step: int32 [2 + NE, 4], what the programs of both launches work on, in the order in which they start.
# Missed entries come first, for they take longest, then the shared expert, then the others, then empty places.
# Columns: entry + 1 (0 is the shared expert's), source, slot in it, and the slot of `records` to write to or -1.
# The last row is no place: it says how many entries are missed and how many are listed, then zeros.
PLACE_COLUMNS = 4


class TieredExperts(NamedTuple):
    """The routed experts of one layer.

    Attributes:
      hot: packed, H of them.
      cold: int32 [C, P], records.
    """

    hot: PackedExperts
    cold: jax.Array


class Seen(NamedTuple):
    """What rows chose so far (`early`). All zeros is a state in which no pass has run.

    Attributes:
      chosen: int16 [V, L, K], the experts plus one that each token chose where it stood last, 0 where it never did.
      tokens, routes: int32 [R] and int16 [L, R, K], the rows of the last pass and the experts plus one they chose.
      start, count: int32 [], its first position, and how many of its rows were live.
    """

    chosen: jax.Array
    tokens: jax.Array
    routes: jax.Array
    start: jax.Array
    count: jax.Array


class Early(NamedTuple):
    """What is fetched before a pass asks for it (`early`). All zeros is a state in which nothing was.

    Attributes:
      fetches: int32 [L, S], the expert plus one that was fetched for the last pass into each slot, 0 for none.
      turn: int32 [1], which each fetch hands to the next, so that they follow one another; its value means nothing.
      counts: int32 [L, 2], sums over passes: experts fetched; of these used by the pass they were fetched for, which
        the next pass counts.
      seen: what guesses are made from.
    """

    fetches: jax.Array
    turn: jax.Array
    counts: jax.Array
    seen: Seen


class Kept(NamedTuple):
    """The cold experts that all layers keep on the device, and what they counted. Updated in place by each layer.

    All zeros is a state in which nothing is kept.

    Attributes:
      records: int32 [S, P] of each layer; arrays of their own, so that no layer waits for what another one writes.
      owners: int32 [L, S], the expert in each slot plus one, 0 for none.
      ages: int32 [L, S], passes since it was used.
      counts: int32 [L, 3], sums over passes: cold experts listed, of these missed, of these kept.
      early: what is fetched on a guess, None where nothing is.
    """

    records: tuple[jax.Array, ...]
    owners: jax.Array
    ages: jax.Array
    counts: jax.Array
    early: Early | None = None

    def with_records(self, layer: int, records: jax.Array) -> "Kept":
        """With the slots of one layer as they are now."""
        return self._replace(records=self.records[:layer] + (records,) + self.records[layer + 1 :])


def record_words(like: PackedExperts) -> int:
    """P: words of one expert, for arrays or shapes [n, ...]."""
    return sum(math.prod(array.shape[1:]) for array in jax.tree.leaves(like))


def record_offsets(like: PackedExperts) -> dict[str, int]:
    """First word of each array within a record."""
    offsets, place = {}, 0
    for name, array in zip(("gate_up.words", "gate_up.scales", "down.words", "down.scales"),
                           jax.tree.leaves(like), strict=True):  # fmt: skip
        offsets[name] = place
        place += math.prod(array.shape[1:])
    return offsets


def to_records(experts: PackedExperts) -> jax.Array:
    """Packed experts [n, ...] as int32 [n, P]."""
    return jnp.concatenate([array.reshape(array.shape[0], -1) for array in jax.tree.leaves(experts)], axis=1)


def from_records(records: jax.Array, like: PackedExperts) -> PackedExperts:
    """Records int32 [n, P] as packed experts [n, ...]; `like` gives the shapes behind the first axis."""
    parts, place = [], 0
    for array in jax.tree.leaves(like):
        size = math.prod(array.shape[1:])
        parts.append(records[:, place : place + size].reshape(-1, *array.shape[1:]))
        place += size
    return PackedExperts(PackedMatrix(*parts[:2]), PackedMatrix(*parts[2:]))


def empty(layers: int, slots: int, words: int) -> Kept:
    """Nothing kept yet, in `slots` slots for each of `layers` layers; `words` is P."""
    records = tuple(jnp.zeros((slots, words), jnp.int32) for _ in range(layers))
    shapes = (layers, slots), (layers, slots), (layers, len(COUNTED))
    return Kept(records, *(jnp.zeros(shape, jnp.int32) for shape in shapes))


def places_shape(entries: int) -> tuple[int, int]:
    """Of the places of a list with so many entries."""
    return 2 + entries, PLACE_COLUMNS


def place(layer: jax.Array, table: jax.Array, routes: Routes, kept: Kept) -> tuple[jax.Array, Kept]:
    """Places int32 [2 + NE, 4] of a layer's list, and what is kept afterwards; `records` are not touched yet.

    Args: layer, int32 []; table, int32 [L, E, 2].
    """
    own, slots = table[layer], kept.owners.shape[1]
    owners, ages = kept.owners[layer], kept.ages[layer]
    listed = reference.listed(routes)
    ids, entries = routes.expert_ids, routes.expert_ids.shape[0]
    tier, home = own[jnp.maximum(ids, 0)].T
    cold = listed & (tier != HOT)
    hits = cold[:, None] & (ids[:, None] + 1 == owners)
    missed = cold & ~jnp.any(hits, axis=1)
    # A row that chose an expert twice has two entries of it, of which the first is kept.
    before = jnp.tril(jnp.ones((entries, entries), bool), -1)
    wanted = missed & ~jnp.any((ids[:, None] == ids) & before, axis=1)
    free = ~jnp.any(hits, axis=0)
    turn = jnp.sum(before & wanted, axis=1)
    place = jnp.arange(slots)
    older = free & ((ages > ages[:, None]) | ((ages == ages[:, None]) & (place < place[:, None])))
    rank = jnp.sum(older, axis=1)
    into = wanted[:, None] & free & (turn[:, None] == rank)
    filled = jnp.any(into, axis=0)
    owners = jnp.where(filled, jnp.max(jnp.where(into, ids[:, None] + 1, 0), axis=0), owners)
    ages = jnp.where(filled | ~free, 0, jnp.minimum(ages + 1, OLDEST))

    def slot_of(match: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(match, place, -1), axis=1)

    hit, keep = slot_of(hits), slot_of(into)
    source = jnp.where(hit >= 0, KEPT, jnp.where(cold, COLD, HOT))
    rows = jnp.stack([jnp.arange(entries) + 1, source, jnp.where(hit >= 0, hit, home), keep], axis=1)
    rows = jnp.where(listed[:, None], rows, jnp.asarray([0, NOTHING, 0, -1]))
    shared = jnp.asarray([[0, SHARED, 0, -1]])
    order = jnp.where(missed, 0, jnp.where(listed, 2, 3))
    order = jnp.argsort(jnp.append(order, 1), stable=True)
    counts = jnp.stack([jnp.sum(part, dtype=jnp.int32) for part in (cold, missed, filled)])
    numbers = jnp.stack([jnp.sum(missed), jnp.sum(listed), 0, 0])
    places = jnp.concatenate([jnp.concatenate([rows, shared])[order], numbers[None]]).astype(jnp.int32)
    return places, kept._replace(
        owners=kept.owners.at[layer].set(owners),
        ages=kept.ages.at[layer].set(ages),
        counts=kept.counts.at[layer].add(counts),
    )


def on_device(cold: jax.Array) -> jax.Array:
    """All cold experts of a layer in device memory: a definition may move what a launch reads where it lies."""
    return jax.device_put(cold, jax.memory.Space.Device)


def listed_experts(experts: TieredExperts, records: jax.Array, places: jax.Array) -> PackedExperts:
    """The packed experts of the list's entries [NE, ...], each from where it is read; any for empty entries."""
    entry, source, slot, _ = places[:-1].T
    entry = jnp.where(entry > 0, entry - 1, len(places))
    source = jnp.full((len(places) - 2,), NOTHING).at[entry].set(source, mode="drop")
    slot = jnp.zeros_like(source).at[entry].set(slot, mode="drop")

    def chosen(hot: jax.Array, cold: jax.Array, kept: jax.Array) -> jax.Array:
        def read(array: jax.Array, tier: int) -> jax.Array:
            return array[jnp.where(source == tier, slot, 0)]

        wide = source.reshape(-1, *[1] * (hot.ndim - 1))
        return jnp.where(
            wide == KEPT, read(kept, KEPT), jnp.where(wide == COLD, read(cold, COLD), read(hot, HOT))
        )

    cold, kept = (from_records(part, experts.hot) for part in (on_device(experts.cold), records))
    return jax.tree.map(chosen, experts.hot, cold, kept)


def written(
    records: jax.Array, experts: TieredExperts, places: jax.Array, parts: tuple[str, ...]
) -> jax.Array:
    """`records` with the missed experts that are kept; `parts` of them, of gate_up and down."""
    _, source, slot, keep = places[:-1].T
    read = on_device(experts.cold)[jnp.where(source == COLD, slot, 0)]
    offsets, words = record_offsets(experts.hot), records.shape[1]
    column = jnp.arange(words)
    middle = offsets["down.words"]
    mine = ("gate_up" in parts) & (column < middle) | ("down" in parts) & (column >= middle)
    place = jnp.where(keep >= 0, keep, records.shape[0])
    old = records[jnp.minimum(place, records.shape[0] - 1)]
    return records.at[place].set(jnp.where(mine, read, old), mode="drop")


def gate_up(
    x: jax.Array,
    experts: TieredExperts,
    shared: PackedExperts,
    routes: Routes,
    places: jax.Array,
    records: jax.Array,
    *,
    limit: float,
    dtype=jnp.bfloat16,
    rounded: bool = True,
) -> tuple[Hidden, jax.Array]:
    """`reference.gate_up` of experts in both memories; also `records` with its part of what is newly kept."""
    listed, own = listed_experts(experts, records, places), _own_entries(routes)
    hidden = reference.gate_up(x, listed, shared, own, limit=limit, dtype=dtype, rounded=rounded)
    return hidden, written(records, experts, places, ("gate_up",))


def down(
    hidden: Hidden,
    experts: TieredExperts,
    shared: PackedExperts,
    routes: Routes,
    places: jax.Array,
    records: jax.Array,
    *,
    chosen: int,
    round_block: int,
    dtype=jnp.bfloat16,
) -> tuple[jax.Array, jax.Array]:
    """`reference.down` of experts in both memories; also `records` with its part of what is newly kept."""
    listed, own = listed_experts(experts, records, places), _own_entries(routes)
    made = reference.down(hidden, listed, shared, own, chosen=chosen, round_block=round_block, dtype=dtype)
    return made, written(records, experts, places, ("down",))


def _own_entries(routes: Routes) -> Routes:
    """The list with its entries' own numbers for experts."""
    numbers = jnp.arange(routes.expert_ids.shape[0], dtype=jnp.int32)
    return routes._replace(expert_ids=jnp.where(reference.listed(routes), numbers, reference.EMPTY))
