"""What a step may be told: rules, depths, copies, repetition limits. None of it changes a greedy text."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_steps import CONTEXT, ROWS, control, drafting_step, plain, programs, script_for, started

from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import LookupPolicy
from v4flash.speculative.rejection import Verdict
from v4flash.speculative.step import emission
from v4flash.speculative.stream import LIMIT, REPEATED, RUNNING, STOPPED

FAMILY, PROMPT, TOKENS = "mini", 26, 40
WARM = SamplingParams.make(temperature=1.0, top_k=20)
STEEP = DepthPolicy.make(adaptive=True, costs=(1.0, 1.05, 1.9, 2.8, 3.7))
SLOPED = DepthPolicy.make(adaptive=True, costs=(1.0, 1.2, 1.25, 1.5, 1.75))
EAGER = LookupPolicy.make(on=True, shortest=1, agreement=0.0)


def decoded(stream, step_control, count=TOKENS, run_step=None):
    """Emitted tokens, and the results of the steps that emitted them."""
    run_step, tokens, results = run_step or drafting_step(FAMILY), [], []
    while len(tokens) < count and int(stream.finish) == RUNNING:
        stream, result = run_step(stream, step_control)
        tokens += result.tokens[: int(result.emitted)].tolist()
        results.append(jax.device_get(result))
    return tokens[:count], results


@pytest.fixture(scope="module")
def beginning():
    """A stream behind a prompt, and its greedy text."""
    stream = started(FAMILY, False, ROWS, PROMPT)
    return stream, plain(FAMILY, False, ROWS, stream, TOKENS)[0]


OPTIONS = {
    "fixed": {},
    "token by token": {"blockwise": False},
    "drafts drawn": {"draft_sampling": WARM},
    "steep": {"depth": STEEP},
    "sloped": {"depth": SLOPED},
    "copying": {"lookup": EAGER},
    "sloped, copying": {"depth": SLOPED, "lookup": EAGER},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_text_is_the_same_whatever_is_chosen(beginning, name):
    stream, expected = beginning
    for k in (1, 5, 7):
        tokens, results = decoded(stream, control(k, **OPTIONS[name]))
        assert tokens == expected
        if name in ("fixed", "token by token"):
            assert {int(result.drafted) for result in results} == {k}


def test_options_are_data(beginning):
    stream, _ = beginning
    step = drafting_step(FAMILY)
    for options in OPTIONS.values():
        step(stream, control(3, **options))
        step(stream, control(5, sampling=WARM, **options))
    assert step.func._cache_size() == 1


def test_costs_decide_how_many_drafts_are_verified(beginning):
    stream, _ = beginning
    drafted = {}
    for sampling, policy in itertools.product((WARM, SamplingParams.make(temperature=0.0)), (STEEP, SLOPED)):
        _, results = decoded(stream, control(5, sampling=sampling, depth=policy), 60)
        drafted[policy is STEEP] = [int(result.drafted) for result in results]
        assert all(0 <= live <= 5 for live in drafted[policy is STEEP])
    assert np.mean(drafted[True]) < np.mean(drafted[False])
    assert len(set(drafted[False])) > 1


def test_drafting_stops_when_it_never_pays_and_is_tried_again(beginning):
    stream, expected = beginning
    # Twenty times the cost of a plain step for one draft: nothing is drafted, and no confidence is made up.
    hopeless = DepthPolicy.make(adaptive=True, costs=(1.0, 20.0))
    tokens, results = decoded(stream, control(5, depth=hopeless))
    assert tokens == expected and {int(result.drafted) for result in results} == {0}
    assert not any(result.confidence.any() for result in results)
    # Drafts that pay as usual, but not for this text: the average falls, drafting pauses, then comes back.
    hopeful = DepthPolicy.make(
        adaptive=True, costs=(1.0, 1.3, 1.3), acceptance=(0.35,), slope=(0.0,), bias=(3.0,)
    )
    wrong = jnp.full((CONTEXT + ROWS,), 94, jnp.int32)
    scripted = programs(FAMILY, False, ROWS)[1]
    _, results = decoded(stream, control(1, depth=hopeful), 60, lambda s, c: scripted(s, c, wrong))
    pattern = "".join("-d"[int(result.drafted)] for result in results)
    assert pattern.startswith("d") and "d-" in pattern and "-d" in pattern


def test_sampled_text_repeats_with_its_seed_for_both_rules(beginning):
    stream, _ = beginning
    texts = {}
    for blockwise, k, seed in itertools.product((True, False), (0, 4), (1, 2)):
        settings = control(k, sampling=WARM, seed=seed, blockwise=blockwise)
        first, again = (decoded(stream, settings, 30)[0] for _ in range(2))
        assert first == again
        texts[blockwise, k, seed] = tuple(first)
    assert texts[True, 0, 1] == texts[False, 0, 1] != texts[True, 0, 2]
    assert texts[True, 4, 1] != texts[True, 4, 2]


def test_copies_are_what_followed_the_same_tokens(beginning):
    stream, _ = beginning
    length = int(stream.decode.length)
    anchor = int(stream.anchor)
    history = np.asarray(stream.history).copy()
    history[5:12] = [60, 61, anchor, 62, 63, 64, 65]
    history[length - 2 : length] = [60, 61]
    planted = dataclasses.replace(stream, history=jnp.asarray(history))
    for k, sampling in itertools.product((2, 5), (SamplingParams.make(temperature=0.0), WARM)):
        policy = LookupPolicy.make(on=True, shortest=3, agreement=0.0, length=4)
        _, result = drafting_step(FAMILY)(planted, control(k, sampling=sampling, lookup=policy))
        assert bool(result.copied) and int(result.drafted) == 4
        assert result.drafts[:4].tolist() == [62, 63, 64, 65]
        for reserved in ({"shortest": 4}, {"agreement": 1.0}, {"length": 0}):
            picky = LookupPolicy.make(on=True, **{"shortest": 3, "agreement": 0.0, "length": 4} | reserved)
            _, result = drafting_step(FAMILY)(planted, control(k, sampling=sampling, lookup=picky))
            assert not bool(result.copied) and int(result.drafted) == k


def test_tokens_are_remembered_by_position(beginning):
    stream, expected = beginning
    after = stream
    for _ in range(6):
        after, _ = drafting_step(FAMILY)(after, control(5))
    length, start = int(after.decode.length), int(stream.decode.length)
    assert after.history[start + 1 : length + 1].tolist() == expected[: length - start]
    np.testing.assert_array_equal(after.history[: start + 1], stream.history[: start + 1])


def plain_emission(anchor, repeats, accepted_ids, last, stop_ids, repeat_limit, remaining):
    """Tokens one after another, as anyone would write it: (tokens, finish, repeats)."""
    tokens, previous = [], anchor
    for token in [*accepted_ids, last]:
        tokens.append(token)
        repeats = repeats + 1 if token == previous else 1
        previous = token
        if token in stop_ids:
            return tokens, STOPPED, repeats
        if repeat_limit and repeats >= repeat_limit:
            return tokens, REPEATED, repeats
    return tokens, RUNNING if len(tokens) < remaining else LIMIT, repeats


def test_emission_equals_the_plain_loop(beginning):
    stream, _ = beginning
    random, finishes = np.random.default_rng(5), []
    compiled = jax.jit(emission)
    for _ in range(400):
        drafts = random.integers(0, 3, 7)
        accepted, anchor, last = int(random.integers(0, 8)), *map(int, random.integers(0, 3, 2))
        repeats, limit = int(random.integers(1, 5)), int(random.choice([0, 5, 6, 8]))
        remaining = accepted + 1 + int(random.integers(0, 2))
        stop_ids = tuple(random.choice(5, int(random.integers(0, 2)), replace=False).tolist())
        before = dataclasses.replace(
            stream, anchor=jnp.int32(anchor), repeats=jnp.int32(repeats), remaining=jnp.int32(remaining)
        )
        settings = control(7, stop_ids, repeat_limit=limit)
        ids, emitted, finish, run = compiled(
            before, settings, jnp.asarray(drafts, jnp.int32), Verdict(jnp.int32(accepted), jnp.int32(last))
        )
        expected = plain_emission(
            anchor, repeats, drafts[:accepted].tolist(), last, stop_ids, limit, remaining
        )
        assert (ids[: int(emitted)].tolist(), int(finish), int(run)) == expected
        finishes.append(int(finish))
    assert set(finishes) == {RUNNING, STOPPED, LIMIT, REPEATED}


def test_repetition_ends_a_text_inside_an_accepted_block(beginning):
    stream, _ = beginning
    _, run_step = programs(FAMILY, False, ROWS)
    tokens, streams = plain(FAMILY, False, ROWS, stream, 8)
    # The script is the true text; a limit of one repetition ends it with its first token.
    after, result = run_step(stream, control(5, repeat_limit=1), script_for(stream, tokens, ROWS))
    assert int(result.emitted) == 1 and int(result.accepted) == 5 and int(after.finish) == REPEATED
    assert int(after.decode.length) == int(streams[1].decode.length)
