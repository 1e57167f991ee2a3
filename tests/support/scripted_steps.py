"""Speculative steps of the toy models: with a script in place of the drafter, or with the drafter itself."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from toy_models import toy

from v4flash.engine.programs import Shapes, make_control, new_stream
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key
from v4flash.speculative.step import Drafting, prefill, speculative_step
from v4flash.speculative.stream import Stream

ROWS, WIDE_ROWS, CHUNK, CONTEXT = 8, 16, 32, 320
GREEDY = SamplingParams.make(temperature=0.0)


@functools.cache
def programs(family: str, quantise: bool, rows: int):
    """Jitted prefill and scripted step of a toy model; the script holds a token for every position."""
    model = toy(family, quantise)

    @jax.jit
    def run_prefill(params, decode, tokens, count, control):
        return prefill(nnx.merge(model.graphdef, params), decode, tokens, count, control)

    @jax.jit
    def run_step(params, stream, control, script):
        def scripted(merged, stream, control, limit, wanted):
            ids = jax.lax.dynamic_slice(script, (stream.decode.length + 1,), (limit,))
            return Drafting(ids, jax.nn.one_hot(ids, merged.config.vocab_size), jnp.zeros((limit,)), wanted)

        merged = nnx.merge(model.graphdef, params)
        return speculative_step(merged, stream, control, rows, drafting=scripted)

    return functools.partial(run_prefill, model.params), functools.partial(run_step, model.params)


def control(
    k: int, stop_ids: tuple[int, ...] = (), sampling: SamplingParams = GREEDY, seed: int = 11, **options
):
    return make_control(k, max(k, 5), sampling, seed_key(seed), stop_ids, **options)


def started(family, quantise, rows, length, remaining=100) -> Stream:
    """A stream whose prompt of `length` random tokens is committed."""
    run_prefill, _ = programs(family, quantise, rows)
    decode = toy(family, quantise).state(CONTEXT, CHUNK)
    tokens = np.random.default_rng(length).integers(2, 95, length)
    for start in range(0, length, CHUNK):
        part = tokens[start : start + CHUNK]
        padded = jnp.zeros((CHUNK,), jnp.int32).at[: len(part)].set(part)
        decode, drawn, usable = run_prefill(decode, padded, jnp.int32(len(part)), control(0))
    assert bool(usable)
    shapes = Shapes(rows, CHUNK, CONTEXT)
    return new_stream(decode, [*tokens, int(drawn)], remaining, control(0), shapes)


def plain(family, quantise, rows, stream, count):
    """`count` tokens one at a time, and the stream after each."""
    _, run_step = programs(family, quantise, rows)
    script, tokens, streams = jnp.zeros((CONTEXT + rows,), jnp.int32), [], [stream]
    for _ in range(count):
        stream, result = run_step(stream, control(0), script)
        assert (int(result.emitted), int(result.drafted), bool(result.usable)) == (1, 0, True)
        tokens.append(int(result.tokens[0]))
        streams.append(stream)
    return tokens, streams


def script_for(stream, tokens, rows, wrong_at=None):
    """Script that proposes `tokens`, except a wrong token at offset `wrong_at`."""
    script = np.zeros((CONTEXT + rows,), np.int32)
    first = int(stream.decode.length) + 1
    script[first : first + len(tokens)] = tokens
    if wrong_at is not None:
        script[first + wrong_at] = (tokens[wrong_at] + 1) % 95
    return jnp.asarray(script)


@functools.cache
def drafting_step(family: str):
    """Jitted step of a toy model with its own drafter, for ROWS rows: (stream, control) -> (stream, result)."""
    model = toy(family)

    @jax.jit
    def run_step(params, stream, control):
        return speculative_step(nnx.merge(model.graphdef, params), stream, control, ROWS)

    return functools.partial(run_step, model.params)
