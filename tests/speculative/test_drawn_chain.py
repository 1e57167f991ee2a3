"""Drawing ends where verifying would: the shipped step over every path of drafts, exactly, and over real draws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_steps import ROWS, control, drafting_step, started
from table_drafter import TableDrafter, table_model, table_stream
from toy_laws import EXACT, FILTERS, PATHS, POLICY, K, V, emitted_by, error, golden_laws, rows_of

from v4flash.engine.programs import make_control
from v4flash.speculative.depth import DepthPolicy, calibrated, choose_depth
from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.lookup import LookupPolicy
from v4flash.speculative.randomness import seed_key
from v4flash.speculative.rejection import propose
from v4flash.speculative.step import draft, proposed, step_key

RANDOM = np.random.default_rng(41)
ANCHOR = 5
BIAS = RANDOM.normal(size=(V, V)) * 0.6
# Some confidences leave no doubt, so that every depth occurs.
CONFIDENCE = RANDOM.normal(size=(K, V)) * 2.5
ADAPTIVE = DepthPolicy.make(adaptive=True, **POLICY)


def base_logits() -> np.ndarray:
    """Logits [K, V] near the golden drafts, less what the token before adds."""
    _, _, q = golden_laws()
    return np.stack([np.log(law.mean(axis=0)) for law in q])


@jax.jit
def proposed_along(settings, tables, paths):
    """What a step proposes, for every path [paths] of drafts."""

    def one(path):
        stream = table_stream(jnp.int32(9), ANCHOR, ADAPTIVE.acceptance)
        return proposed(table_model(TableDrafter(*tables, path)), stream, settings, K, draft)

    return jax.vmap(one)(paths)


@functools.cache
def plans(name: str, adaptive: bool):
    """What a step proposes when the drafts are those of PATHS, float64."""
    with jax.enable_x64(True):
        sampling = SamplingParams.make(**FILTERS[name])
        policy = dataclasses.replace(ADAPTIVE, adaptive=jnp.asarray(adaptive))
        settings = make_control(K, K, sampling, seed_key(3), (), depth=policy)
        tables = [jnp.asarray(table) for table in (base_logits(), BIAS, CONFIDENCE)]
        found = jax.device_get(proposed_along(settings, tables, jnp.asarray(PATHS, jnp.int32)))
    assert found.laws.dtype == np.float64
    return found


def drawn(plan) -> np.ndarray:
    """Drafts that were drawn [paths]: their laws are not zero."""
    return (plan.laws.sum(axis=-1) > 0).sum(axis=1)


@pytest.mark.parametrize("name", FILTERS)
def test_drawing_ends_in_front_of_the_first_draft_that_is_not_verified(name):
    every, ended = plans(name, False), plans(name, True)
    assert (every.live == K).all() and (drawn(every) == K).all()
    np.testing.assert_array_equal(drawn(ended), ended.live)
    assert set(ended.live.tolist()) == {1, 2, 3}
    with jax.enable_x64(True):
        chance = jax.vmap(lambda row: calibrated(row, ADAPTIVE))(jnp.asarray(every.confidence))
        expected = jax.vmap(
            lambda row: choose_depth(row, ADAPTIVE.acceptance[:K], ADAPTIVE, jnp.int32(K), jnp.asarray(False))
        )(chance)
    np.testing.assert_array_equal(ended.live, expected)
    # What was drawn is the same, and the chance of the first draft that was not is known.
    place = np.arange(K)
    known = place < ended.live[:, None]
    np.testing.assert_array_equal(ended.ids, np.where(known, every.ids, 0))
    np.testing.assert_array_equal(ended.laws, np.where(known[..., None], every.laws, 0))
    known = place <= ended.live[:, None]
    np.testing.assert_array_equal(ended.confidence, np.where(known, every.confidence, 0))
    # Whether draft i is drawn is the same for all paths that share the drafts before it.
    for i in range(K):
        for row in range(V**i):
            assert len(set((ended.live[rows_of(i) == row] > i).tolist())) == 1


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_emitted_law_is_the_targets(rule, name):
    every, ended = (plans(name, adaptive) for adaptive in (False, True))
    _, p, _ = golden_laws()
    with jax.enable_x64(True):
        params = SamplingParams.make(**FILTERS[name])
        p = [np.asarray(target_law(jnp.log(jnp.asarray(rows)), params)) for rows in p]
    # The laws of the complete chains: an ended chain's are these, as far as it goes.
    q = [np.zeros((V**i, V)) for i in range(K)]
    for i in range(K):
        q[i][rows_of(i)] = every.laws[:, i]
    emits = emitted_by(rule, p, q, ended.live)
    assert abs(sum(law.sum() for law in emits) - 1) < EXACT
    assert error(emits, p) < EXACT


@jax.jit
def drafted(settings, confidence, wanted):
    """What a step drafts, float32, with the same confidence logit everywhere."""
    tables = (jnp.asarray(table, jnp.float32) for table in (base_logits(), BIAS))
    model = table_model(TableDrafter(*tables, jnp.full((K, V), confidence)))
    stream = table_stream(jnp.int32(9), ANCHOR, ADAPTIVE.acceptance)
    return draft(model, stream, settings, K, wanted), proposed(model, stream, settings, K, draft)


def settings_of(**options):
    return make_control(K, K, options.pop("sampling", SamplingParams.make()), seed_key(8), (), **options)


FIXED = dataclasses.replace(ADAPTIVE, adaptive=jnp.asarray(False))
GREEDY = {"sampling": SamplingParams.make(temperature=0.0), "draft_sampling": SamplingParams.make()}
HOPELESS = jnp.float32(-9)


@pytest.mark.parametrize(
    "options", [{"depth": FIXED}, {"depth": ADAPTIVE} | GREEDY], ids=["fixed", "greedy text"]
)
def test_all_are_drawn_where_depths_are_not_chosen_in_order(options):
    for wanted in range(K + 1):
        found, _ = drafted(settings_of(**options), HOPELESS, jnp.int32(wanted))
        assert int(found.count) == wanted
        assert (found.laws.sum(axis=-1) > 0).tolist() == (np.arange(K) < wanted).tolist()


def test_the_first_law_is_there_for_who_may_copy():
    for on in (False, True):
        settings = settings_of(depth=ADAPTIVE, lookup=LookupPolicy.make(on=on))
        found, plan = drafted(settings, HOPELESS, jnp.int32(K))
        assert int(found.count) == on and int(plan.live) == 0 and bool(plan.laws[0].any()) == on


@pytest.mark.parametrize("name", FILTERS)
def test_drafts_are_those_that_propose_draws(name):
    sampling, before = SamplingParams.make(**FILTERS[name]), ANCHOR
    settings = settings_of(sampling=sampling, depth=FIXED)
    found, _ = drafted(settings, HOPELESS, jnp.int32(K))
    key = step_key(table_stream(jnp.int32(9), ANCHOR, ADAPTIVE.acceptance), settings)
    for i in range(K):
        logits = jnp.asarray(base_logits()[i], jnp.float32) + jnp.asarray(BIAS[before], jnp.float32)
        alone = propose(logits, sampling, key, jnp.int32(10 + i))
        assert int(found.ids[i]) == int(alone.token)
        np.testing.assert_allclose(found.laws[i], alone.law, rtol=1e-6)
        before = int(alone.token)


def test_steps_of_a_model_draw_the_same_drafts_and_fewer_of_them():
    """Fixed and chosen depth from the same streams, with the model's own drafter."""
    step, stream = drafting_step("mini"), started("mini", False, ROWS, 26)
    sampling = SamplingParams.make(temperature=1.0, top_p=0.9)
    depths = set()
    policy = DepthPolicy.make(adaptive=True, costs=(1.0, 1.2, 1.25, 1.5, 1.75), slope=(6.0,))
    for _ in range(12):
        _, every = step(stream, control(5, sampling=sampling))
        following, ended = step(stream, control(5, sampling=sampling, depth=policy))
        live = int(ended.drafted)
        depths.add(live)
        np.testing.assert_array_equal(ended.drafts[:live], every.drafts[:live])
        np.testing.assert_array_equal(ended.drafts[live:5], 0)
        np.testing.assert_allclose(ended.confidence[: live + 1], every.confidence[: live + 1], rtol=1e-6)
        stream = following
    assert len(depths) > 2
