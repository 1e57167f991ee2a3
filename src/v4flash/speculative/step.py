"""One speculative step: draft, verify, reject, commit, as a single function of arrays.

Knows: the order of a step and what of it is data (draft length, limits, sampling options, seed), so that one
compiled program serves them all. Does not know: compilation, files, text, or the loop around it.

    position        n        n+1 ... n+l
    rows            anchor   d1  ...  dl      live rows of the verifying pass (the others are dead)
    emitted         d1 ... da  y              a accepted drafts, then the target's own token
    committed       anchor d1 ... da          the next anchor is the last emitted token

Sources: dspark step of DeepSeek inference/model.py (`forward_spec`); accept rules in rejection.py.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from v4flash.model.drafter import Model
from v4flash.speculative.filters import SamplingParams, greedy_token, has_usable_logits
from v4flash.speculative.rejection import propose, verify
from v4flash.state import DecodeState

MAX_DRAFT = 9
RUNNING, STOPPED, LIMIT = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Control:
    """What a caller may change from step to step without recompiling.

    Attributes:
      draft_length: int32 [], drafts wanted per step (k), from 0 to the program's limit.
      block_rows: int32 [], rows of the drafter's block, at least `draft_length`.
      sampling: temperature and filters.
      key: uint32 [2], from the seed.
      stop_ids: int32 [n], token ids that end the text; unused places hold -1.
    """

    draft_length: jax.Array
    block_rows: jax.Array
    sampling: SamplingParams
    key: jax.Array
    stop_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream between two steps.

    Attributes:
      decode: the model's state; its length counts committed tokens.
      anchor: int32 [], the newest emitted token, standing at position decode.length, not yet run.
      remaining: int32 [], tokens that may still be emitted.
      finish: int32 [], RUNNING, STOPPED (a stop id was emitted) or LIMIT (nothing remains).
    """

    decode: DecodeState
    anchor: jax.Array
    remaining: jax.Array
    finish: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step, one step late.

    Attributes:
      tokens: int32 [K + 1], emitted tokens in the first `emitted` places.
      emitted, accepted, drafted: int32 []; accepted counts drafts before any cut at a stop id.
      drafts: int32 [K], the drafted tokens.
      confidence: float32 [K], the drafter's predicted acceptance of each draft.
      finish: int32 [], as in Stream.
      usable: bool [], False when a live row's logits were not finite.
    """

    tokens: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    drafts: jax.Array
    confidence: jax.Array
    finish: jax.Array
    usable: jax.Array


def draft_limit(rows: int) -> int:
    """The most drafts a program whose passes have `rows` rows can verify."""
    return min(rows - 1, MAX_DRAFT)


def draft(model: Model, stream: Stream, control: Control, limit: int) -> tuple[jax.Array, ...]:
    """Drafts `limit` tokens behind the anchor: ids [limit], their laws [limit, V], confidence [limit]."""
    block = model.drafter.block(model.backbone, stream.decode, stream.anchor, limit, control.block_rows)
    first = stream.decode.length + 1

    def draw(j: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        proposal = propose(logits, control.sampling, control.key, first + j)
        return proposal.token, proposal.law

    drafts, laws = model.drafter.chain(block, stream.anchor, draw)
    return drafts.ids, laws, jax.nn.sigmoid(drafts.confidence)


def speculative_step(
    model: Model, stream: Stream, control: Control, rows: int, *, drafting: Callable = draft
) -> tuple[Stream, StepResult]:
    """Runs one step with passes of `rows` rows (static); a finished stream comes back unchanged.

    The drafts wanted are cut so that no row stands past the limit: at most remaining - 1 drafts are verified.
    `drafting` proposes the tokens and must return the laws they were drawn from, as `draft` does.
    """
    limit = draft_limit(rows) if model.drafter is not None else 0
    config, start = model.config, stream.decode.length
    running = stream.finish == RUNNING
    live = jnp.where(running, jnp.clip(control.draft_length, 0, jnp.minimum(limit, stream.remaining - 1)), 0)

    def drafted() -> tuple:
        return drafting(model, stream, control, limit)

    def undrafted() -> tuple:
        ids, laws = jnp.zeros((limit,), jnp.int32), jnp.zeros((limit, config.vocab_size), jnp.float32)
        return ids, laws, jnp.zeros((limit,), jnp.float32)

    with jax.named_scope("draft"):
        ids, laws, confidence = jax.lax.cond(live > 0, drafted, undrafted) if limit else undrafted()

    with jax.named_scope("verify"):
        tokens = jnp.zeros((rows,), jnp.int32).at[0].set(stream.anchor).at[1 : limit + 1].set(ids)
        count = jnp.where(running, live + 1, 0)
        trunk, decode = model.backbone.trunk(tokens, stream.decode, count)
        logits = model.backbone.logits(trunk.hidden)[: limit + 1]

    with jax.named_scope("reject"):
        verdict = verify(ids, laws, logits, live, control.sampling, control.key, start + 1)
        place = jnp.arange(limit + 1)
        emitted_ids = jnp.where(place < verdict.accepted, jnp.append(ids, 0), verdict.token)
        stops = jnp.any(emitted_ids[:, None] == control.stop_ids, axis=1) & (place <= verdict.accepted)
        stopped = jnp.any(stops)
        emitted = jnp.where(stopped, jnp.argmax(stops) + 1, verdict.accepted + 1).astype(jnp.int32)
        emitted = jnp.where(running, emitted, 0)

    with jax.named_scope("commit"):
        if model.drafter is not None:
            decode = model.drafter.commit(decode, trunk.taps, start, emitted)
        remaining = stream.remaining - emitted
        finish = jnp.where(stopped, STOPPED, jnp.where(remaining > 0, RUNNING, LIMIT)).astype(jnp.int32)
        finish = jnp.where(running, finish, stream.finish)
        anchor = jnp.where(running, emitted_ids[jnp.maximum(emitted - 1, 0)], stream.anchor)
    usable = jnp.all(has_usable_logits(logits) | (place > live))
    following = Stream(decode.advance(emitted), anchor, remaining, finish)
    accepted = jnp.where(running, verdict.accepted, 0)
    return following, StepResult(emitted_ids, emitted, accepted, live, ids, confidence, finish, usable)


def prefill(
    model: Model, decode: DecodeState, tokens: jax.Array, count: jax.Array, control: Control
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Commits the first `count` of tokens int32 [C] and draws the token behind them.

    Returns: the state, the drawn token int32 [] (meaningful after the last chunk), and whether the logits
    it was drawn from were finite.
    """
    trunk, written = model.backbone.trunk(tokens, decode, count)
    if model.drafter is not None:
        written = model.drafter.commit(written, trunk.taps, decode.length, count)
    written = written.advance(count)
    last = jax.lax.dynamic_slice_in_dim(trunk.hidden, jnp.maximum(count - 1, 0), 1)
    logits = model.backbone.logits(last)
    none = jnp.zeros((0,), jnp.int32), jnp.zeros((0, model.config.vocab_size), jnp.float32)
    verdict = verify(*none, logits, jnp.int32(0), control.sampling, control.key, written.length)
    return written, verdict.token, has_usable_logits(logits)[0]


def greedy_drafts(model: Model, decode: DecodeState, anchor: jax.Array, rows: int):
    """The drafter's block and greedily chained drafts behind a committed context, `rows` of them."""
    block = model.drafter.block(model.backbone, decode, anchor, rows, jnp.int32(rows))
    drafts, _ = model.drafter.chain(block, anchor, lambda j, logits: (greedy_token(logits), None))
    return block, drafts
