"""One speculative step: every accept count, every draft length, stops, limits, and the state afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_steps import CONTEXT, ROWS, WIDE_ROWS, control, plain, programs, script_for, started
from toy_models import FAMILIES, assert_same_state, toy

from v4flash.engine.programs import make_control
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key
from v4flash.speculative.step import draft_limit
from v4flash.speculative.stream import LIMIT, RUNNING, STOPPED

# Prompt lengths on both sides of group ends (4, 128), of the window (16) and of the ring's wrap.
LENGTHS = (1, 2, 3, 4, 13, 16, 17, 126, 127, 128, 129)


def check_all_accept_counts(family, quantise, rows, length, draft_lengths):
    stream = started(family, quantise, rows, length)
    tokens, streams = plain(family, quantise, rows, stream, 2 * (max(draft_lengths) + 1))
    _, run_step = programs(family, quantise, rows)
    for k in draft_lengths:
        for wrong_at in range(k + 1):
            script = script_for(stream, tokens, rows, wrong_at if wrong_at < k else None)
            after, result = run_step(stream, control(k), script)
            label = f"{family} length {length} k {k} accepted {wrong_at}"
            assert (int(result.accepted), int(result.emitted)) == (wrong_at, wrong_at + 1), label
            assert result.tokens[: wrong_at + 1].tolist() == tokens[: wrong_at + 1], label
            assert int(after.anchor) == tokens[wrong_at], label
            expected = streams[wrong_at + 1]
            assert_same_state(toy(family).config, after.decode, expected.decode, 0.0)
            # Rejected rows left nothing behind: the next step goes on as if they had never been.
            following, result = run_step(after, control(k), script_for(after, tokens[wrong_at + 1 :], rows))
            assert result.tokens[: k + 1].tolist() == tokens[wrong_at + 1 : wrong_at + k + 2], label


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_accept_count_equals_plain_decoding(family, length):
    check_all_accept_counts(family, False, ROWS, length, range(1, 8) if length in (3, 127) else (1, 4, 5, 7))


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_arithmetic_has_the_same_bits_for_every_draft_length(family):
    check_all_accept_counts(family, True, ROWS, 18, range(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_accept_count_at_every_alignment(family, quantise):
    # All remainders of 4 and 128 in exact arithmetic; rounding changes numbers, not places.
    for length in [*range(1, 40), *range(120, 136), *range(252, 262)] if quantise else range(1, 137):
        check_all_accept_counts(family, quantise, ROWS, length, range(1, 8))
        check_all_accept_counts(family, quantise, WIDE_ROWS, length, (8, 9))


@pytest.mark.parametrize("family", FAMILIES)
def test_wide_program_takes_up_to_nine_drafts(family):
    assert draft_limit(ROWS) == 7 and draft_limit(WIDE_ROWS) == 9
    check_all_accept_counts(family, False, WIDE_ROWS, 127, (8, 9))


@pytest.mark.parametrize(("rows", "k"), [*((ROWS, k) for k in range(1, 8)), (WIDE_ROWS, 8), (WIDE_ROWS, 9)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_drafts_never_change_the_text(family, rows, k):
    stream = started(family, False, rows, 30)
    tokens, _ = plain(family, False, rows, stream, 24)
    _, run_step = programs(family, False, rows)
    script = jnp.asarray(np.random.default_rng(k).integers(0, 95, CONTEXT + rows), jnp.int32)
    emitted = []
    while len(emitted) < 24:
        stream, result = run_step(stream, control(k), script)
        assert int(result.drafted) == k
        emitted += result.tokens[: int(result.emitted)].tolist()
    assert emitted[:24] == tokens


def test_stop_token_at_every_place_of_a_block():
    stream = started("v41", False, ROWS, 21)
    tokens, streams = plain("v41", False, ROWS, stream, 8)
    _, run_step = programs("v41", False, ROWS)
    for k in range(8):
        for place in range(k + 1):
            if tokens[place] in tokens[:place]:
                continue
            stopper = control(k, (tokens[place],))
            after, result = run_step(stream, stopper, script_for(stream, tokens, ROWS))
            assert int(result.finish) == STOPPED and int(result.emitted) == place + 1
            assert result.tokens[: place + 1].tolist() == tokens[: place + 1]
            assert_same_state(toy("v41").config, after.decode, streams[place + 1].decode, 0.0)
            again, nothing = run_step(after, stopper, script_for(stream, tokens, ROWS))
            assert int(nothing.emitted) == 0 and int(again.decode.length) == int(after.decode.length)
            for kept, before in zip(jax.tree.leaves(again), jax.tree.leaves(after), strict=True):
                np.testing.assert_array_equal(kept, before)


def test_limits_are_exact():
    stream = started("v4", False, ROWS, 9)
    tokens, _ = plain("v4", False, ROWS, stream, 12)
    _, run_step = programs("v4", False, ROWS)
    for remaining in range(1, 11):
        for k in (0, 3, 7):
            current, emitted = started("v4", False, ROWS, 9, remaining), []
            while int(current.finish) == RUNNING:
                current, result = run_step(
                    current, control(k), script_for(current, tokens[len(emitted) :], ROWS)
                )
                emitted += result.tokens[: int(result.emitted)].tolist()
                assert int(result.drafted) <= max(remaining - 1, 0)
            assert emitted == tokens[:remaining] and int(current.finish) == LIMIT
            assert int(current.remaining) == 0


def test_nan_is_reported():
    stream = started("v4", False, ROWS, 5)
    windows = (stream.decode.windows[0].at[:].set(jnp.nan), *stream.decode.windows[1:])
    poisoned = dataclasses.replace(stream, decode=stream.decode.replace(windows=windows))
    _, run_step = programs("v4", False, ROWS)
    _, result = run_step(poisoned, control(3), jnp.zeros((CONTEXT + ROWS,), jnp.int32))
    assert not bool(result.usable)


def test_sampling_is_repeatable_and_follows_the_seed():
    sampling = SamplingParams.make(temperature=1.0, top_p=0.9)
    _, run_step = programs("v41", False, ROWS)
    texts = []
    for seed in (1, 1, 2):
        stream, emitted = started("v41", False, ROWS, 12), []
        seeded = make_control(4, 5, sampling, seed_key(seed), ())
        for _ in range(6):
            stream, result = run_step(stream, seeded, jnp.full((CONTEXT + ROWS,), 7, jnp.int32))
            emitted += result.tokens[: int(result.emitted)].tolist()
        texts.append(emitted)
    assert texts[0] == texts[1] != texts[2]
