"""Sessions: the pinned loop, rewinding, copying, limits, and that nothing retraces or transfers silently."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import assert_same_state, toy
from toy_programs import SHAPES, compiled

from v4flash.engine import programs
from v4flash.engine.session import Session
from v4flash.engine.statistics import Statistics
from v4flash.errors import CapacityError, UsageError
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key


def new_session() -> Session:
    model = toy("v41")
    return Session(compiled(), model.params, programs.new_state(model.config, model.numerics, SHAPES))


def run(session, prompt, count, k=5, temperature=0.0, stop_ids=(), seed=0):
    """Generates and returns (tokens, statistics)."""
    sampling = SamplingParams.make(temperature=temperature)
    control = programs.make_control(k, max(k, 5), sampling, seed_key(seed), stop_ids)
    statistics = Statistics(k, seed)
    tokens = [token for step in session.generate(prompt, control, count, statistics) for token in step.tokens]
    return tokens, statistics


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 95, length).tolist()


def test_every_draft_length_gives_the_same_text():
    reference, _ = run(new_session(), prompt(50), 60, k=0)
    for k in range(1, 8):
        session = new_session()
        tokens, statistics = run(session, prompt(50), 60, k=k)
        assert tokens == reference
        assert session.tokens == prompt(50) + reference
        assert statistics.generated == 60 and statistics.finish == "length"
        assert statistics.drafted[0] == statistics.steps - (statistics.drafted[0] < statistics.steps)


def test_no_drafts_means_no_acceptance_figure():
    _, statistics = run(new_session(), prompt(5), 6, k=0)
    assert statistics.acceptance is None and statistics.tokens_per_step == 1.0
    assert statistics.to_json()["acceptance"] is None


def test_turns_continue_as_if_the_transcript_were_prefilled():
    """Appending 1, 3, 4, 127 and 129 tokens to a live session equals prefilling everything."""
    session = Session(*_big())
    for turn, length in enumerate((1, 3, 4, 127, 129)):
        before = list(session.tokens)
        tokens, _ = run(session, prompt(length), 9, k=turn + 1)
        fresh = Session(*_big())
        expected, _ = run(fresh, before + prompt(length), 9, k=0)
        assert tokens == expected


@functools.cache
def _big_programs() -> programs.Programs:
    model = toy("v4")
    return programs.build(
        model.graphdef, model.params, model.config, model.numerics, programs.Shapes(8, 128, 400), None
    )


def _big():
    model = toy("v4")
    return (
        _big_programs(),
        model.params,
        programs.new_state(model.config, model.numerics, _big_programs().shapes),
    )


def test_rewind_and_copy():
    session = new_session()
    first, _ = run(session, prompt(40), 30)
    branch = session.copy()
    session.rewind(50)
    assert session.tokens == (prompt(40) + first)[:50]
    again, _ = run(session, [], 20)
    assert again == first[10:30]
    other, _ = run(branch, prompt(3), 10)
    expected, _ = run(new_session(), prompt(40) + first + prompt(3), 10)
    assert other == expected
    session.rewind(2)  # further back than the rings reach: the kept tokens are prefilled again
    far, _ = run(session, prompt(40)[2:], 30)
    assert far == first
    session.rewind(0)
    fresh, _ = run(session, prompt(40), 30)
    assert fresh == first


def test_two_interleaved_sessions_do_not_share_state():
    control = programs.make_control(3, 5, SamplingParams.make(temperature=0.0), seed_key(0), ())
    expected = [run(new_session(), prompt(n), 20)[0] for n in (10, 11)]
    streams = [new_session().generate(prompt(n), control, 20, Statistics(3, 0)) for n in (10, 11)]
    found = [[], []]
    for _ in range(20):
        for texts, stream in zip(found, streams, strict=True):
            texts += [token for step in [next(stream, None)] if step for token in step.tokens]
    assert found == expected


def test_closing_early_leaves_a_usable_session():
    session = new_session()
    control = programs.make_control(4, 5, SamplingParams.make(temperature=0.0), seed_key(0), ())
    reference, _ = run(new_session(), prompt(12), 25)
    stream = session.generate(prompt(12), control, 25, Statistics(4, 0))
    taken = [token for _ in range(4) for token in next(stream).tokens]
    stream.close()
    assert session.tokens == prompt(12) + taken
    rest, _ = run(session, [], 25 - len(taken))
    assert taken + rest == reference


def test_stop_ids_and_limits():
    reference, _ = run(new_session(), prompt(30), 20, k=0)
    stopper = reference[7]
    first_place = reference.index(stopper)
    session = new_session()
    tokens, statistics = run(session, prompt(30), 20, stop_ids=(stopper,))
    assert tokens == reference[: first_place + 1] and statistics.finish == "eos"
    assert session.tokens == prompt(30) + tokens
    for limit in range(0, 10):
        tokens, statistics = run(new_session(), prompt(30), limit)
        assert tokens == reference[:limit] and statistics.finish == "length"
        assert statistics.generated == limit


def test_context_end_is_exact():
    for length in (SHAPES.context - 1, SHAPES.context - 3, SHAPES.context - 9):
        session = new_session()
        tokens, statistics = run(session, prompt(length), 50, k=7)
        assert len(session.tokens) == SHAPES.context and len(tokens) == SHAPES.context - length
        assert statistics.finish == "context"
        with pytest.raises(CapacityError, match=r"201 tokens, context is 200"):
            run(session, [5], 1)
    full = new_session()
    tokens, statistics = run(full, prompt(SHAPES.context), 50)
    assert tokens == [] and statistics.finish == "context"


def test_seed_repeats_and_matters():
    texts = [run(new_session(), prompt(8), 30, temperature=1.0, seed=seed)[0] for seed in (7, 7, 8, 9)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


def test_state_after_a_generation_is_that_of_prefill():
    session = new_session()
    tokens, _ = run(session, prompt(21), 30, k=6)
    other = new_session()
    run(other, prompt(21) + tokens[:-1], 1, k=0)
    assert_same_state(toy("v41").config, session.state, other.state, 5e-5)


def test_empty_prompt_is_refused():
    with pytest.raises(UsageError, match="empty"):
        run(new_session(), [], 5)


def test_a_stray_trace_or_transfer_in_the_loop_raises():
    """The loop's guards let the pinned programs through and nothing else."""
    device_value = jnp.ones((2,))
    with jax.no_tracing(), pytest.raises(RuntimeError, match="tracing"):
        jax.jit(lambda x: x + 3)(device_value)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="[Dd]isallowed"):
        jax.jit(lambda x: x * 2)(np.ones((2,)))
    with pytest.raises(TypeError):
        compiled().step(toy("v41").params, None, None)


def test_a_retrace_inside_the_loop_is_caught():
    """A program that is not pinned cannot run in the loop: its first call would trace."""
    model, pinned = toy("v41"), compiled()
    loose = dataclasses.replace(pinned, step=jax.jit(lambda p, s, c: pinned.step(p, s, c)))
    session = Session(loose, model.params, programs.new_state(model.config, model.numerics, SHAPES))
    with pytest.raises(RuntimeError, match="tracing"):
        run(session, prompt(4), 5)
