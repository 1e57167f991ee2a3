"""Cold experts fetched on a guess, before a pass asks for them: what is guessed, planned and copied, in jax.numpy.

Knows: which experts tokens chose when they stood in the text last, which spare slots guessed experts get, and what is
copied there. Does not know: how a pass uses its slots (`tiers`), or what runs meanwhile.

    named = guess(...)              [L, G], for all layers at once, before the first one
    kept = plan(table, named, kept) slots for guessed experts, again for all layers
    records[l] = fetch(...)         one copy a layer, each behind the one before

A guessed expert that is cold and in no slot takes the slot used the longest ago that holds no other guessed one. Then
`tiers.place` finds it there, as if it had been kept. A wrong guess costs time and the slot, and is given up next: it
counts as unused for longer than anything that the pass before used.

All arrays that a fetch reads or writes belong to the state that passes hand on. None is memory that XLA gives to other
values at other times of a pass, for whoever took it over would be made to wait for the fetch.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.experts import tiers
from pallas_kernels.experts.tiers import Early, Kept, Seen

COUNTED = ("fetched", "used")
UNUSED = 1  # age of what was fetched and not used yet


def nothing_seen(tokens: int, layers: int, rows: int, chosen: int) -> Seen:
    """No pass has run yet: of `layers` layers, `rows` rows that choose `chosen` experts, and `tokens` token ids."""
    return Seen(
        jnp.zeros((tokens, layers, chosen), jnp.int16),
        jnp.zeros((rows,), jnp.int32),
        jnp.zeros((layers, rows, chosen), jnp.int16),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def empty(kept: Kept, seen: Seen) -> Kept:
    """`kept` with nothing fetched early yet."""
    layers = kept.owners.shape[0]
    fetches, counts = jnp.zeros_like(kept.owners), jnp.zeros((layers, len(COUNTED)), jnp.int32)
    return kept._replace(early=Early(fetches, jnp.zeros((1,), jnp.int32), counts, seen))


def learned(seen: Seen, length: jax.Array) -> Seen:
    """With what those rows of the pass before chose that are part of the text, which has `length` (int32 []) rows now.

    Of two rows of one token the later one counts.
    """
    row = jnp.arange(seen.tokens.shape[0])
    live = row < jnp.minimum(seen.count, length - seen.start)
    alike = seen.tokens[:, None] == seen.tokens
    last = live & ~jnp.any(alike & live & (row > row[:, None]), axis=1)
    place = jnp.where(last, seen.tokens, seen.chosen.shape[0] + row)
    routes = seen.routes.swapaxes(0, 1)
    return seen._replace(chosen=seen.chosen.at[place].set(routes, mode="drop", unique_indices=True))


def guess(seen: Seen, tokens: jax.Array, length: jax.Array, count: jax.Array) -> tuple[jax.Array, Seen]:
    """Experts that the first `count` of tokens int32 [R] may choose behind `length` rows of text, and what is known.

    The guess is int32 [L, R K], experts plus one, 0 for none: what the tokens chose last. What the pass before chose
    need not be named, for spare slots hold it.
    """
    seen = learned(seen, length)
    vocabulary, layers, _ = seen.chosen.shape
    live = jnp.arange(tokens.shape[0]) < count
    chosen = jnp.where(live[:, None, None], seen.chosen[jnp.clip(tokens, 0, vocabulary - 1)], 0)
    return chosen.swapaxes(0, 1).reshape(layers, -1).astype(jnp.int32), seen


def noted(seen: Seen, tokens: jax.Array, routes: list[jax.Array], start: jax.Array, count: jax.Array) -> Seen:
    """With a pass of tokens int32 [R] at positions start.., `count` of them live, that chose `routes` int32 [R, K] of
    each layer; to be learned once it is known which rows were accepted."""
    return seen._replace(
        tokens=tokens, routes=(jnp.stack(routes) + 1).astype(jnp.int16), start=start, count=count
    )


def used(kept: Kept) -> jax.Array:
    """bool [L, S]: the slots whose experts were fetched for the pass before, and used by it."""
    return (kept.early.fetches > 0) & (kept.early.fetches == kept.owners) & (kept.ages == 0)


def plan(table: jax.Array, named: jax.Array, kept: Kept) -> Kept:
    """Slots for guessed experts. Of more of them than slots the first experts get one.

    Args: table, int32 [L, E, 2]; named, int32 [L, G], experts plus one, 0 for none.
    """
    early, slots = kept.early, kept.owners.shape[1]
    expert, slot = jnp.arange(table.shape[1]), jnp.arange(slots)
    wanted = jnp.any(named[:, None] == expert[:, None] + 1, axis=2) & (table[..., 0] != tiers.HOT)
    hits = wanted[..., None] & (kept.owners[:, None] == expert[:, None] + 1)
    coming, free = wanted & ~jnp.any(hits, axis=2), ~jnp.any(hits, axis=1)
    turn = jnp.cumsum(coming, axis=1) - coming
    ages, others = kept.ages[:, :, None], kept.ages[:, None]
    older = free[:, None] & ((others > ages) | ((others == ages) & (slot < slot[:, None])))
    rank = jnp.sum(older, axis=2)
    into = coming[..., None] & free[:, None] & (turn[..., None] == rank[:, None])
    fetches = jnp.max(jnp.where(into, expert[:, None] + 1, 0), axis=1).astype(jnp.int32)
    counts = jnp.stack([jnp.sum(part, axis=1, dtype=jnp.int32) for part in (fetches > 0, used(kept))], axis=1)
    return kept._replace(
        owners=jnp.where(fetches > 0, fetches, kept.owners),
        ages=jnp.where(fetches > 0, UNUSED, kept.ages),
        early=early._replace(fetches=fetches, counts=early.counts + counts),
    )


def fetch(
    layer: jax.Array,
    cold: jax.Array,
    table: jax.Array,
    fetches: jax.Array,
    turn: jax.Array,
    records: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A layer's `records` int32 [S, P] with its planned experts, and `turn` for the next layer's fetch.

    Args: layer, int32 []; cold, int32 [C, P], in host memory; fetches, int32 [L, S].
    """
    coming = fetches[layer]
    home = table[layer, jnp.maximum(coming - 1, 0), 1]
    brought = tiers.on_device(cold)[jnp.where(coming > 0, home, 0)]
    return jnp.where(coming[:, None] > 0, brought, records), turn
