"""One speculative step: draft, choose, verify, reject, commit, as a single function of arrays.

Knows: the order of a step and what of it is data (draft length, limits, sampling options, rules, seed), so that
one compiled program serves them all. Does not know: compilation, files, text, or the loop around it.

    position        n        n+1 ... n+l
    rows            anchor   d1  ...  dl      live rows of the verifying pass (the others are dead)
    emitted         d1 ... da  y              a accepted drafts, then the target's own token
    committed       anchor d1 ... da          the next anchor is the last emitted token

All noise of a step comes from a key of its own, made from the seed and the position of its first token: the
block-wise rule must never meet a number twice (randomness.py), and a run can still be repeated from its seed.

Sources: dspark step of DeepSeek inference/model.py (`forward_spec`); accept rules in rejection.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from v4flash.model.drafter import Block, Drafting, Drawing, Model
from v4flash.speculative import depth, lookup
from v4flash.speculative.depth import MAX_DRAFT
from v4flash.speculative.filters import LAWS, UNRANKED, has_usable_logits, is_greedy, kind_of_law
from v4flash.speculative.randomness import Purpose, invert, round_key, uniform
from v4flash.speculative.rejection import Verdict, rule_of, verify
from v4flash.speculative.stream import LIMIT, REPEATED, RUNNING, STOPPED, Control, StepResult, Stream
from v4flash.state import DecodeState


class Proposed(NamedTuple):
    """What a step is about to verify.

    Attributes:
      ids: int32 [K], proposed tokens.
      laws: float32 [K, V], the law each was drawn from; one-hot where it was not drawn.
      confidence: float32 [K], predicted acceptance of each, before calibration.
      chance: float32 [K], the same after it.
      live: int32 [], how many are verified.
      drafted, copied: bool [], whether the drafter ran, and whether the tokens are copies instead of its drafts.
    """

    ids: jax.Array
    laws: jax.Array
    confidence: jax.Array
    chance: jax.Array
    live: jax.Array
    drafted: jax.Array
    copied: jax.Array


def draft_limit(rows: int) -> int:
    """The most drafts a program whose passes have `rows` rows can verify."""
    return min(rows - 1, MAX_DRAFT)


def step_key(stream: Stream, control: Control) -> jax.Array:
    """Key data of the step that starts here: uint32 [2]."""
    return round_key(control.key, stream.decode.length + 1)


def draft(model: Model, stream: Stream, control: Control, limit: int, wanted: jax.Array) -> Drafting:
    """Drafts up to `wanted` (int32 []) of at most `limit` tokens behind the anchor; zeros, and no work, for none.

    Where the depth is chosen in order, drawing may end in front of the first draft that would not be verified. The
    block and its chain are two conditionals, none inside the other: a GPU starts a conditional's graph the later the
    more nodes it holds, those of further conditionals included.
    """
    vocabulary, drafted = model.config.vocab_size, wanted > 0
    key, first = step_key(stream, control), stream.decode.length + 1

    def run() -> tuple[jax.Array, jax.Array]:
        made = model.drafter.block(model.backbone, stream.decode, stream.anchor, limit, control.block_rows)
        return made.hidden, made.base_logits

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
    block = Block(*jax.lax.cond(drafted, run, lambda: zeros), streams=[], routes=[])
    dtype = block.base_logits.dtype

    def is_drawn(j: jax.Array, confidence: jax.Array) -> jax.Array:
        chance = depth.calibrated(jax.nn.sigmoid(confidence), control.depth)
        deeper = depth.goes_on(j, chance, stream.acceptance[:limit], control.depth, wanted)
        # Whether to copy is asked of the first draft's law.
        anyway = ~control.depth.adaptive | is_greedy(control.sampling) | (control.lookup.on & (j == 0))
        return (j < wanted) & (deeper | anyway)

    def drawn(chain: Callable) -> Drafting:
        made = chain()
        known = jnp.where(jnp.arange(limit) <= made.count, made.confidence, -jnp.inf)
        return made._replace(confidence=known)

    def greedy() -> Drafting:
        drafts = model.drafter.greedy_chain(block, stream.anchor, wanted)
        laws = jax.nn.one_hot(drafts.ids, vocabulary, dtype=dtype)
        return Drafting(drafts.ids, laws, drafts.confidence, wanted)

    def nothing() -> Drafting:
        none = jnp.zeros((limit,), jnp.int32)
        return Drafting(
            none, jnp.zeros((limit, vocabulary), dtype), jnp.full((limit,), -jnp.inf, dtype), wanted
        )

    def uniforms() -> jax.Array:
        return uniform(key, first + jnp.arange(limit), Purpose.DRAFT, draws=(2,))

    drawing = Drawing(control.draft_sampling, uniforms, LAWS[UNRANKED:], invert, is_drawn, wanted)
    chains = model.drafter.drawn_chains(block, stream.anchor, drawing)
    # One branch around the whole chain: a conditional in a loop is started in every turn.
    ways = [nothing, greedy, *[functools.partial(drawn, chain) for chain in chains]]
    # A drafter may have one chain for all kinds of options.
    kind = jnp.minimum(kind_of_law(control.draft_sampling, vocabulary), len(chains))
    found = jax.lax.switch(jnp.where(drafted, 1 + kind, 0), ways)
    return found._replace(confidence=jax.nn.sigmoid(found.confidence))


def proposed(model: Model, stream: Stream, control: Control, limit: int, drafting: Callable) -> Proposed:
    """Drafts or copies, and how many of them to verify; at most remaining - 1, so that no row passes the limit."""
    policy, ahead = control.depth, stream.acceptance[:limit]
    room = jnp.where(stream.finish == RUNNING, jnp.clip(stream.remaining - 1, 0, limit), 0)
    wanted = jnp.clip(control.draft_length, 0, room)
    drafted = depth.worth_drafting(ahead, policy, wanted)

    with jax.named_scope("draft"):
        drafts = drafting(model, stream, control, limit, jnp.where(drafted, wanted, 0))

    with jax.named_scope("choose"):
        chance = depth.calibrated(drafts.confidence, policy)

        def looked_up() -> tuple:
            copy = lookup.find(stream.history, stream.decode.length, limit)
            taken = lookup.should_copy(
                copy, drafts.laws[0], drafted, stream.copy_rate, ahead, control.lookup, wanted, room
            )
            return copy.ids, taken

        copies, copied = jax.lax.cond(
            control.lookup.on & (room > 0), looked_up, lambda: (drafts.ids, jnp.asarray(False))
        )
        rate = jnp.broadcast_to(stream.copy_rate, (limit,))
        most = jnp.where(copied, jnp.clip(control.lookup.length, 0, room), jnp.where(drafted, wanted, 0))
        undrawn = copied | is_greedy(control.sampling) | is_greedy(control.draft_sampling)
        chosen = depth.choose_depth(
            jnp.where(copied, rate, chance), jnp.where(copied, rate, ahead), policy, most, undrawn
        )
        laws = jax.nn.one_hot(copies, drafts.laws.shape[1], dtype=drafts.laws.dtype)
    return Proposed(
        ids=jnp.where(copied, copies, drafts.ids),
        laws=jnp.where(copied, laws, drafts.laws),
        confidence=jnp.where(copied, rate, drafts.confidence),
        chance=chance,
        # Drawing ended by the same rule, whose rounding may differ there: what was not drawn is never verified.
        live=jnp.where(copied, chosen, jnp.minimum(chosen, drafts.count)),
        drafted=drafted,
        copied=copied,
    )


def _nothing_proposed(vocabulary: int) -> Proposed:
    """The proposal of a model without a drafter."""
    none, no = jnp.zeros((0,), jnp.float32), jnp.asarray(False)
    laws = jnp.zeros((0, vocabulary), jnp.float32)
    return Proposed(none.astype(jnp.int32), laws, none, none, jnp.zeros((), jnp.int32), no, no)


def speculative_step(
    model: Model, stream: Stream, control: Control, rows: int, *, drafting: Callable = draft
) -> tuple[Stream, StepResult]:
    """Runs one step with passes of `rows` rows (static); a finished stream comes back unchanged.

    `drafting` proposes the tokens and must return the laws they were drawn from, as `draft` does; what it returns where
    none are wanted is not looked at.
    """
    limit = draft_limit(rows) if model.drafter is not None else 0
    start, running = stream.decode.length, stream.finish == RUNNING
    if limit:
        plan = proposed(model, stream, control, limit, drafting)
    else:
        plan = _nothing_proposed(model.config.vocab_size)

    with jax.named_scope("verify"):
        tokens = jnp.zeros((rows,), jnp.int32).at[0].set(stream.anchor).at[1 : limit + 1].set(plan.ids)
        count = jnp.where(running, plan.live + 1, 0)
        trunk, decode = model.backbone.trunk(tokens, stream.decode, count)
        logits = model.backbone.logits(trunk.hidden)[: limit + 1]

    with jax.named_scope("reject"):
        key, rule = step_key(stream, control), rule_of(control.blockwise)
        verdict = verify(
            plan.ids,
            plan.laws,
            logits,
            plan.live,
            control.sampling,
            key,
            start + 1,
            rule,
            model.sampling_laws,
        )
        ids, emitted, finish, repeats = emission(stream, control, plan.ids, verdict)

    with jax.named_scope("commit"):
        if model.drafter is not None:
            decode = model.drafter.commit(decode, trunk.taps, start, emitted)
        usable = jnp.all(has_usable_logits(logits) | (jnp.arange(limit + 1) > plan.live))
        following = remembered(stream, control, plan, verdict.accepted)
        following = dataclasses.replace(
            following,
            decode=decode.advance(emitted),
            anchor=jnp.where(running, ids[jnp.maximum(emitted - 1, 0)], stream.anchor),
            remaining=stream.remaining - emitted,
            finish=finish,
            repeats=repeats,
            history=_written(stream.history, ids, start + 1, emitted),
        )
    accepted = jnp.where(running, verdict.accepted, 0)
    result = StepResult(
        tokens=ids,
        emitted=emitted,
        accepted=accepted,
        drafted=plan.live,
        drafts=plan.ids,
        confidence=plan.confidence,
        copied=plan.copied,
        finish=finish,
        usable=usable,
    )
    return following, result


def emission(
    stream: Stream, control: Control, drafts: jax.Array, verdict: Verdict
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What leaves a step: ids [K + 1], how many of them, the stream's new finish and repeats.

    The text ends at the first stop id, or where one token has come too often in a row; what was accepted behind
    it is dropped.
    """
    running = stream.finish == RUNNING
    place = jnp.arange(drafts.shape[0] + 1)
    ids = jnp.where(place < verdict.accepted, jnp.append(drafts, 0), verdict.token)
    fresh = ids != jnp.concatenate([stream.anchor[None], ids[:-1]])
    since = jax.lax.cummax(jnp.where(fresh, place, -1))
    runs = jnp.where(since < 0, stream.repeats + place + 1, place - since + 1)
    stops = jnp.any(ids[:, None] == control.stop_ids, axis=1)
    loops = (control.repeat_limit > 0) & (runs >= control.repeat_limit)
    ends = (stops | loops) & (place <= verdict.accepted)
    ended = jnp.any(ends)
    last = jnp.where(ended, jnp.argmax(ends), verdict.accepted)
    emitted = jnp.where(running, last + 1, 0).astype(jnp.int32)
    finish = jnp.where(stream.remaining > emitted, RUNNING, LIMIT)
    finish = jnp.where(ended, jnp.where(stops[last], STOPPED, REPEATED), finish)
    return (
        ids,
        emitted,
        jnp.where(running, finish, stream.finish).astype(jnp.int32),
        jnp.where(running, runs[last], stream.repeats).astype(jnp.int32),
    )


def remembered(stream: Stream, control: Control, plan: Proposed, accepted: jax.Array) -> Stream:
    """The stream with what this step teaches about the steps to come."""
    limit = plan.ids.shape[0]
    running = stream.finish == RUNNING
    average = depth.observed(
        stream.acceptance[:limit],
        control.depth.acceptance[:limit],
        plan.chance,
        accepted,
        plan.live,
        plan.drafted & ~plan.copied,
    )
    rate = lookup.observed_rate(stream.copy_rate, accepted, plan.live, plan.copied)
    return dataclasses.replace(
        stream,
        acceptance=jnp.where(running, stream.acceptance.at[:limit].set(average), stream.acceptance),
        copy_rate=jnp.where(running, rate, stream.copy_rate),
    )


def _written(history: jax.Array, ids: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    """History with ids[:count] at positions first, first + 1, ..."""
    kept = jax.lax.dynamic_slice_in_dim(history, first, ids.shape[0])
    kept = jnp.where(jnp.arange(ids.shape[0]) < count, ids, kept)
    return jax.lax.dynamic_update_slice_in_dim(history, kept, first, 0)


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
    verdict = verify(
        *none,
        logits,
        jnp.int32(0),
        control.sampling,
        control.key,
        written.length,
        laws=model.sampling_laws,
    )
    return written, verdict.token, has_usable_logits(logits)[0]


def greedy_drafts(model: Model, decode: DecodeState, anchor: jax.Array, rows: int):
    """The drafter's block and greedily chained drafts behind a committed context, `rows` of them."""
    block = model.drafter.block(model.backbone, decode, anchor, rows, jnp.int32(rows))
    return block, model.drafter.greedy_chain(block, anchor, jnp.int32(rows))
