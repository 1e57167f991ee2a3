"""Arrays of a step lie where those of the step before lay, and what the host has of a result stays as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import toy
from toy_programs import SHAPES, compiled

from v4flash.engine import programs
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key
from v4flash.speculative.stream import RUNNING, StepResult

PROMPT = [5, 9, 23, 4, 17]
STEPS = 6


def begun(k: int = 3):
    """(programs, params, a stream behind the prompt, control)."""
    model, pinned = toy("v41"), compiled()
    control = programs.make_control(k, 5, SamplingParams.make(temperature=1.0), seed_key(1), ())
    state = programs.new_state(model.config, model.numerics, SHAPES)
    tokens = jnp.asarray(PROMPT + [0] * (SHAPES.chunk - len(PROMPT)), jnp.int32)
    state, drawn, _ = pinned.prefill(model.params, state, tokens, jnp.int32(len(PROMPT)), control)
    stream = programs.new_stream(state, [*PROMPT, int(drawn)], 100, control, SHAPES)
    return pinned, model.params, stream, control


def places(tree) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_every_step_writes_where_the_one_before_did():
    pinned, params, stream, control = begun()
    spent = jax.device_put(StepResult.blank(pinned.draft_limit))
    seen = set()
    for _ in range(STEPS):
        stream, spent = pinned.step.compiled(params, stream, control, spent)
        seen.add((*places(stream), *places(spent)))
    assert len(seen) == 1


def test_results_that_were_kept_do_not_change():
    pinned, params, stream, control = begun()
    kept, read = [], []
    for _ in range(STEPS):
        stream, words = pinned.step(params, stream, control)
        kept.append(words)
        read.append(np.array(words))
    assert len({words.tobytes() for words in read}) == STEPS
    for words, as_read in zip(kept, read, strict=True):
        np.testing.assert_array_equal(words, as_read)
    results = [StepResult.unpacked(words) for words in read]
    assert all(bool(result.usable) and int(result.finish) == RUNNING for result in results)
    history = np.asarray(stream.history)[len(PROMPT) + 1 :]
    emitted = np.concatenate([result.tokens[: result.emitted] for result in results])
    np.testing.assert_array_equal(history[: emitted.size], emitted)


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_packing_loses_nothing(limit):
    random = np.random.default_rng(limit)

    def filled(leaf):
        if leaf.dtype == bool:
            return random.integers(0, 2, leaf.shape).astype(bool)
        if leaf.dtype == np.float32:
            return random.normal(size=leaf.shape).astype(np.float32)
        return random.integers(-(2**31), 2**31 - 1, leaf.shape).astype(np.int32)

    made = jax.tree.map(filled, StepResult.blank(limit))
    found = StepResult.unpacked(np.asarray(made.packed()))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(made), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
