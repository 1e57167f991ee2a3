"""Which drafted tokens survive, and which token the target adds behind them.

Knows: the accept rules (greedy, token-wise, block-wise) as functions of drafts, laws and uniforms, and one
dispatcher that the step calls with logits. Does not know: how drafts or logits are computed, how many drafts
are worth verifying, or what is committed afterwards.

Rows: draft i (from 0) is judged by target row i, which was computed from everything before that draft; row l
supplies the token that follows when all l live drafts survive. Rows past the live ones may hold anything,
NaN included: they are never read into a result.

The number of live drafts is data. It may depend on drafts already drawn, but whether draft i is live must
not depend on the draft i itself or on later ones, or the emitted law is no longer the target's (a greedy run
is exempt: it emits the target's own choices whatever is verified).

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the token-wise
rule; Sun et al. 2024 (arXiv 2403.10444) for the block-wise rule.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from v4flash.speculative.filters import (
    GREEDY,
    LAWS,
    UNRANKED,
    SamplingParams,
    greedy_token,
    is_greedy,
    kind_of_law,
    target_law,
)
from v4flash.speculative.randomness import Purpose, categorical, invert, uniform


class Verdict(NamedTuple):
    """What a step emits: the first `accepted` drafts, then `token`.

    Attributes:
      accepted: int32 [], from 0 to the number of live drafts.
      token: int32 [], the target's own token behind them.
    """

    accepted: jax.Array
    token: jax.Array


class Proposal(NamedTuple):
    """A drafted token and the law it was drawn from.

    Attributes:
      token: int32 [...].
      law: float [..., V]; one-hot for a greedy draft.
    """

    token: jax.Array
    law: jax.Array


def acceptance_probability(p, q):
    """Chance that a draft from q passes the token-wise test against p: sum of min(p, q) over V, [...]."""
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def accept_ratio(p_draft, q_draft):
    """min(1, p/q) at the drafted token, elementwise; where q is zero, 1 if p is positive and 0 if not."""
    drawable = q_draft > 0
    ratio = jnp.minimum(p_draft / jnp.where(drawable, q_draft, 1), 1)
    return jnp.where(drawable, ratio, (p_draft > 0).astype(ratio.dtype))


def residual(p, q):
    """Law of the token that replaces a refused draft: max(p - q, 0), normalised; p where nothing is left.

    With q = 0 everywhere this is p, which is the law of the token behind the last accepted draft.

    Args:
      p, q: float [..., V].
    """
    excess = jnp.maximum(p - q, 0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    spent = mass < jnp.finfo(mass.dtype).tiny
    return jnp.where(spent, p, excess / jnp.where(spent, 1, mass))


def propose(logits, params: SamplingParams, key_data, position) -> Proposal:
    """Draw a draft token and keep the law it was drawn from.

    With the target's own options acceptance is highest. At temperature 0 no random number is made: the draft is
    the argmax and its law is one-hot, which every accept rule takes as it takes a drawn one.

    Args:
      logits: float [V], the drafter's, Markov bias included, before temperature.
      params: the draft's sampling options (data).
      key_data: uint32 [2], from `randomness.seed_key`.
      position: int [], absolute position of the drafted token.
    """
    law = target_law(logits, params)
    token = jax.lax.cond(
        is_greedy(params),
        lambda: greedy_token(logits),
        lambda: categorical(law, key_data, position, Purpose.DRAFT),
    )
    return Proposal(token, law)


def verify_greedy(draft_ids, target_logits, live_drafts) -> Verdict:
    """Accept drafts while they equal the target's argmax, then emit the target's argmax.

    Args:
      draft_ids: int [k].
      target_logits: float [T, V], T >= k + 1; ties go to the lowest id.
      live_drafts: int [], from 0 to k; other values are clipped.
    """
    k = draft_ids.shape[0]
    choices = greedy_token(target_logits[: k + 1])
    accepted = _leading(draft_ids == choices[:k], live_drafts)
    return Verdict(accepted, choices[accepted])


def verify_tokenwise(
    draft_ids, draft_probs, target_probs, live_drafts, accept_uniforms, resample_uniforms
) -> Verdict:
    """Accept draft i with probability min(1, p_i/q_i); at the first refusal draw from the residual.

    Emits the target's law whatever the drafts' laws are, provided that draft i was drawn from
    `draft_probs[i]`. A draft that was not drawn but chosen (greedy, copied) has a one-hot row.

    Args:
      draft_ids: int [k].
      draft_probs: float [k, V].
      target_probs: float [T, V], T >= k + 1.
      live_drafts: int [], from 0 to k; other values are clipped.
      accept_uniforms: float [k], in [0, 1).
      resample_uniforms: float [k + 1, 2], in [0, 1); row a is used when a drafts are accepted.
    """
    block = draft_ids, draft_probs, target_probs, live_drafts
    return _settled(*block[1:], _accepted_tokenwise(*block, accept_uniforms), 1, resample_uniforms)


def block_chances(draft_ids, draft_probs, target_probs, live_drafts):
    """What the block-wise rule needs to know of a block.

    Arguments as in `verify_tokenwise`.

    Returns:
      carried: float [k + 1], entry i is min(1, carried[i-1] * p/q at draft i): the share of the target's mass
        that the first i drafts still stand for.
      chances: float [k + 1], chance that the test "the first i drafts may stay" passes; 0 past the live ones.
    """
    k = draft_ids.shape[0]
    live = jnp.clip(live_drafts, 0, k)
    p_draft, q_draft = _drafted(draft_ids, target_probs), _drafted(draft_ids, draft_probs)
    carried = [jnp.ones((), target_probs.dtype)]
    for i in range(k):
        carried.append(accept_ratio(carried[-1] * p_draft[i], q_draft[i]))
    carried = jnp.stack(carried)
    excess = jnp.sum(jnp.maximum(carried[:k, None] * target_probs[:k] - draft_probs, 0), axis=-1)
    room = excess + 1 - carried[:k]
    inner = jnp.append(jnp.where(room > 0, excess / jnp.where(room > 0, room, 1), 1), carried[k])
    index = jnp.arange(k + 1)
    return carried, jnp.where(index < live, inner, jnp.where(index == live, carried, 0))


def verify_blockwise(
    draft_ids, draft_probs, target_probs, live_drafts, accept_uniforms, resample_uniforms
) -> Verdict:
    """Judge the drafts together: keep the longest prefix whose own test passes, also past a failed test.

    Same arguments and the same emitted law as `verify_tokenwise`, never fewer accepted drafts on average, and
    the same rule when one draft is live.

    A test of draft i is settled by coins and drafts at *later* positions too. Positions behind the
    accepted ones come up again in the next step, so their noise must not: draw the drafts and the uniforms
    of every step from `randomness.round_key`. With the plain seed key the emitted law would be bent.
    """
    block = draft_ids, draft_probs, target_probs, live_drafts
    return _settled(*block[1:], *_accepted_blockwise(*block, accept_uniforms), resample_uniforms)


def rule_of(blockwise) -> Callable[..., Verdict]:
    """`verify_blockwise` where `blockwise` (bool [], data) holds, else `verify_tokenwise`; both in one program.

    Both tests are made and one is used: they are a few numbers beside the residual, which is formed once.
    """

    def either(
        draft_ids, draft_probs, target_probs, live_drafts, accept_uniforms, resample_uniforms
    ) -> Verdict:
        block = draft_ids, draft_probs, target_probs, live_drafts
        alone = _accepted_tokenwise(*block, accept_uniforms)
        together, share = _accepted_blockwise(*block, accept_uniforms)
        accepted, share = jnp.where(blockwise, together, alone), jnp.where(blockwise, share, 1)
        return _settled(*block[1:], accepted, share, resample_uniforms)

    return either


def verify(
    draft_ids,
    draft_probs,
    target_logits,
    live_drafts,
    params: SamplingParams,
    key_data,
    first_position,
    rule: Callable[..., Verdict] = verify_tokenwise,
    laws: Callable | None = None,
) -> Verdict:
    """Judge one block of drafts: greedily at temperature 0, else by `rule`; both live in one program.

    With no live drafts this is the ordinary sampling of one token, so plain decoding calls it too.

    Args:
      draft_ids: int [k]; k = 0 is allowed.
      draft_probs: float [k, V], the `Proposal.law` of each draft; not read at temperature 0.
      target_logits: float [T, V], T >= k + 1.
      live_drafts: int [], from 0 to k; other values are clipped.
      params: the sampling options (data).
      key_data: uint32 [2], from `randomness.seed_key`.
      first_position: int [], absolute position of the first drafted token.
      rule: `verify_tokenwise`, `verify_blockwise`, or a choice between them by `rule_of`. The block-wise rule
        wants a `randomness.round_key`, here and in `propose`.
      laws: (logits [T, V], params) -> float [T, V], a model's own way to what `target_law` says above temperature 0;
        None takes the bodies of filters.py.
    """
    k = draft_ids.shape[0]
    kind = kind_of_law(params, target_logits.shape[-1])

    def greedy():
        return verify_greedy(draft_ids, target_logits, live_drafts)

    def sampled():
        rows = target_logits[: k + 1]
        if laws is None:
            ways = [functools.partial(law, rows, params) for law in LAWS[UNRANKED:]]
            target_probs = jax.lax.switch(kind - UNRANKED, ways)
        else:
            target_probs = laws(rows, params)
        positions = first_position + jnp.arange(k + 1)
        coins = uniform(key_data, positions[:k], Purpose.ACCEPT, dtype=target_probs.dtype)
        redraws = uniform(key_data, positions, Purpose.RESAMPLE, draws=(2,), dtype=target_probs.dtype)
        return rule(draft_ids, draft_probs, target_probs, live_drafts, coins, redraws)

    return jax.lax.cond(kind == GREEDY, greedy, sampled)


def _drafted(draft_ids, laws):
    """Probability of each drafted token, [k], in the first k rows of `laws` [>= k, V]."""
    k = draft_ids.shape[0]
    return jnp.take_along_axis(laws[:k], draft_ids[:, None], axis=-1)[:, 0]


def _accepted_tokenwise(draft_ids, draft_probs, target_probs, live_drafts, accept_uniforms):
    """Drafts accepted one by one, int32 []."""
    p_draft, q_draft = _drafted(draft_ids, target_probs), _drafted(draft_ids, draft_probs)
    return _leading(accept_uniforms < accept_ratio(p_draft, q_draft), live_drafts)


def _accepted_blockwise(draft_ids, draft_probs, target_probs, live_drafts, accept_uniforms):
    """Drafts accepted together, int32 [], and the share of the target's mass they still stand for."""
    carried, chances = block_chances(draft_ids, draft_probs, target_probs, live_drafts)
    passed = jnp.append(True, accept_uniforms < chances[1:])
    accepted = jnp.max(jnp.where(passed, jnp.arange(passed.shape[0]), 0)).astype(jnp.int32)
    return accepted, carried[accepted]


def _settled(draft_probs, target_probs, live_drafts, accepted, share, resample_uniforms) -> Verdict:
    """The verdict once it is known how many drafts stay and what share of the target's mass they stand for."""
    law = residual(share * target_probs[accepted], _law_refused(draft_probs, accepted, live_drafts))
    return Verdict(accepted, invert(law, resample_uniforms[accepted].astype(law.dtype)))


def _leading(passed, live_drafts):
    """int32 []: how many live entries of `passed` [k] hold before the first that does not."""
    live = jnp.arange(passed.shape[0]) < live_drafts
    return jnp.sum(jnp.cumprod((passed & live).astype(jnp.int32)), dtype=jnp.int32)


def _law_refused(draft_probs, accepted, live_drafts):
    """Draft law [V] to take off the target's: that of the refused draft, or zero if no live draft is left."""
    k = draft_probs.shape[0]
    if k == 0:
        return jnp.zeros(draft_probs.shape[1:], draft_probs.dtype)
    return jnp.where(accepted < jnp.minimum(live_drafts, k), draft_probs[jnp.minimum(accepted, k - 1)], 0)
