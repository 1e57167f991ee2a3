"""One layer on packed weights, for the backbone and for the drafter's stages.

Knows: how the operations of a layer follow each other and which columns of a joined product are whose. Does not know:
which body an operation has, or how layers follow each other.

    boundary and products -> cache writes and queries -> [index] -> attention -> wo_a and wo_b
    boundary and router -> experts' gate and up -> down -> (the next boundary sums)

Products hand on float32 partial sums; the reader adds them and rounds to the model's type.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.attention.reference import Block, Chosen, Visible
from pallas_kernels.experts.tiers import Kept, TieredExperts
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.router.reference import Gate
from pallas_kernels.rows import Columns, turn_table
from pallas_kernels.tiles import PackedMatrix
from v4flash.config import LayerConfig, ModelConfig
from v4flash.model.fused import specs
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.packing import PackedLayer
from v4flash.model.fused.peer import HeldExperts, own_part, own_routes
from v4flash.model.numerics import Numerics, rope_frequencies
from v4flash.state import DecodeState, closing_entries

TILE = 32  # rows of a packed tile


@dataclasses.dataclass(frozen=True)
class Selection:
    """What an index source hands to the layers behind it."""

    chosen: Listed | None = None
    candidates: Listed | None = None


@dataclasses.dataclass(frozen=True)
class Turns:
    """Rotations of one pass: cosine and sine float32 [R, 2, pairs].

    Attributes:
      plain, compressed: of the rows, in layers without and with compressed entries.
      index: of the rows' index queries.
      entries, index_entries: by ratio, of the entries that may close in this pass.
    """

    plain: jax.Array
    compressed: jax.Array
    index: jax.Array | None
    entries: dict[int, jax.Array]
    index_entries: dict[int, jax.Array]

    @classmethod
    def of(cls, config: ModelConfig, length: jax.Array, rows: int) -> "Turns":
        """The rotations of rows at positions length .. length + rows - 1."""
        positions = length + jnp.arange(rows, dtype=jnp.int32)
        compressed = rope_frequencies(config.compress_rope, config.qk_rope_head_dim)
        index = rope_frequencies(config.compress_rope, specs.index_rope(config))
        starts = {
            ratio: (length // ratio + jnp.arange(closing_entries(rows, ratio), dtype=jnp.int32)) * ratio
            for ratio in sorted({layer.ratio for layer in config.layers if layer.owns_entries})
        }
        return cls(
            turn_table(positions, rope_frequencies(config.rope, config.qk_rope_head_dim)),
            turn_table(positions, compressed),
            turn_table(positions, index),
            {ratio: turn_table(places, compressed) for ratio, places in starts.items()},
            {ratio: turn_table(places, index) for ratio, places in starts.items()},
        )


@dataclasses.dataclass(frozen=True)
class Pass:
    """What the layers of one pass share: bodies, row count, positions, rotations."""

    config: ModelConfig
    numerics: Numerics
    ops: ReferenceBodies
    length: jax.Array
    count: jax.Array
    tokens: jax.Array
    turns: Turns

    @classmethod
    def start(cls, bodies, config: ModelConfig, numerics: Numerics, tokens, length, count) -> "Pass":
        rows = tokens.shape[0]
        ops = bodies(config, numerics, rows)
        return cls(config, numerics, ops, length, count, tokens, Turns.of(config, length, rows))

    def rounded(self, x: jax.Array) -> jax.Array:
        """Rows as FP8 products read them: float16 once rounded, else in the model's type."""
        x = x.astype(self.numerics.dtype)
        if not self.numerics.quantise:
            return x
        return formats.fp8_round_trip(x, min(self.config.weight_block_size, x.shape[-1])).astype(jnp.float16)


def projection(floats, name: str) -> Projection:
    """The parameters of one hyper-connection."""
    return Projection(
        floats[f"{name}.fn"], *(floats.with_gap(f"{name}.{part}") for part in ("base", "scale"))
    )


@dataclasses.dataclass(frozen=True)
class Projected:
    """Products of the rows in front of attention, in parts [S, R, N]: of `projections` and, or None, of `exact`."""

    low: jax.Array
    exact: jax.Array | None


def enter_attention(
    run: Pass, pack: PackedLayer, source, coefficients: jax.Array | None, output: Output | None, **options
) -> tuple[Boundary, Projected]:
    """The boundary in front of attention, and the products of its rows. `source` and `options` as of `boundary`."""
    made, low, exact = run.ops.boundary_and_products(
        specs.boundary_spec(run.config, run.numerics),
        source,
        pack.floats["attn_norm"],
        projection(pack.floats, "hc_attn"),
        pack.matrix("projections"),
        pack.plain["exact"] if pack.exact_columns else None,
        coefficients,
        output,
        **options,
    )
    return made, Projected(low, exact)


def attend(
    run: Pass,
    layer: LayerConfig,
    pack: PackedLayer,
    projected: Projected,
    state: DecodeState,
    selection: Selection,
) -> tuple[jax.Array, DecodeState, Selection]:
    """The attention sublayer: its output in parts [S, R, D], the written state, the choice."""
    config, ops, floats = run.config, run.ops, pack.floats
    numerics, length, count, index = run.numerics, run.length, run.count, layer.index
    low = projected.low
    columns, first = {}, 0
    for name, width in pack.exact_columns:
        columns[name] = Columns(projected.exact, first, width)
        first += width
    turns = run.turns.compressed if layer.ratio else run.turns.plain
    rank = config.q_lora_rank
    rows = Rows(
        Columns(low, rank, config.head_dim), floats["kv_norm"], turns, Columns(low, 0, rank), floats["q_norm"]
    )
    caches = Caches(
        state.windows[index],
        *(getattr(state, name).get(index) for name in ("pending", "entries", "index_pending", "index_keys")),
    )
    caches, q = ops.write_and_query(
        rows, caches, length, count, specs.row_spec(config, numerics), pack.matrix("queries"),
        *_pooling(run, layer, pack, columns),
    )  # fmt: skip
    state = _written(state, index, caches)
    width = config.num_attention_heads * config.head_dim
    if layer.owns_indexer:
        keys = state.index_keys[layer.kv_source]
        chosen, candidates = ops.choose(
            Columns(q, width, config.index_n_heads * config.index_head_dim),
            columns["index_weights"],
            run.turns.index,
            keys,
            length,
            count,
            specs.index_spec(config, layer, numerics, keys.shape[0]),
            selection.candidates,
        )
        selection = Selection(chosen, candidates)
    far = None
    if layer.ratio:
        entries = state.entries[layer.kv_source]
        far = Visible(entries, layer.ratio)
        if layer.index_source is not None:
            far = Chosen(entries, selection.chosen.ids, selection.chosen.counts)
    heads = ops.attend(
        Columns(q, 0, width),
        turns,
        floats["attn_sink"],
        state.windows[index],
        length,
        count,
        far,
        specs.attention_spec(config, numerics),
    )
    return project_output(run, pack, heads), state, selection


def attend_block(run: Pass, pack: PackedLayer, projected: Projected, ring: jax.Array) -> jax.Array:
    """A drafter stage's attention over its context ring and the live rows of the block: parts [S, R, D]."""
    config, ops, floats = run.config, run.ops, pack.floats
    low, rank, turns = projected.low, config.q_lora_rank, run.turns.plain
    rows = Rows(
        Columns(low, rank, config.head_dim), floats["kv_norm"], turns, Columns(low, 0, rank), floats["q_norm"]
    )
    keys, q = ops.block_rows_and_query(rows, specs.row_spec(config, run.numerics), pack.matrix("queries"))
    heads = ops.attend(
        Columns(q, 0, config.num_attention_heads * config.head_dim),
        turns,
        floats["attn_sink"],
        ring,
        run.length,
        run.count,
        Block(keys),
        specs.attention_spec(config, run.numerics),
    )
    return project_output(run, pack, heads)


def project_output(run: Pass, pack: PackedLayer, heads: jax.Array) -> jax.Array:
    """The grouped low-rank output projection of heads [R, H * d], in parts [S, R, D]."""
    return run.ops.project_output(heads, pack.matrix("wo_a"), pack.matrix("wo_b"), run.config.o_groups)


@dataclasses.dataclass(frozen=True)
class ColdExperts:
    """What a layer with experts in two memories needs beside its weights (`pallas_kernels.experts.tiers`).

    Attributes:
      layer: its row in the table, and in what is kept.
      table: int32 [L, E, 2], (tier, slot) of every expert.
      kept: the cold experts on the device.
    """

    layer: int
    table: jax.Array
    kept: Kept


def feed_forward(
    run: Pass,
    pack: PackedLayer,
    made: Boundary,
    output: jax.Array,
    chosen: int,
    experts: int,
    cold: ColdExperts | None = None,
) -> tuple[jax.Array, jax.Array, Output, jax.Array, Kept | None]:
    """The mixture of experts behind attention's `output`.

    Returns streams, coefficients, output in parts, expert ids, and what is kept on the device now if some are cold.
    """
    spec = specs.boundary_spec(run.config, run.numerics)
    bias = pack.floats["gate.bias"] if "gate.bias" in pack.floats else None
    behind, routes, ids = run.ops.boundary_and_route(
        spec,
        specs.router_spec(run.config, experts, chosen),
        made.streams,
        pack.floats["ffn_norm"],
        projection(pack.floats, "hc_ffn"),
        Gate(pack.plain["gate"], bias, pack.table),
        run.count,
        made.coefficients,
        Output(partials=output),
        run.tokens,
    )
    kept = None
    if isinstance(pack.experts, TieredExperts):
        partial, kept = run.ops.tiered_experts(
            behind.rounded,
            pack.experts,
            pack.shared,
            routes,
            chosen,
            cold.layer,
            cold.table,
            cold.kept,
        )
    elif isinstance(pack.experts, HeldExperts):
        own = own_routes(pack.experts, routes)
        partial = run.ops.experts(behind.rounded, pack.experts.held, pack.shared, own, chosen)
        partial = run.ops.over_devices(own_part(pack.experts, partial, ids, run.count))
    else:
        partial = run.ops.experts(behind.rounded, pack.experts, pack.shared, routes, chosen)
    return behind.streams, behind.coefficients, Output(experts=partial, count=run.count), ids, kept


def key_matrix(pack: PackedLayer, config: ModelConfig) -> PackedMatrix:
    """wkv alone, out of the joined projections."""
    both = pack.matrix("projections")
    return PackedMatrix(*(part[config.q_lora_rank // TILE :] for part in both))


def _pooling(run: Pass, layer: LayerConfig, pack: PackedLayer, columns: dict[str, Columns]) -> tuple:
    """(pool spec, compressor, index) of a layer that owns entries; nothing for another."""
    if not layer.owns_entries:
        return ()

    def compressor(name: str, turns: jax.Array) -> Compressor:
        bias = f"{name}.bias"
        return Compressor(
            columns[f"{name}.value"],
            columns.get(f"{name}.gate"),
            pack.floats[bias] if bias in pack.floats else None,
            pack.floats[f"{name}.norm"],
            turns,
        )

    index = None
    if "index.value" in columns:
        index = compressor("index", run.turns.index_entries[layer.ratio])
    elif "index_projection" in pack.plain:
        index = LatentIndex(
            pack.plain["index_projection"], pack.floats["index.norm"], run.turns.index_entries[layer.ratio]
        )
    own = compressor("compressor", run.turns.entries[layer.ratio])
    return specs.pool_spec(run.config, layer), own, index


def _written(state: DecodeState, index: int, caches: Caches) -> DecodeState:
    """The state with one layer's caches put back."""
    state = state.with_window(index, caches.window)
    for name in ("pending", "entries", "index_pending", "index_keys"):
        array = getattr(caches, name)
        if array is not None:
            state = state.with_item(name, index, array)
    return state
