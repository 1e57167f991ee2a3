"""Compiled programs that golden results are compared with; compiling is what such tests cost.

One program per checkpoint and mode serves every prompt: prompts are padded with dead rows to one length. Knows:
how a layer is run alone, and how the drafter is run on given taps. Does not know: golden data.
"""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.loading import LoadedModel, load
from v4flash.fidelity.logits import TargetPass
from v4flash.model.attention import Choice
from v4flash.model.backbone import Rows, first_stream
from v4flash.model.engram import compressed_history
from v4flash.model.hyper_connections import collapse
from v4flash.model.numerics import Numerics
from v4flash.speculative.step import greedy_drafts
from v4flash.state import DecodeState, ring_write

ROWS = 304  # the longest golden prompt, rounded up
CONTEXT = 352  # the longest golden prompt with its greedy continuation, rounded up
LAST = 4  # golden results are kept for the last positions of a prompt


@functools.cache
def loaded(path: Path, quantise: bool) -> LoadedModel:
    """The checkpoint with float32 weights, in `qat` mode if `quantise`."""
    return load(path, Numerics(quantise=quantise, packed=False))


@functools.cache
def token_pass(path: Path) -> TargetPass:
    """The whole target fed one token per call, exact."""
    return TargetPass(loaded(path, False), context=CONTEXT, chunk=1)


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a walk over layers gives for the last positions (at most LAST) of one prompt; axis 0 is the layer.

    Attributes:
      streams: [L, T, S, D] after the layer.
      handed_on: [L, T, S] collapse weights for the next sublayer.
      routes: [L, T, K] expert ids.
      logits: [T, V] behind the last layer; the model's logits where all layers were walked, chained.
      chosen, candidates: {layer: bool [N]} for the last position, where the layer owns an indexer; candidates
        only from the layer that publishes them on.
    """

    streams: np.ndarray
    handed_on: np.ndarray
    routes: np.ndarray
    logits: np.ndarray
    chosen: dict[int, np.ndarray]
    candidates: dict[int, np.ndarray]


def walk(path: Path, quantise: bool, layers: tuple[int, ...], ids: np.ndarray, *, alone: bool) -> Walk:
    """Runs `layers` over a prompt from an empty state.

    `alone`: every layer reads the embeddings (with its own n-gram memory) and a one-hot collapse; caches and
    selections are handed on all the same. Otherwise layers are chained as in the model.
    """
    padded = np.zeros((ROWS,), np.int32)
    padded[: len(ids)] = ids
    run = _walk_program(path, quantise, layers)
    found = jax.device_get(run(loaded(path, quantise).params, padded, np.int32(len(ids)), np.bool_(alone)))
    first = max(0, LAST - len(ids))
    streams, handed_on, routes, logits, chosen, candidates = found
    return Walk(
        streams[:, first:], handed_on[:, first:], routes[:, first:], logits[first:], chosen, candidates
    )


@functools.cache
def _walk_program(path: Path, quantise: bool, layers: tuple[int, ...]):
    model = loaded(path, quantise)
    config, graphdef = model.config, model.graphdef

    def run(params: nnx.State, ids: jax.Array, count: jax.Array, alone: jax.Array):
        backbone = nnx.merge(graphdef, params).backbone
        state = DecodeState.create(config, ROWS, ROWS)
        state = state.replace(tokens=ring_write(state.tokens, ids, state.length, count))
        rows = Rows(ids, jnp.arange(ROWS, dtype=jnp.int32), count)
        last = jnp.maximum(count - LAST + jnp.arange(LAST), 0)
        streams = embedded = backbone.embedded(ids)
        pre = one_hot = first_stream(ROWS, config.hc_mult)
        choice, kept, chosen, candidates = Choice(), [], {}, {}
        for index in layers:
            layer = backbone.layers[index]
            streams, pre = jnp.where(alone, embedded, streams), jnp.where(alone, one_hot, pre)
            if layer.engram is not None:
                history = compressed_history(
                    config.engram, backbone.token_map[...], state.tokens, rows.positions
                )
                streams = layer.engram(streams, history)
            streams, pre, routes, state, choice = layer(streams, pre, rows, state, choice)
            kept.append((streams[last], pre[last], routes[last]))
            if layer.layer.owns_indexer:
                chosen[index] = choice.selection.mask[count - 1]
                if choice.candidates is not None:
                    candidates[index] = choice.candidates[count - 1]
        head = backbone.hc_head
        hidden = collapse(pre, streams) if head is None else head(streams)
        stacked = (jnp.stack(parts) for parts in zip(*kept, strict=True))
        return *stacked, backbone.logits(hidden[last]), chosen, candidates

    return jax.jit(run)


def draft(path: Path, quantise: bool, taps: np.ndarray, first: int, anchor: int) -> SimpleNamespace:
    """The drafter's block behind context rows `taps` [T, n * D] at positions first.., greedily chained.

    Fields: main [T, D]; streams [stages, K, S, D]; routes [stages, K, k]; hidden [K, D]; base_logits, logits
    [K, V]; ids, confidence_logit, confidence [K].
    """
    model = loaded(path, quantise)
    window = model.config.sliding_window
    taps, first = taps[-window:], first + max(0, len(taps) - window)
    padded = np.zeros((window, taps.shape[1]), np.float32)
    padded[: len(taps)] = taps
    numbers = (np.int32(number) for number in (first, len(taps), anchor))
    found = jax.device_get(_draft_program(path, quantise)(model.params, padded, *numbers))
    return SimpleNamespace(**found | {"main": found["main"][: len(taps)]})


@functools.cache
def _draft_program(path: Path, quantise: bool):
    model = loaded(path, quantise)
    config, graphdef = model.config, model.graphdef

    def run(params: nnx.State, taps: jax.Array, first: jax.Array, count: jax.Array, anchor: jax.Array):
        model = nnx.merge(graphdef, params)
        state = model.drafter.commit(DecodeState.create(config, 1, taps.shape[0]), taps, first, count)
        state = state.replace(length=first + count)
        block, drafts = greedy_drafts(model, state, anchor, config.draft.block_size)
        return {
            "main": model.drafter.context(taps),
            "streams": jnp.stack(block.streams),
            "routes": jnp.stack(block.routes),
            "hidden": block.hidden,
            "base_logits": block.base_logits,
            "logits": drafts.logits,
            "ids": drafts.ids,
            "confidence_logit": drafts.confidence,
            "confidence": jax.nn.sigmoid(drafts.confidence),
        }

    return jax.jit(run)
