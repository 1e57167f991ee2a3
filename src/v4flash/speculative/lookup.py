"""Drafts copied from the text itself: what followed the last time the newest tokens stood in this order.

Knows: the longest earlier occurrence of the newest tokens, what follows it, and when copying promises more than
the drafter. Does not know: the drafter, or how drafts are judged.

    position     ... 3  4  5  6  7 ...           20 21 22
    token        ... a  b  c  d  e ...            a  b  c        22 is the newest: copy d, e, ...

A copied draft is not drawn, so its law is one-hot. Whether a step copies depends on the text so far, on how
copies fared in earlier steps, and on the *law* of the drafter's first row, never on the token drawn from that
law: had a step copied because another token was drawn, the steps left to the drafter would be judged by a law
their drafts no longer follow, and the emitted law would be bent.

At temperature 0 the drafter's first law is one-hot, and "finds the copied token likely" means that it drafts it.
"""

import dataclasses
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError
from v4flash.speculative.depth import MAX_DRAFT, expected_tokens

# Occurrences are compared over at most this many tokens; among equally long ones the latest is taken.
LONGEST = 16
SHORTEST = 6
AGREEMENT = 0.3
USUAL_RATE = 0.9
_LEARNING, _FORGETTING = 1 / 8, 1 / 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupPolicy:
    """When to copy; all of it data.

    Attributes:
      on: bool [].
      shortest: int32 [], tokens that an occurrence must share with the newest ones; twice as many (at most
        LONGEST) in a step that did not ask the drafter.
      agreement: float32 [], least probability of the copied token in the drafter's first law.
      length: int32 [], most tokens copied in a step.
    """

    on: jax.Array
    shortest: jax.Array
    agreement: jax.Array
    length: jax.Array

    @classmethod
    def make(
        cls, *, on: bool, length: int = MAX_DRAFT, shortest: int = SHORTEST, agreement: float = AGREEMENT
    ) -> "LookupPolicy":
        """Raises UsageError when `shortest` is not from 1 to LONGEST or `agreement` not from 0 to 1."""
        if not 1 <= operator.index(shortest) <= LONGEST:
            raise UsageError(f"lookup length is {shortest}, expected 1 to {LONGEST} tokens")
        if not 0 <= agreement <= 1:
            raise UsageError(f"lookup agreement is {agreement}, expected 0 to 1")
        return cls(
            on=jnp.asarray(on),
            shortest=jnp.asarray(shortest, jnp.int32),
            agreement=jnp.asarray(agreement, jnp.float32),
            length=jnp.asarray(length, jnp.int32),
        )


class Copy(NamedTuple):
    """What the text itself proposes.

    Attributes:
      ids: int32 [k], the tokens that followed; arbitrary where there is no occurrence.
      shared: int32 [], how many of the newest tokens the occurrence shares, at most LONGEST; 0 for none.
    """

    ids: jax.Array
    shared: jax.Array


def find(history: jax.Array, newest: jax.Array, k: int) -> Copy:
    """Looks for the newest tokens earlier in the text.

    Where the copy reaches the newest token it goes on from its own beginning, as a text that repeats does.

    Args: history int32 [N], tokens by absolute position, known up to `newest`; newest int [], position of the
    newest token; k, tokens wanted (static).
    """
    places = history.shape[0]
    padded = jnp.concatenate([jnp.full((LONGEST,), -1, history.dtype), history])
    place = jnp.arange(places, dtype=jnp.int32)
    same, shared = place < newest, jnp.zeros((places,), jnp.int32)
    for back in range(LONGEST):
        token = padded[LONGEST + newest - back]
        same &= (padded[LONGEST - back : LONGEST - back + places] == token) & (token >= 0)
        shared += same
    longest = jnp.max(shared)
    found = jnp.max(jnp.where(shared == longest, place, -1))
    period = jnp.maximum(newest - found, 1)
    ids = history[found + 1 + jnp.arange(k, dtype=jnp.int32) % period]
    return Copy(ids, jnp.where(longest > 0, longest, 0))


def should_copy(
    copy: Copy,
    first_law: jax.Array,
    drafted: jax.Array,
    rate: jax.Array,
    ahead: jax.Array,
    policy: LookupPolicy,
    wanted: jax.Array,
    room: jax.Array,
) -> jax.Array:
    """bool []: whether this step verifies the copy instead of the drafts.

    Args:
      copy: what `find` found.
      first_law: float [V], law of the drafter's first row; read only if `drafted`.
      drafted: bool [], whether the drafter ran.
      rate: float [], how often copied tokens were accepted in earlier steps.
      ahead: float [k], how often drafts were, by place.
      policy: when to copy.
      wanted, room: int [], drafts that would be verified otherwise, and that may be verified at most.
    """
    k = ahead.shape[0]
    enough = jnp.where(drafted, policy.shortest, jnp.minimum(2 * policy.shortest, LONGEST))
    agreed = ~drafted | (first_law[copy.ids[0]] >= policy.agreement)
    copies = jnp.clip(jnp.minimum(policy.length, room), 0, k)
    promised = expected_tokens(jnp.broadcast_to(rate, (k,)))[copies]
    otherwise = jnp.where(drafted, expected_tokens(ahead)[wanted], 1)
    return policy.on & (copy.shared >= enough) & agreed & (copies > 0) & (promised > otherwise)


def observed_rate(rate: jax.Array, accepted: jax.Array, live: jax.Array, copied: jax.Array) -> jax.Array:
    """The rate of accepted copies after one more step; it drifts back to the usual while nothing is copied."""
    tries = jnp.where(copied, jnp.minimum(accepted + 1, live), 0)
    outcome = accepted / jnp.maximum(tries, 1)
    weight = 1 - (1 - _LEARNING) ** tries
    return jnp.where(
        tries > 0, rate + weight * (outcome - rate), rate + _FORGETTING * (np.float32(USUAL_RATE) - rate)
    )
