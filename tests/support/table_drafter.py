"""A drafter whose logits and confidences stand in tables, chained by the shipped loop."""

import dataclasses
import types

import jax
import jax.numpy as jnp

from v4flash.model.drafter import Block, Drafter, drawn_chain
from v4flash.speculative.lookup import USUAL_RATE
from v4flash.speculative.stream import RUNNING


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """Row i behind token t has the logits base[i] + bias[t] and the confidence logit confidence[i, t].

    Attributes:
      base, bias, confidence: float [K, V], [V, V], [K, V].
      path: int32 [K], tokens taken instead of the drawn ones; the laws stay what they are.
    """

    base: jax.Array
    bias: jax.Array
    confidence: jax.Array
    path: jax.Array | None = None

    def block(self, backbone, state, anchor, rows, live) -> Block:
        """Hidden rows that say their own number."""
        return Block(jnp.eye(rows, dtype=self.base.dtype), self.base, [], [])

    def chain(self, block, anchor, draw, wanted=None):
        """The shipped loop over the tables."""
        size = self.bias.shape[0]

        def taken(j, logits):
            token, law = draw(j, logits)
            return token if self.path is None else self.path[j], law

        return drawn_chain(
            block,
            anchor,
            taken,
            wanted,
            lambda token: jax.nn.one_hot(token, size, dtype=self.base.dtype),
            lambda embedded: embedded @ self.bias,
            lambda hidden, embedded: hidden @ self.confidence @ embedded,
        )

    greedy_chain, drawn_chains = Drafter.greedy_chain, Drafter.drawn_chains


def table_model(drafter: TableDrafter):
    """What `step.draft` asks of a model."""
    return types.SimpleNamespace(
        drafter=drafter, backbone=None, config=types.SimpleNamespace(vocab_size=drafter.bias.shape[0])
    )


def table_stream(length, anchor, acceptance):
    """What it asks of a stream, `length` committed tokens behind its beginning."""
    return types.SimpleNamespace(
        decode=types.SimpleNamespace(length=length), anchor=jnp.int32(anchor), acceptance=acceptance,
        remaining=jnp.int32(1 << 20), finish=jnp.int32(RUNNING), copy_rate=jnp.float32(USUAL_RATE),
        history=jnp.zeros((64,), jnp.int32),
    )  # fmt: skip
