"""The three models that the numerics gate compares: plain modules in float32, their noise, and one on packed weights.

Knows: how they are opened and compiled, and how one reads or continues a text in passes of 8 rows. Does not know: what
is compared.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.loading import load, with_drafter
from v4flash.config import ModelConfig
from v4flash.engine import backends
from v4flash.engine.programs import executable
from v4flash.fidelity.gate import Output
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.model import ROWS
from v4flash.model.numerics import Numerics
from v4flash.state import DecodeState

EMBEDDING = ("backbone", "embed")
# How far an embedded number is moved, in relation to it. Unrounded activations are handed on as float16; rounded ones
# fit into it, and only sums of float32 come in another order, by a few of their roundings.
UNROUNDED, ROUNDED = 2.0**-12, 2.0**-20


@dataclasses.dataclass(frozen=True)
class Side:
    """A target model with its compiled pass.

    Attributes:
      run: (params, state, tokens int32 [8], count) -> (state, logits [8, V], streams [L, 8, S, D]).
      params: its weights. empty: makes a state without tokens.
    """

    run: Callable
    params: Any
    empty: Callable[[], DecodeState]

    def read(self, ids: Sequence[int]) -> Output:
        """Logits and streams of a text, from an empty state."""
        state, logits, streams = self.empty(), [], []
        for start in range(0, len(ids), ROWS):
            state, made = self._pass(state, ids[start : start + ROWS])
            logits.append(made.logits)
            streams.append(made.streams)
        return Output(np.concatenate(logits), np.concatenate(streams, axis=1))

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The likeliest ids behind a prompt of one id at least, ties to the lowest, never ending early."""
        state, said = self.empty(), []
        parts = [prompt[start : start + ROWS] for start in range(0, len(prompt), ROWS)]
        while len(said) < tokens:
            for part in parts:
                state, made = self._pass(state, part)
            said.append(int(made.logits[-1].argmax()))
            parts = [said[-1:]]
        return said

    def _pass(self, state: DecodeState, ids: Sequence[int]) -> tuple[DecodeState, Output]:
        tokens = np.zeros((ROWS,), np.int32)
        tokens[: len(ids)] = ids
        state, *made = self.run(self.params, state, jnp.asarray(tokens), jnp.int32(len(ids)))
        logits, streams = jax.device_get(made)
        return state, Output(logits[: len(ids)], streams[:, : len(ids)])


def compiled(
    form: backends.WeightForm,
    params: Any,
    config: ModelConfig,
    numerics: Numerics,
    context: int,
    cache: Path | None,
) -> Side:
    """The pass of a model that `form` makes of `params`, compiled.

    Raises NoFusedBody where fused launches do not take its shapes.
    """

    def run(params, state, tokens, count):
        backbone = form.model(params).backbone
        trunk, written = backbone.trunk(tokens, state, count, keep_streams=True)
        streams = jnp.stack(trunk.streams).astype(jnp.float32)
        return written.advance(count), backbone.logits(trunk.hidden), streams

    def empty() -> DecodeState:
        return DecodeState.create(config, context, ROWS, numerics.dtype)

    state = jax.eval_shape(empty)
    facts = (*form.facts, repr(config), repr(numerics), repr(context))
    arguments = params, state, jnp.zeros((ROWS,), jnp.int32), jnp.zeros((), jnp.int32)
    try:
        pinned, _ = executable("gate", run, arguments, (state, 0, 0), (1,), facts, cache)
    except backends.refusals() as error:
        raise backends.no_fused_body(error) from error
    return Side(pinned, params, empty)


def plain_side(
    graphdef, params: nnx.State, config: ModelConfig, numerics: Numerics, context: int, cache
) -> Side:
    """Plain modules, in the number types of `numerics`; the embedding in float32, so that noise fits into it."""
    return compiled(
        backends.module_form(graphdef),
        _with_embedding(params, lambda embed: embed),
        config,
        numerics,
        context,
        cache,
    )


def packed_side(
    packed,
    config: ModelConfig,
    numerics: Numerics,
    bodies: type[ReferenceBodies],
    context: int,
    cache: Path | None,
) -> Side:
    """The operations of `bodies` on packed weights."""
    return compiled(backends.packed_form(config, numerics, bodies), packed, config, numerics, context, cache)


def jittered(side: Side, by: float, seed: int = 0) -> Side:
    """A plain side whose embedded numbers were each moved by a share `by` of them, up or down by chance."""

    def moved(embed: jax.Array) -> jax.Array:
        up = jax.random.bernoulli(jax.random.key(seed), shape=embed.shape)
        return embed * jnp.where(up, 1 + by, 1 - by)

    return dataclasses.replace(side, params=_with_embedding(side.params, moved))


def _with_embedding(params: nnx.State, change: Callable[[jax.Array], jax.Array]) -> nnx.State:
    return nnx.from_flat_state(
        [
            (
                path,
                variable.replace(change(variable.get_value().astype(jnp.float32)))
                if path == EMBEDDING
                else variable,
            )
            for path, variable in nnx.to_flat_state(params)
        ]
    )


def open_sides(
    path: Path,
    numerics: Numerics,
    bodies: type[ReferenceBodies],
    context: int,
    cache: Path | None,
    say: Callable[[str], Any],
) -> dict[str, Side]:
    """The sides of a checkpoint: 'reference', 'noise' and 'fused', the last in the number types of `numerics`.

    Programs are compiled side by side. Raises NoFusedBody where packing or `bodies` do not take the checkpoint.
    """
    single = dataclasses.replace(numerics, dtype=jnp.float32)
    say("reading, packing and compiling")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        fused = pool.submit(
            _open_packed, path, dataclasses.replace(numerics, packed=True), bodies, context, cache
        )
        reference = pool.submit(_open_plain, path, single, context, cache)
        coarse = pool.submit(_open_plain, path, numerics, context, cache) if numerics != single else None
        sides = {"fused": fused.result(), "reference": reference.result()}
    if coarse is not None:
        return sides | {"noise": coarse.result()}
    return sides | {"noise": jittered(sides["reference"], ROUNDED if numerics.quantise else UNROUNDED)}


def _open_packed(path: Path, numerics: Numerics, bodies: type[ReferenceBodies], context: int, cache) -> Side:
    config = with_drafter(ModelConfig.from_file(path), False)
    side = packed_side(backends.packed_shapes(config, numerics), config, numerics, bodies, context, cache)
    return dataclasses.replace(
        side, params=backends.packed_weights(load(path, numerics, drafter=False).model)
    )


def _open_plain(path: Path, numerics: Numerics, context: int, cache: Path | None) -> Side:
    loaded = load(path, numerics, drafter=False)
    return plain_side(loaded.graphdef, loaded.params, loaded.config, numerics, context, cache)
