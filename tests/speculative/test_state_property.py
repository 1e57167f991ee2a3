"""Whatever was drafted and refused: the state is that of the emitted tokens alone.

Random prompts, draft lengths and accept counts, several steps in a row. After them the visible state has the bits of
plain decoding, and the numbers of one prefill of the same tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_steps import CHUNK, CONTEXT, ROWS, WIDE_ROWS, control, plain, programs, script_for, started
from toy_models import FAMILIES, assert_same_state, toy

from v4flash.speculative.step import draft_limit

# Passes of eight rows and of thirty-two sum in another order; a wrong row would be off by tenths.
PREFILL_TOLERANCE = 5e-5
LONGEST_PROMPT, MOST_STEPS = 140, 4
FEW, MANY = 10, 400


def accepted_patterns(limit: int):
    """Lists of (drafts verified, drafts accepted), one for each step."""
    step = st.integers(0, limit).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
    return st.lists(step, min_size=1, max_size=MOST_STEPS)


@functools.lru_cache(maxsize=4)
def plainly_decoded(family: str, quantise: bool, rows: int, length: int):
    """A prompt's stream, what follows it one token at a time, and the stream after each."""
    stream = started(family, quantise, rows, length)
    return stream, *plain(family, quantise, rows, stream, MOST_STEPS * (draft_limit(rows) + 1))


def prefilled(family: str, quantise: bool, rows: int, ids: np.ndarray):
    """The state that holds `ids` after a prefill."""
    run_prefill, _ = programs(family, quantise, rows)
    decode = toy(family, quantise).state(CONTEXT, CHUNK)
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        padded = jnp.zeros((CHUNK,), jnp.int32).at[: len(part)].set(part)
        decode, _, _ = run_prefill(decode, padded, jnp.int32(len(part)), control(0))
    return decode


def check(family: str, quantise: bool, rows: int, length: int, pattern: list[tuple[int, int]]) -> None:
    stream, tokens, streams = plainly_decoded(family, quantise, rows, length)
    _, run_step = programs(family, quantise, rows)
    emitted = 0
    for k, accepted in pattern:
        script = script_for(stream, tokens[emitted:], rows, accepted if accepted < k else None)
        stream, result = run_step(stream, control(k), script)
        assert (int(result.drafted), int(result.accepted)) == (k, accepted)
        assert result.tokens[: accepted + 1].tolist() == tokens[emitted : emitted + accepted + 1]
        emitted += accepted + 1
    config = toy(family, quantise).config
    assert_same_state(config, stream.decode, streams[emitted].decode, 0.0)
    if quantise:  # one rounding to the other side moves a value by more than any tolerance would allow
        return
    ids = np.asarray(jax.device_get(stream.history))[: length + emitted]
    assert_same_state(config, stream.decode, prefilled(family, quantise, rows, ids), PREFILL_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_that_of_the_emitted_tokens(family):
    @settings(max_examples=FEW, deadline=None, derandomize=True, database=None)
    @given(length=st.integers(1, LONGEST_PROMPT), pattern=accepted_patterns(draft_limit(ROWS)))
    def checked(length, pattern):
        check(family, False, ROWS, length, pattern)

    checked()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, WIDE_ROWS])
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_that_of_the_emitted_tokens_in_many_cases(family, quantise, rows):
    @settings(max_examples=MANY, deadline=None, database=None)
    @given(length=st.integers(1, LONGEST_PROMPT), pattern=accepted_patterns(draft_limit(rows)))
    def checked(length, pattern):
        check(family, quantise, rows, length, pattern)

    checked()
