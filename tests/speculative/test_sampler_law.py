"""The jitted sampler by Monte Carlo: drafting, choice of depth, accept rules and noise as the step uses them.

Every combination of rule, draft, depth and filter has its chi-square of the first token and of the first pair
against the target's law; the fast set draws fewer texts than the slow one. What a step of a whole model emits
is drawn too.
"""

import dataclasses
import itertools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scripted_steps import ROWS, control, started
from table_drafter import TableDrafter, table_model, table_stream
from toy_models import toy

from v4flash.engine.programs import make_control
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.lookup import LookupPolicy
from v4flash.speculative.randomness import round_key, seed_key
from v4flash.speculative.rejection import propose, rule_of, verify
from v4flash.speculative.step import Drafting, draft, proposed, speculative_step, step_key

V, K, START = 8, 3, 5
FEW, MANY, BATCH = 25_000, 1_000_000, 25_000
# Draws are fixed by their seeds, so this is no flake rate: a wrong law shows p-values below it at these counts.
CHI_SQUARE_LEVEL = 1e-5
FILTERS = {
    "temperature": {"temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "min-p": {"temperature": 0.9, "min_p": 0.15},
}
DRAFTS = {"drawn": {}, "greedy": {"temperature": 0.0}}
DEPTHS = {"fixed": False, "adaptive": True}
# Logits of target and draft, and confidences by place, depend on the previous token only.
MODEL = np.random.default_rng(17)
TARGET = (MODEL.normal(size=(V, V)) * 1.2).astype(np.float32)
DRAFT = (TARGET + MODEL.normal(size=(V, V)) * 0.8).astype(np.float32)
CONFIDENCE = MODEL.uniform(0.02, 0.98, (K, V)).astype(np.float32)
COSTS = (1.0, 1.26, 1.7, 2.1, 2.25)


@jax.jit
def sample_texts(seeds, settings):
    """Two tokens [n, 2] of each seed by two speculative steps, and the depths [n, 2] of these."""
    tables = jnp.zeros((K, V)), jnp.asarray(DRAFT), jnp.log(CONFIDENCE) - jnp.log1p(-CONFIDENCE)
    model = table_model(TableDrafter(*tables))

    def step(carry, _):
        seed, text, length, anchor = carry
        # A step draws its first token behind the anchor, which stands at position length - 1.
        stream = table_stream(length - 1, anchor, settings.depth.acceptance)
        keyed = dataclasses.replace(settings, key=seed)
        plan, key = proposed(model, stream, keyed, K, draft), step_key(stream, keyed)
        logits = jnp.asarray(TARGET)[jnp.concatenate([anchor[None], plan.ids])]
        rule = rule_of(settings.blockwise)
        accepted, last = verify(plan.ids, plan.laws, logits, plan.live, settings.sampling, key, length, rule)
        block = jnp.where(jnp.arange(K + 1) < accepted, jnp.append(plan.ids, 0), last)
        # What lies past the accepted tokens is overwritten by the next step or cut off at the end.
        text = jax.lax.dynamic_update_slice(text, block, (length,))
        return (seed, text, jnp.minimum(length + accepted + 1, 2), last), plan.live

    def one(seed):
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), seed))
        start = (key, jnp.zeros(2 + K + 1, jnp.int32), jnp.int32(0), jnp.int32(START))
        (_, text, _, _), depths = jax.lax.scan(step, start, None, length=2)
        return text[:2], depths

    return jax.vmap(one)(seeds)


def p_value(counts, law):
    """Chi-square of counts against a law; cells expected fewer than five times are pooled."""
    counts, expected = counts.ravel().astype(np.float64), law.ravel() / law.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token outside the support was emitted"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1] * counts[:-1].sum() / expected[:-1].sum()
    return stats.chisquare(counts, expected).pvalue


def check(rule, drafts, depth, name, draws):
    """Asserts both laws; returns the depths that steps had."""
    options = FILTERS[name]
    params, draft_params = SamplingParams.make(**options), SamplingParams.make(**options | DRAFTS[drafts])
    policy = DepthPolicy.make(adaptive=DEPTHS[depth], costs=COSTS)
    settings = make_control(
        K, K, params, seed_key(0), (), draft_sampling=draft_params, depth=policy, blockwise=rule == "block"
    )
    counts, depths = np.zeros(V * V), set()
    for first in range(0, draws, BATCH):
        seeds = jnp.arange(first, first + BATCH)
        texts, live = jax.device_get(sample_texts(seeds, settings))
        counts += np.bincount(texts[:, 0] * V + texts[:, 1], minlength=V * V)
        depths |= set(np.unique(live).tolist())
    law = np.asarray(target_law(jnp.asarray(TARGET), params), np.float64)
    pairs = law[START][:, None] * law
    assert p_value(counts.reshape(V, V).sum(axis=1), law[START]) > CHI_SQUARE_LEVEL
    assert p_value(counts, pairs) > CHI_SQUARE_LEVEL
    return depths


COMBINATIONS = list(itertools.product(("token", "block"), DRAFTS, DEPTHS, FILTERS))


@pytest.mark.parametrize(("rule", "drafts", "depth", "name"), COMBINATIONS)
def test_texts_follow_the_target_law(rule, drafts, depth, name):
    depths = check(rule, drafts, depth, name, FEW)
    assert (depths == {K}) == (depth == "fixed")


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafts", "depth", "name"), COMBINATIONS)
def test_a_million_texts_follow_the_target_law(rule, drafts, depth, name):
    check(rule, drafts, depth, name, MANY)


# A whole model: the text goes on from a prompt whose last token occurred before, so that it can copy. Its own drafter
# has random weights and is never right, so a drafter with a script of laws near the target's stands in its place.
SAMPLING = SamplingParams.make(temperature=1.0, top_k=5)
MODEL_OPTIONS = {
    "block": {},
    "token": {"blockwise": False},
    "greedy draft": {"draft_sampling": SamplingParams.make(temperature=0.0, top_k=5)},
    "adaptive": {"depth": DepthPolicy.make(adaptive=True, costs=(1.0, 1.05, 1.3, 1.6, 1.9), slope=(2.0,))},
    "copying": {"lookup": LookupPolicy.make(on=True, shortest=1, agreement=0.02)},
}
MODEL_DRAWS, PROMPT = 3_000, 40
# Drafts follow the target's logits bent by noise of this size: near enough to be accepted, far enough to be refused.
DRAFT_NOISE = 0.7


@pytest.fixture(scope="module")
def sampler():
    """(laws of first token and pair, function (control, seeds) -> first two tokens, accepted, copied of step one)."""
    model, stream = toy("mini"), started("mini", False, ROWS, PROMPT)

    @jax.jit
    def after(token):
        backbone = model.model.backbone
        tokens = jnp.zeros((ROWS,), jnp.int32).at[0].set(stream.anchor).at[1].set(token)
        trunk, _ = backbone.trunk(tokens, stream.decode, jnp.int32(2))
        logits = backbone.logits(trunk.hidden)[:2]
        return logits, target_law(logits, SAMPLING)

    logits, laws = after(0)
    first = np.asarray(laws[0], np.float64)
    pairs, script = np.zeros((len(first), len(first))), np.zeros((len(first), len(first)), np.float32)
    for token in np.flatnonzero(first):
        script[token], law = (np.asarray(rows[1]) for rows in after(token))
        pairs[token] = first[token] * law
    noise = np.random.default_rng(5).normal(size=(len(first) + 1, len(first))) * DRAFT_NOISE
    opening, script = (
        jnp.asarray(logits[0] + noise[-1], jnp.float32),
        jnp.asarray(script + noise[:-1], jnp.float32),
    )

    # Just before the newest token: the same token, and the likeliest pair behind it.
    likeliest = np.unravel_index(np.argmax(pairs), pairs.shape)
    history = np.asarray(stream.history).copy()
    history[PROMPT - 3 : PROMPT] = [int(stream.anchor), *likeliest]
    stream = dataclasses.replace(stream, history=jnp.asarray(history))

    def drafting(merged, current, settings, limit, wanted):
        """Drafts by the script: each from a law that the token before it decides."""
        key, start = round_key(settings.key, current.decode.length + 1), current.decode.length

        def draw(previous, i):
            row = jnp.where(start + i == PROMPT, opening, script[previous])
            token, law = propose(row, settings.draft_sampling, key, start + 1 + i)
            return token, (token, law, jnp.max(law))

        return Drafting(*jax.lax.scan(draw, current.anchor, jnp.arange(limit))[1], wanted)

    @jax.jit
    def draw(settings, seeds):
        merged = nnx.merge(model.graphdef, model.params)

        def one(seed):
            keyed = dataclasses.replace(
                settings, key=jax.random.key_data(jax.random.fold_in(jax.random.key(1), seed))
            )
            middle, result = speculative_step(merged, stream, keyed, ROWS, drafting=drafting)
            _, following = speculative_step(merged, middle, keyed, ROWS, drafting=drafting)
            second = jnp.where(result.emitted > 1, result.tokens[1], following.tokens[0])
            return jnp.stack([result.tokens[0], second]), result.accepted, result.copied

        return jax.lax.map(one, seeds, batch_size=100)

    return first, pairs, draw


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_steps_of_a_model_follow_its_law(sampler, name):
    first, pairs, draw = sampler
    tokens, accepted, copied = jax.device_get(
        draw(control(3, sampling=SAMPLING, **MODEL_OPTIONS[name]), jnp.arange(MODEL_DRAWS))
    )
    vocabulary = len(first)
    counts = np.bincount(tokens[:, 0] * vocabulary + tokens[:, 1], minlength=vocabulary**2)
    assert p_value(counts.reshape(vocabulary, -1).sum(axis=1), first) > CHI_SQUARE_LEVEL
    assert p_value(counts, pairs) > CHI_SQUARE_LEVEL
    # Drafts were kept and refused, so that both halves of the rule had their say.
    assert accepted.max() > 0 and accepted.min() == 0
    assert copied.all() if name == "copying" else not copied.any()
