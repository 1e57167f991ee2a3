"""What goes into a speculative step and what comes out of it.

Knows: the arrays a caller sets, those a stream carries from step to step, and those the host reads. Does not
know: what a step does with them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import USUAL_RATE, LookupPolicy
from v4flash.state import DecodeState

RUNNING, STOPPED, LIMIT, REPEATED = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Control:
    """What a caller may change from step to step without recompiling.

    Attributes:
      draft_length: int32 [], drafts wanted per step (k), from 0 to the program's limit.
      block_rows: int32 [], rows of the drafter's block, at least `draft_length`.
      sampling: temperature and filters of the text.
      draft_sampling: the same for the law that drafts are drawn from; temperature 0 drafts greedily.
      key: uint32 [2], from the seed.
      stop_ids: int32 [n], token ids that end the text; unused places hold -1.
      blockwise: bool [], judge drafts block by block (`verify_blockwise`) instead of one by one.
      depth: how many of the drafts are verified.
      lookup: when drafts are copied from the text itself.
      repeat_limit: int32 [], one token emitted this often in a row ends the text; 0 never does.
    """

    draft_length: jax.Array
    block_rows: jax.Array
    sampling: SamplingParams
    draft_sampling: SamplingParams
    key: jax.Array
    stop_ids: jax.Array
    blockwise: jax.Array
    depth: DepthPolicy
    lookup: LookupPolicy
    repeat_limit: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream between two steps; begin one with `Stream.start`.

    Attributes:
      decode: the model's state; its length counts committed tokens.
      anchor: int32 [], the newest emitted token, standing at position decode.length, not yet run.
      remaining: int32 [], tokens that may still be emitted.
      finish: int32 [], RUNNING, STOPPED (a stop id was emitted), LIMIT (nothing remains) or REPEATED (one token
        was emitted too often in a row).
      repeats: int32 [], how often in a row the anchor was emitted.
      history: int32 [N], all tokens by position, the anchor included; what lies behind it means nothing.
      acceptance: float32 [MAX_DRAFT], running average of acceptance by place.
      copy_rate: float32 [], running average of accepted copies.
    """

    decode: DecodeState
    anchor: jax.Array
    remaining: jax.Array
    finish: jax.Array
    repeats: jax.Array
    history: jax.Array
    acceptance: jax.Array
    copy_rate: jax.Array

    @classmethod
    def start(
        cls,
        decode: DecodeState,
        anchor: jax.Array,
        remaining: jax.Array,
        history: jax.Array,
        control: Control,
    ) -> "Stream":
        """A stream whose first token, the anchor, was just drawn; `history` holds it at position decode.length.

        A step writes up to limit + 1 tokens behind the anchor, so history has that many places more than
        positions are kept. No array is shared with `control`: a stream is donated to its step.
        """
        return cls(
            decode=decode,
            anchor=jnp.asarray(anchor, jnp.int32),
            remaining=jnp.asarray(remaining, jnp.int32),
            finish=jnp.asarray(RUNNING, jnp.int32),
            repeats=jnp.asarray(1, jnp.int32),
            history=jnp.asarray(history, jnp.int32),
            acceptance=jnp.array(control.depth.acceptance, copy=True),
            copy_rate=jnp.asarray(USUAL_RATE, jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step, one step late.

    Attributes:
      tokens: int32 [K + 1], emitted tokens in the first `emitted` places.
      emitted, accepted, drafted: int32 []; drafted counts the drafts that were verified, accepted those of them
        that survived, before any cut at a stop id.
      drafts: int32 [K], the proposed tokens, of which the first `drafted` were verified.
      confidence: float32 [K], predicted acceptance of each, before calibration.
      copied: bool [], whether the proposed tokens were copied from the text.
      finish: int32 [], as in Stream.
      usable: bool [], False when a live row's logits were not finite.
    """

    tokens: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    drafts: jax.Array
    confidence: jax.Array
    copied: jax.Array
    finish: jax.Array
    usable: jax.Array

    @classmethod
    def blank(cls, limit: int) -> "StepResult":
        """A result that says nothing, of a step of up to `limit` drafts, in the host's memory."""
        number, flag = np.zeros((), np.int32), np.zeros((), bool)
        return cls(
            tokens=np.zeros((limit + 1,), np.int32),
            emitted=number,
            accepted=number,
            drafted=number,
            drafts=np.zeros((limit,), np.int32),
            confidence=np.zeros((limit,), np.float32),
            copied=flag,
            finish=number,
            usable=flag,
        )

    def packed(self) -> jax.Array:
        """All of it in one array, int32 [3 K + 7], which the host reads in one go."""
        words = [jax.lax.bitcast_convert_type(self.confidence, jnp.int32), self.tokens, self.drafts]
        numbers = (self.emitted, self.accepted, self.drafted, self.copied, self.finish, self.usable)
        return jnp.concatenate([*words, jnp.stack([number.astype(jnp.int32) for number in numbers])])

    @classmethod
    def unpacked(cls, words: np.ndarray) -> "StepResult":
        """What `packed` packed, in the host's memory."""
        limit = (words.size - 7) // 3
        confidence, tokens, drafts, numbers = np.split(words, [limit, 2 * limit + 1, 3 * limit + 1])
        emitted, accepted, drafted, copied, finish, usable = numbers
        return cls(
            tokens=tokens,
            emitted=emitted,
            accepted=accepted,
            drafted=drafted,
            drafts=drafts,
            confidence=confidence.view(np.float32),
            copied=copied.astype(bool),
            finish=finish,
            usable=usable.astype(bool),
        )
