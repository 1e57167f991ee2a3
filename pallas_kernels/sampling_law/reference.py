"""What temperature and filters make of logits, in plain jax.numpy.

Knows: the order of the filters, and which of equal tokens stay. Does not know: randomness, or whose logits they are.

Tokens are ranked by (logit, descending; id, ascending), a total order, so top-k keeps exactly k tokens and top-p
exactly the shortest sufficient prefix even where logits are equal.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filters:
    """Temperature, then top-k, then top-p of what it left, then min-p.

    Attributes:
      temperature: float32 [], large enough to divide by (from 2^-126 on).
      top_k: int32 [], this many of the likeliest tokens, of equal ones the lowest ids; 0, and from V on, is off.
      top_p: float32 [], as few of the likeliest tokens as carry this share, at least one; 1 is off.
      min_p: float32 [], tokens less likely than this fraction of the likeliest are never drawn; 0 is off.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def of(cls, options: Any) -> "Filters":
        """The same four of other sampling options, by name."""
        return cls(options.temperature, options.top_k, options.top_p, options.min_p)


def weights(logits: jax.Array, filters: Filters) -> jax.Array:
    """Unnormalised probabilities [V] of logits [V] behind all filters, 1 for the likeliest token."""
    vocabulary = logits.shape[0]
    made = jnp.exp((logits - jnp.max(logits)) / filters.temperature)
    ranked = jnp.argsort(-logits, stable=True)
    rank = jnp.zeros((vocabulary,), jnp.int32).at[ranked].set(jnp.arange(vocabulary, dtype=jnp.int32))
    made = jnp.where((filters.top_k > 0) & (rank >= filters.top_k), 0.0, made)
    running = jnp.cumsum(made[ranked])
    before = jnp.concatenate([jnp.zeros((1,)), running[:-1]])[rank]
    outside = (filters.top_p < 1) & (rank > 0) & (before >= filters.top_p * running[-1])
    made = jnp.where(outside, 0.0, made)
    return jnp.where(made < filters.min_p, 0.0, made)


def laws(logits: jax.Array, filters: Filters) -> jax.Array:
    """The laws float32 [R, V] of rows of logits float32 [R, V]."""

    def law(row: jax.Array) -> jax.Array:
        made = weights(row, filters)
        return made / jnp.sum(made)

    return jax.vmap(law)(logits)
