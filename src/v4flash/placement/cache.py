"""Which cold experts lie in a layer's spare slots, and which one makes room for another.

Knows: the bookkeeping of a small cache, computed on the device. Does not know: weights, or how an expert is fetched.

The expert that was used the longest ago makes room. One that the current pass needs never does, so that a pass which
needs more experts than there are slots takes them in turns: what is there is used, then the next are fetched.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EMPTY = -1
SPARE = 8  # slots of a layer, unless another number is asked for; a pass of 8 rows rarely chooses more cold experts
_OLDEST = jnp.iinfo(jnp.int32).max


class Held(NamedTuple):
    """The spare slots of a layer.

    Attributes:
      expert: int32 [C], the expert in each slot, or EMPTY.
      age: int32 [C], passes since it was used, counting only those that used cold experts.
    """

    expert: jax.Array
    age: jax.Array

    @classmethod
    def empty(cls, slots: int) -> "Held":
        return cls(jnp.full((slots,), EMPTY, jnp.int32), jnp.full((slots,), _OLDEST, jnp.int32))


class Fetches(NamedTuple):
    """What to bring in: the first `count` int32 [] of `experts` int32 [C] into `slots` int32 [C]."""

    count: jax.Array
    experts: jax.Array
    slots: jax.Array


def used(held: Held) -> jax.Array:
    """bool [C]: the slots whose experts the pass needs that was planned last."""
    return held.age == 0


def places(held: Held, ids: jax.Array) -> jax.Array:
    """The slot int32 [...] of each expert id [...], or EMPTY where it is in none."""
    match = ids[..., None] == held.expert
    return jnp.where(jnp.any(match, axis=-1), jnp.argmax(match, axis=-1), EMPTY).astype(jnp.int32)


def plan(held: Held, needed: jax.Array) -> tuple[Held, Fetches]:
    """Slots for as many of the experts `needed` bool [E] as there is room for, and what must be fetched for that.

    Of more needed experts than slots, those already there stay, then those of lower index come.
    """
    slots = held.expert.shape[0]
    kept = (held.expert >= 0) & needed[jnp.maximum(held.expert, 0)]
    there = jnp.any(held.expert == jnp.arange(needed.shape[0])[:, None], axis=1)
    missing = needed & ~there
    count = jnp.minimum(jnp.sum(missing), slots - jnp.sum(kept)).astype(jnp.int32)
    # Slots to give up, the oldest first and the kept ones last; of equal age the first.
    giving = jnp.argsort(jnp.where(kept, -1, held.age), descending=True, stable=True).astype(jnp.int32)
    coming = jnp.argsort(~missing, stable=True)[:slots].astype(jnp.int32)
    fetched = jnp.arange(slots) < count
    expert = held.expert.at[giving].set(jnp.where(fetched, coming, held.expert[giving]))
    now = kept.at[giving].max(fetched)
    older = jnp.where(held.age < _OLDEST, held.age + 1, held.age)
    return Held(expert, jnp.where(now, 0, older)), Fetches(count, coming, giving)
