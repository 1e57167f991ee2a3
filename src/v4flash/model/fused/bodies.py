"""The operations of a layer behind one door, with two bodies: hand-fused launches, and their definitions.

Knows: which function of `pallas_kernels` is which body, and the counters that fused launches hand on. Does not
know: the order of operations. Both read the same packed weights, so that they can be compared within one run.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference as attention
from pallas_kernels.attention.reference import FarKeys
from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.attention_input import reference as attention_input
from pallas_kernels.attention_output import reference as attention_output
from pallas_kernels.dense import reference as dense
from pallas_kernels.engram import reference as engram
from pallas_kernels.engram.reference import Memory
from pallas_kernels.engram.specs import EngramSpec
from pallas_kernels.experts import early, tiers
from pallas_kernels.experts import reference as experts
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import Routes
from pallas_kernels.experts.tiers import Kept, TieredExperts
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.hyper_connections.specs import BoundarySpec
from pallas_kernels.index_selection import reference as index_selection
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.key_rows import reference as key_rows
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import PoolSpec, RowSpec
from pallas_kernels.markov_chain import reference as markov_chain
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import ChainSpec
from pallas_kernels.router import reference as routing
from pallas_kernels.router.reference import Gate
from pallas_kernels.router.specs import RouterSpec
from pallas_kernels.rows import Columns
from pallas_kernels.sampling_law import reference as sampling_law
from pallas_kernels.sampling_law.reference import Filters
from pallas_kernels.tiles import PackedMatrix
from v4flash.config import ModelConfig
from v4flash.model.fused import specs
from v4flash.model.numerics import Numerics
from v4flash.model.paired_experts import ROLE


class ReferenceBodies:
    """The definitions in plain jax.numpy; XLA fuses what it can."""

    def __init__(self, config: ModelConfig, numerics: Numerics, rows: int):
        self.block = config.weight_block_size
        self.round_block = config.weight_block_size if numerics.quantise else 0
        self.limit, self.dtype = config.swiglu_limit, numerics.dtype

    def boundary(
        self, spec: BoundarySpec, source, norm, projection, coefficients, output, **options
    ) -> Boundary:
        """One boundary; `source` is the streams, or (table, tokens) in front of the first layer."""
        streams = boundaries.embedded(*source, spec) if isinstance(source, tuple) else source
        return boundaries.boundary(spec, streams, norm, projection, coefficients, output, **options)

    def boundary_and_products(
        self, spec: BoundarySpec, source, norm, projection, matrix, weight, coefficients, output, **options
    ) -> tuple[Boundary, jax.Array, jax.Array | None]:
        """A boundary, and unsummed products of its rows: FP8 of the rounded ones, BF16 of the exact ones or None."""
        streams = boundaries.embedded(*source, spec) if isinstance(source, tuple) else source
        return attention_input.boundary_and_products(
            spec, streams, norm, projection, matrix, weight, coefficients, output, **options
        )

    def boundary_and_route(
        self,
        spec: BoundarySpec,
        router: RouterSpec,
        streams: jax.Array,
        norm: jax.Array,
        projection: Projection,
        gate: Gate,
        count: jax.Array,
        coefficients: jax.Array,
        output: Output,
        tokens: jax.Array,
    ) -> tuple[Boundary, Routes, jax.Array]:
        """The boundary in front of a mixture of experts, its routes, and the expert ids [R, K]."""
        made = boundaries.boundary(spec, streams, norm, projection, coefficients, output)
        return made, *routing.route(router, made.x, gate, count, tokens)

    def product(self, x: jax.Array, matrix: PackedMatrix) -> jax.Array:
        """An FP8 product, unsummed: float32 [S, R, N]."""
        return dense.product(x, matrix)

    def project_output(
        self, heads: jax.Array, first: PackedMatrix, second: PackedMatrix, groups: int
    ) -> jax.Array:
        """The grouped low-rank projection of attention's heads, unsummed: float32 [S, R, D]."""
        return attention_output.project(
            heads, first, second, groups=groups, round_block=self.round_block, dtype=self.dtype
        )

    def write(self, rows: Rows, caches: Caches, length: jax.Array, count: jax.Array, spec: RowSpec) -> Caches:
        """Key-value rows into a window."""
        return key_rows.write(rows, caches, length, count, spec)[0]

    def write_and_query(
        self,
        rows: Rows,
        caches: Caches,
        length: jax.Array,
        count: jax.Array,
        spec: RowSpec,
        matrix: PackedMatrix,
        pool: PoolSpec | None = None,
        compressor: Compressor | None = None,
        index: Compressor | LatentIndex | None = None,
    ) -> tuple[Caches, jax.Array]:
        """The cache writes of one layer, and the unsummed product of its query latent: float32 [S, R, N]."""
        return key_rows.write_and_query(rows, caches, length, count, spec, matrix, pool, compressor, index)

    def block_rows_and_query(
        self, rows: Rows, spec: RowSpec, matrix: PackedMatrix
    ) -> tuple[jax.Array, jax.Array]:
        """Key-value rows [R, d] of a drafter's block, and the unsummed product of its query latent."""
        return key_rows.block_rows_and_query(rows, spec, matrix)

    def choose(
        self,
        q: Columns,
        weights: Columns,
        table: jax.Array,
        keys: jax.Array,
        length: jax.Array,
        count: jax.Array,
        spec: IndexSpec,
        candidates: Listed | None,
    ) -> tuple[Listed, Listed | None]:
        """The entries each row attends to, and the candidate blocks that members choose among."""
        return index_selection.choose(q, weights, table, keys, length, count, spec, candidates)

    def attend(
        self,
        q: Columns,
        table: jax.Array,
        sink: jax.Array,
        ring: jax.Array,
        length: jax.Array,
        count: jax.Array,
        far: FarKeys,
        spec: AttentionSpec,
    ) -> jax.Array:
        """The attention core [R, H * d]."""
        return attention.attend(q, table, sink, ring, length, count, far, spec)

    def experts(
        self, x: jax.Array, routed: PackedExperts, shared: PackedExperts, routes: Routes, chosen: int
    ) -> jax.Array:
        """Partial outputs [R, chosen + 1, D] of the routed experts and the shared one."""
        hidden = experts.gate_up(
            x, routed, shared, routes, limit=self.limit, dtype=self.dtype, rounded=bool(self.round_block)
        )
        return experts.down(
            hidden, routed, shared, routes, chosen=chosen, round_block=self.round_block, dtype=self.dtype
        )

    def tiered_experts(
        self,
        x: jax.Array,
        routed: TieredExperts,
        shared: PackedExperts,
        routes: Routes,
        chosen: int,
        layer: int,
        table: jax.Array,
        kept: Kept,
    ) -> tuple[jax.Array, Kept]:
        """The same where some experts lie in host memory, and which of them are kept on the device afterwards.

        Args: layer, its number; table, int32 [L, E, 2]; kept, of all layers.
        """
        places, kept = tiers.place(jnp.int32(layer), table, routes, kept)
        hidden, records = tiers.gate_up(
            x, routed, shared, routes, places, kept.records[layer],
            limit=self.limit, dtype=self.dtype, rounded=bool(self.round_block),
        )  # fmt: skip
        partial, records = tiers.down(
            hidden, routed, shared, routes, places, records,
            chosen=chosen, round_block=self.round_block, dtype=self.dtype,
        )  # fmt: skip
        return partial, kept.with_records(layer, records)

    def guess(
        self, kept: Kept, tokens: jax.Array, length: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Kept]:
        """Experts that a pass of tokens int32 [R] may choose, int32 [L, G], and what is known now (`early.guess`)."""
        named, seen = early.guess(kept.early.seen, tokens, length, count)
        return named, kept._replace(early=kept.early._replace(seen=seen))

    def fetch_early(self, named: jax.Array, table: jax.Array, cold: Sequence[jax.Array], kept: Kept) -> Kept:
        """What is kept with guessed experts in it, and with the copies that bring them under way.

        Args: named, int32 [L, G], experts plus one; table, int32 [L, E, 2]; cold, of every layer.
        """
        return self._fetched(early, named, table, cold, kept)

    @staticmethod
    def _fetched(body, named, table, cold, kept: Kept) -> Kept:
        kept = body.plan(table, named, kept)
        turn, made = kept.early.turn, []
        for layer, (outside, records) in enumerate(zip(cold, kept.records, strict=True)):
            records, turn = body.fetch(jnp.int32(layer), outside, table, kept.early.fetches, turn, records)
            made.append(records)
        return kept._replace(records=tuple(made), early=kept.early._replace(turn=turn))

    def over_devices(self, partial: jax.Array) -> jax.Array:
        """The sum of both devices' partial outputs, on both; inside a `shard_map` over the axis ROLE."""
        return jax.lax.psum(partial, ROLE)

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """float32 [R, V] of normed rows."""
        return dense.exact_product(x, head)[0]

    def look_up(
        self, spec: EngramSpec, memory: Memory, ring: jax.Array, start: jax.Array, rows: int
    ) -> jax.Array:
        """Table rows of an n-gram memory side by side, as its product reads them."""
        return engram.lookup(spec, memory, ring, start, rows)

    def remember(
        self, spec: EngramSpec, streams, partials, q_weight, k_weight, coefficients, output: Output | None
    ) -> jax.Array:
        """Streams with the output of the sublayer before, if there is one, and the memory added."""
        if output is not None:
            streams = boundaries.spread(coefficients, boundaries.output_rows(output, spec.type), streams)
        return engram.merge(spec, streams, partials, q_weight, k_weight)

    def chain(
        self,
        spec: ChainSpec,
        base: jax.Array,
        anchor: jax.Array,
        embed: jax.Array,
        head: jax.Array,
        count: jax.Array,
        draw: Draw | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Ids [K] of the drafter's Markov chain, and the logits, or where it draws the laws, [K, V] they come from."""
        return markov_chain.chain(spec, base, anchor, embed, head, count, draw)

    def sampling_laws(self, logits: jax.Array, filters: Filters) -> jax.Array:
        """The laws [R, V] of rows of logits."""
        return sampling_law.laws(logits, filters)


class FusedBodies(ReferenceBodies):
    """One or two launches an operation; see the operations' folders for their pictures."""

    def __init__(self, config: ModelConfig, numerics: Numerics, rows: int):
        # Triton is an extra: only this body needs it.
        from pallas_kernels import device_barrier
        from pallas_kernels.attention import kernels as attention_kernels
        from pallas_kernels.attention_input import fused as input_launches
        from pallas_kernels.attention_output import fused as output_launches
        from pallas_kernels.dense import fused as dense_launches
        from pallas_kernels.engram import fused as engram_launches
        from pallas_kernels.experts import early_fused as early_launches
        from pallas_kernels.experts import fused as expert_launches
        from pallas_kernels.experts import tiered as tiered_launches
        from pallas_kernels.head import fused as head_launches
        from pallas_kernels.hyper_connections import fused as boundary_launches
        from pallas_kernels.index_selection import fused as index_launches
        from pallas_kernels.key_rows import fused as row_launches
        from pallas_kernels.markov_chain import fused as chain_launches
        from pallas_kernels.router import fused as router_launches
        from pallas_kernels.sampling_law import fused as law_launches

        super().__init__(config, numerics, rows)
        self._attention, self._dense, self._experts = attention_kernels, dense_launches, expert_launches
        self._head, self._boundaries, self._index = head_launches, boundary_launches, index_launches
        self._rows, self._router, self._chain = row_launches, router_launches, chain_launches
        self._engram, self._laws = engram_launches, law_launches
        self._tiered, self._early = tiered_launches, early_launches
        self._attention_input, self._attention_output = input_launches, output_launches
        lines = (
            attention_kernels.counter_lines(rows, specs.attention_spec(config, numerics)),
            boundary_launches.COUNTER_LINES,
            input_launches.COUNTER_LINES,
            router_launches.COUNTER_LINES,
            row_launches.COUNTER_LINES,
            output_launches.counter_lines(config.o_groups * config.o_lora_rank, self.round_block),
            chain_launches.COUNTER_LINES,
            law_launches.COUNTER_LINES,
        )
        self.counters = device_barrier.counters(max(lines))

    def boundary(self, spec, source, norm, projection, coefficients, output, **options):
        made, self.counters = self._boundaries.boundary(
            spec, source, norm, projection, self.counters, coefficients, output, **options
        )
        return made

    def boundary_and_products(
        self, spec, source, norm, projection, matrix, weight, coefficients, output, **options
    ):
        made, low, exact, self.counters = self._attention_input.boundary_and_products(
            spec, source, norm, projection, matrix, self.counters, weight, coefficients, output,
            scale_block=self.block, **options,
        )  # fmt: skip
        return made, low, exact

    def boundary_and_route(
        self, spec, router, streams, norm, projection, gate, count, coefficients, output, tokens
    ):
        made, routes, ids, self.counters = self._router.boundary_and_route(
            spec,
            router,
            streams,
            norm,
            projection,
            gate,
            count,
            self.counters,
            coefficients,
            output,
            tokens,
        )
        return made, routes, ids

    def product(self, x, matrix):
        return self._dense.product(x, matrix, scale_block=self.block)

    def project_output(self, heads, first, second, groups):
        made, self.counters = self._attention_output.project(
            heads, first, second, self.counters, groups=groups, scale_block=self.block,
            round_block=self.round_block, dtype=self.dtype,
        )  # fmt: skip
        return made

    def write(self, rows, caches, length, count, spec):
        return self._rows.write(rows, caches, length, count, spec)[0]

    def write_and_query(
        self, rows, caches, length, count, spec, matrix, pool=None, compressor=None, index=None
    ):
        caches, queries, self.counters = self._rows.write_and_query(
            rows, caches, length, count, spec, matrix, self.counters, pool, compressor, index,
            scale_block=self.block,
        )  # fmt: skip
        return caches, queries

    def block_rows_and_query(self, rows, spec, matrix):
        made, queries, self.counters = self._rows.block_rows_and_query(
            rows, spec, matrix, self.counters, scale_block=self.block
        )
        return made, queries

    def choose(self, q, weights, table, keys, length, count, spec, candidates):
        return self._index.choose(q, weights, table, keys, length, count, spec, candidates)

    def attend(self, q, table, sink, ring, length, count, far, spec):
        output, self.counters = self._attention.attend(
            q, table, sink, ring, length, count, far, self.counters, spec
        )
        return output

    def experts(self, x, routed, shared, routes, chosen):
        options = dict(scale_block=self.block, dtype=self.dtype)
        hidden = self._experts.gate_up(
            x, routed, shared, routes, limit=self.limit, rounded=bool(self.round_block), **options
        )
        return self._experts.down(
            hidden, routed, shared, routes, chosen=chosen, round_block=self.round_block, **options
        )

    def tiered_experts(self, x, routed, shared, routes, chosen, layer, table, kept):
        options = dict(scale_block=self.block, dtype=self.dtype)
        places, kept = self._tiered.place(jnp.int32(layer), table, routes, kept)
        hidden, records = self._tiered.gate_up(
            x, routed, shared, routes, places, kept.records[layer],
            limit=self.limit, rounded=bool(self.round_block), **options,
        )  # fmt: skip
        partial, records = self._tiered.down(
            hidden, routed, shared, routes, places, records,
            chosen=chosen, round_block=self.round_block, **options,
        )  # fmt: skip
        return partial, kept.with_records(layer, records)

    def fetch_early(self, named, table, cold, kept):
        return self._fetched(self._early, named, table, cold, kept)

    def look_up(self, spec, memory, ring, start, rows):
        return self._engram.lookup(spec, memory, ring, start, rows)

    def remember(self, spec, streams, partials, q_weight, k_weight, coefficients, output):
        return self._engram.merge(spec, streams, partials, q_weight, k_weight, coefficients, output)

    def chain(self, spec, base, anchor, embed, head, count, draw):
        ids, by, self.counters = self._chain.chain(
            spec, base, anchor, embed, head, count, self.counters, draw
        )
        return ids, by

    def sampling_laws(self, logits, filters):
        made, self.counters = self._laws.laws(logits, filters, self.counters)
        return made

    def logits(self, x, head):
        return self._head.logits_argmax(x, head, logits=True)[2]
