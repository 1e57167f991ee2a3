"""Multi-query attention whose one 512-wide row per position is both key and value.

Knows: projections, rotation and rounding of queries and rows, the softmax with a sink, and the three kinds of
key sets (sliding window, all visible entries, chosen entries). Does not know: how entries are chosen
(`indexer`) or pooled (`compressor`), and nothing of streams.

Source: DeepSeek inference/model.py (`MLA`/`Attention` and its sparse attention kernel).
"""

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.config import LayerConfig, ModelConfig
from v4flash.model.compressor import Compressor
from v4flash.model.indexer import Indexer, Selection, teach_index, visible_entries
from v4flash.model.numerics import Linear, Norm, Numerics, rms_norm, rope_frequencies, rotate
from v4flash.state import DecodeState, ring_positions, ring_write, write_entries

ENTRY_GROUP = 16


@dataclasses.dataclass(frozen=True)
class Choice:
    """What an index source hands to the layers after it: the selection and V4.1's candidate mask."""

    selection: Selection | None = None
    candidates: jax.Array | None = None


def softmax_with_sink(scores: jax.Array, mask: jax.Array, sink: jax.Array) -> jax.Array:
    """Softmax over the last axis where `mask` allows, with one extra logit per head that carries no value.

    Args: scores [T, H, N] float32; mask bool, broadcastable to scores; sink [H]. Returns probabilities
    [T, H, N], zero where masked; their sum is below one by the sink's share.
    """
    sink = sink.astype(jnp.float32)[:, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    # The shift cancels in the quotient, so its derivative is left out.
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - peak)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - peak))


def window_mask(slots: jax.Array, positions: jax.Array, window: int) -> jax.Array:
    """bool [T, R]: a query sees its own position and the `window - 1` before it, none below zero."""
    distance = positions[:, None] - slots[None]
    return (distance >= 0) & (distance < window) & (slots >= 0)


class Attention(nnx.Module):
    """One attention sublayer. Parameters carry the published names (wq_a, wq_b, wkv, wo_a, wo_b, ...)."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, numerics: Numerics):
        heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.config, self.layer, self.numerics = config, layer, numerics
        self.attn_sink = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.wq_a = Linear(rank, config.hidden_size, "fp8", config, numerics)
        self.q_norm = Norm(rank, config.rms_norm_eps, numerics)
        self.wq_b = Linear(heads * width, rank, "fp8", config, numerics)
        self.wkv = Linear(width, config.hidden_size, "fp8", config, numerics)
        self.kv_norm = Norm(width, config.rms_norm_eps, numerics)
        group_width = heads * width // config.o_groups
        self.wo_a = Linear(
            config.o_groups * config.o_lora_rank, group_width, "fp8", config, numerics, round_input=False
        )
        self.wo_b = Linear(config.hidden_size, config.o_groups * config.o_lora_rank, "fp8", config, numerics)
        self.compressor = Compressor(config, layer.ratio, width, numerics) if layer.owns_entries else None
        indexed = layer.owns_indexer or (layer.owns_entries and config.latent_index_keys)
        self.indexer = Indexer(config, layer, numerics) if indexed else None

    @property
    def frequencies(self) -> np.ndarray:
        rope = self.config.compress_rope if self.layer.ratio else self.config.rope
        return rope_frequencies(rope, self.config.qk_rope_head_dim)

    def queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated queries [T, H, head_dim] and the latent [T, q_lora] they come from."""
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).reshape(x.shape[0], self.config.num_attention_heads, self.config.head_dim)
        if self.config.normalise_query_heads:
            q = rms_norm(q, None, self.config.rms_norm_eps)
        return rotate(q, positions, self.frequencies), latent

    def window_rows(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotated and (in `qat` mode) rounded key-value rows [T, head_dim].

        The drafter's context rows come from here too, with projected target taps for x.
        """
        kv = rotate(self.kv_norm(self.wkv(x)), positions, self.frequencies)
        return self.rounded_rows(kv) if self.numerics.quantise else kv

    def rounded_rows(self, kv: jax.Array) -> jax.Array:
        """Rows [T, head_dim] with their leading `kv_rounded_dims` rounded to FP8."""
        dims = self.config.kv_rounded_dims
        rounded = formats.fp8_round_trip(kv[:, :dims], self.config.kv_round_block)
        return jnp.concatenate([rounded, kv[:, dims:]], axis=-1)

    def write_entries(self, state: DecodeState, x: jax.Array, count: jax.Array) -> DecodeState:
        """Adds the entries, and their index keys, that close inside this pass (source layers only)."""
        layer, ratio = self.layer.index, self.layer.ratio
        ring = state.pending.get(layer)
        latent, first, valid, ring = self.compressor(x, ring, state.length, count)
        if ring is not None:
            state = state.with_item("pending", layer, ring)
        if self.indexer is not None:
            state = self.indexer.write_keys(state, x, latent, count)
        index = first + jnp.arange(latent.shape[0], dtype=jnp.int32)
        entry = rotate(latent, index * ratio, self.frequencies)
        if self.numerics.quantise and self.config.fp4_entries:
            entry = formats.fp4_entry_round_trip(entry, ENTRY_GROUP)
        elif self.numerics.quantise:
            entry = self.rounded_rows(entry)
        return state.with_item("entries", layer, write_entries(state.entries[layer], entry, first, valid))

    def project_output(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        """Undoes the rotation, then the grouped low-rank output projection: [T, H, head_dim] to [T, D]."""
        config = self.config
        heads = rotate(heads.astype(self.numerics.dtype), positions, self.frequencies, inverse=True)
        groups = heads.reshape(heads.shape[0], config.o_groups, -1)
        weight = self.wo_a.decoded().reshape(config.o_groups, config.o_lora_rank, -1)
        latent = self.numerics.product("tgk,grk->tgr", groups, weight).astype(self.numerics.dtype)
        return self.wo_b(latent.reshape(heads.shape[0], -1))

    def __call__(
        self, x: jax.Array, state: DecodeState, positions: jax.Array, count: jax.Array, choice: Choice
    ) -> tuple[jax.Array, DecodeState, Choice]:
        """Attention of rows x [T, D] at `positions`; the first `count` rows are live and are stored.

        Returns the sublayer output [T, D], the state with this layer's caches written, and the choice that
        following layers share.
        """
        layer, ratio = self.layer, self.layer.ratio
        q, latent = self.queries(x, positions)
        ring = ring_write(state.windows[layer.index], self.window_rows(x, positions), state.length, count)
        state = state.with_window(layer.index, ring)
        seen = window_mask(
            ring_positions(ring.shape[0], state.length + count - 1), positions, self.config.sliding_window
        )
        if not ratio:
            return self.project_output(self.attend(q, ring, seen), positions), state, choice
        if self.compressor is not None:
            state = self.write_entries(state, x, count)
        entries = state.entries[layer.kv_source]
        selection = None
        if layer.owns_indexer:
            keys = state.index_keys[layer.kv_source]
            choice = Choice(*self.indexer(x, latent, keys, positions, choice.candidates))
        if layer.index_source is not None:
            selection = choice.selection
        if selection is None:
            selection = Selection(mask=visible_entries(positions, ratio, entries.shape[0]))
        heads = self.attend_selected(q, ring, seen, entries, selection)
        return self.project_output(heads, positions), state, choice

    def attend(
        self, q: jax.Array, keys: jax.Array, mask: jax.Array, index_scores: jax.Array | None = None
    ) -> jax.Array:
        """All queries over one key set [N, d] under mask [T, N]: [T, H, d] float32.

        `index_scores` [T, M] chose among the last M keys; see `teach_index`.
        """
        product, dtype = self.numerics.product, self.numerics.dtype
        scores = product("thd,nd->thn", q, keys.astype(dtype)) * self.config.head_dim**-0.5
        weights = softmax_with_sink(scores, mask[:, None], self.attn_sink[...])
        output = product("thn,nd->thd", weights.astype(dtype), keys.astype(dtype))
        if index_scores is None:
            return output
        entries = slice(-index_scores.shape[1], None)
        return teach_index(output, index_scores, weights[..., entries], mask[:, entries])

    def attend_selected(
        self, q: jax.Array, ring: jax.Array, seen: jax.Array, entries: jax.Array, selection: Selection
    ) -> jax.Array:
        """Window and selected entries under one softmax: [T, H, d] float32."""
        if selection.mask is not None:
            keys = jnp.concatenate([ring, entries])
            mask = jnp.concatenate([seen, selection.mask], axis=1)
            return self.attend(q, keys, mask, selection.scores)
        product, dtype = self.numerics.product, self.numerics.dtype
        chosen = entries[selection.ids].astype(dtype)
        near = product("thd,nd->thn", q, ring.astype(dtype))
        far = product("thd,tkd->thk", q, chosen)
        scores = jnp.concatenate([near, far], axis=-1) * self.config.head_dim**-0.5
        mask = jnp.concatenate([seen, selection.valid], axis=1)[:, None]
        weights = softmax_with_sink(scores, mask, self.attn_sink[...]).astype(dtype)
        near, far = weights[..., : ring.shape[0]], weights[..., ring.shape[0] :]
        return product("thn,nd->thd", near, ring.astype(dtype)) + product("thk,tkd->thd", far, chosen)

    def attend_block(
        self, x: jax.Array, ring: jax.Array, last: jax.Array, positions: jax.Array, live: jax.Array
    ) -> jax.Array:
        """Drafter attention: every block row sees the last window of context and all live block rows.

        Args: x [K, D] block rows; ring [R, d] context rows up to position `last`; positions int32 [K];
        live bool [K]. The window is anchored to the block: positions last - window + 1 .. last for every row.
        """
        q, _ = self.queries(x, positions)
        block = self.window_rows(x, positions)
        slots = ring_positions(ring.shape[0], last)
        context = (slots >= 0) & (slots > last - self.config.sliding_window)
        mask = jnp.broadcast_to(jnp.concatenate([context, live]), (x.shape[0], ring.shape[0] + x.shape[0]))
        keys = jnp.concatenate([ring.astype(self.numerics.dtype), block])
        return self.project_output(self.attend(q, keys, mask), positions)
