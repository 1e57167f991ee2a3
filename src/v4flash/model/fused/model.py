"""Backbone and drafter on packed weights; what `speculative/step.py` asks of a model.

Knows: how layers follow each other, taps, the n-gram memory between them, the drafter's block and its chain. Does not
know: operations inside a layer (layer.py). A pass has 8 rows, what the fused launches are made for.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.engram.reference import Memory
from pallas_kernels.experts import early
from pallas_kernels.experts.tiers import Kept
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections.reference import Output
from pallas_kernels.key_rows.reference import Caches, Rows
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.rows import Columns
from pallas_kernels.sampling_law.reference import Filters
from pallas_kernels.tiles import PackedMatrix
from v4flash.config import ModelConfig
from v4flash.model.backbone import TrunkOutput
from v4flash.model.drafter import Block, Drafting, Drafts, Drawing, drawn_chain
from v4flash.model.engram import multipliers, table_primes
from v4flash.model.fused import layer as layers
from v4flash.model.fused import specs
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.layer import Pass, Selection, projection
from v4flash.model.fused.packing import PackedModel
from v4flash.model.numerics import Numerics, rms_norm
from v4flash.state import DecodeState, ring_write

ROWS = 8


class FusedBackbone:
    """The target; offers `trunk` and `logits` as `backbone.Backbone` does.

    Attributes:
      kept: the cold experts on the device, None where none are cold; every pass puts what it made of them here.
    """

    def __init__(
        self, config: ModelConfig, numerics: Numerics, packed: PackedModel, bodies, kept: Kept | None = None
    ):
        self.config, self.numerics, self.packed, self.bodies = config, numerics, packed, bodies
        self.kept = kept

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Equal streams [R, S, D] of the tokens' embeddings."""
        return boundaries.embedded(self.packed.embed, tokens, specs.boundary_spec(self.config, self.numerics))

    def trunk(
        self, tokens: jax.Array, state: DecodeState, count: jax.Array, *, keep_streams: bool = False
    ) -> tuple[TrunkOutput, DecodeState]:
        """Runs tokens int32 [8] at positions state.length.. ; the first `count` are live.

        `keep_streams` also returns the streams behind every layer, which launches never form as such: for looking.
        """
        config, packed = self.config, self.packed
        spec = specs.boundary_spec(config, self.numerics)
        state = state.replace(tokens=ring_write(state.tokens, tokens, state.length, count))
        run = Pass.start(self.bodies, config, self.numerics, tokens, state.length, count)
        targets = config.draft.target_layer_ids if config.draft else ()
        # A tap behind a layer is the tap in front of the next.
        tapped = {index if config.taps_are_inputs else index + 1 for index in targets}
        source, output, selection = (packed.embed, tokens), None, Selection()
        coefficients = boundaries.first_coefficients(tokens.shape[0], spec) if spec.delayed else None
        guessing = self.kept is not None and self.kept.early is not None
        if guessing:
            with jax.named_scope("early"):
                named, self.kept = run.ops.guess(self.kept, tokens, state.length, count)
                cold = [pack.experts.cold for pack in packed.layers]
                self.kept = run.ops.fetch_early(named, packed.placement, cold, self.kept)
        means, routes, kept = {}, [], []
        for layer, pack in zip(config.layers, packed.layers, strict=True):
            with jax.named_scope(f"layer_{layer.index}"):
                if layer.index in packed.engrams:
                    source = self._remembered(run, layer.index, state, source, coefficients, output)
                    output = None
                with jax.named_scope("attention"):
                    tap = layer.index in tapped
                    made, projected = layers.enter_attention(run, pack, source, coefficients, output, tap=tap)
                    if tap:
                        means[layer.index] = made.tap
                    parts, state, selection = layers.attend(run, layer, pack, projected, state, selection)
                with jax.named_scope("ffn"):
                    cold = None
                    if packed.placement is not None:
                        cold = layers.ColdExperts(layer.index, packed.placement, self.kept)
                    source, coefficients, output, ids, self.kept = layers.feed_forward(
                        run, pack, made, parts, config.num_experts_per_tok, config.n_routed_experts, cold
                    )
                routes.append(ids)
            if keep_streams:
                kept.append(self._streams(source, coefficients, output))
        with jax.named_scope("head"):
            last, tap = config.num_hidden_layers, config.num_hidden_layers in tapped
            head = projection(packed.floats, "hc_head") if "hc_head.fn" in packed.floats else None
            made = run.ops.boundary(
                spec, source, packed.floats["norm"], head, coefficients, output, last=True, tap=tap
            )
            if tap:
                means[last] = made.tap
        if guessing:
            seen = early.noted(self.kept.early.seen, tokens, routes, state.length, count)
            self.kept = self.kept._replace(early=self.kept.early._replace(seen=seen))
        joined = jnp.concatenate([means[i] for i in sorted(tapped)], axis=-1) if targets else None
        return TrunkOutput(made.hidden, joined, routes, kept, []), state

    def logits(self, hidden: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """float32 logits [R, V] of hidden rows [R, D]; `weight` is that of the norm, by default the final one."""
        with jax.named_scope("head"):
            weight = self.packed.floats["norm"] if weight is None else weight
            rows = hidden.shape[0]
            x = rms_norm(hidden, weight, self.config.rms_norm_eps)
            ops = self.bodies(self.config, self.numerics, ROWS)
            return ops.logits(jnp.pad(x, ((0, -rows % ROWS), (0, 0))), self.packed.head)[:rows]

    def _streams(self, source, coefficients, output) -> jax.Array:
        """Streams [R, S, D] with the output of the sublayer before spread into them."""
        spec = specs.boundary_spec(self.config, self.numerics)
        streams = boundaries.embedded(*source, spec) if isinstance(source, tuple) else source
        if output is None:
            return streams
        return boundaries.spread(coefficients, boundaries.output_rows(output, spec.type), streams)

    def _remembered(
        self, run: Pass, index: int, state: DecodeState, source, coefficients, output: Output | None
    ) -> jax.Array:
        """Streams [R, S, D] in front of a layer, with the output before and the memory of their n-grams added."""
        packed = self.packed.engrams[index]
        spec = specs.engram_spec(self.config, self.numerics)
        if isinstance(source, tuple):
            source = boundaries.embedded(*source, specs.boundary_spec(self.config, self.numerics))
        with jax.named_scope("engram"):
            memory = engram_memory(self.config, index, packed.table, packed.scale, self.packed.token_map)
            rows = run.ops.look_up(spec, memory, state.tokens, run.length, run.tokens.shape[0])
            return run.ops.remember(
                spec, source, run.ops.product(rows, packed.wkv), packed.weights["q_weight"],
                packed.weights["k_weight"], coefficients, output,
            )  # fmt: skip


def engram_memory(
    config: ModelConfig, layer: int, table: jax.Array, scale: jax.Array | None, token_map: jax.Array
) -> Memory:
    """A layer's table with the constants of its hashes, which follow from the configuration."""
    factors = multipliers(config.engram, layer)
    primes = [prime for sizes in table_primes(config.engram)[layer] for prime in sizes]
    if scale is not None:
        table = jax.lax.bitcast_convert_type(table, jnp.uint8)
    return Memory(
        table,
        scale,
        token_map,
        jnp.asarray([[factor & 0xFFFFFFFF, factor >> 32] for factor in factors], jnp.uint32),
        jnp.asarray(primes, jnp.int32),
        jnp.asarray(np.cumsum([0, *primes[:-1]]), jnp.int32),
    )


class FusedDrafter:
    """The drafter; offers `commit`, `block` and `chain` as `drafter.Drafter` does."""

    def __init__(self, config: ModelConfig, numerics: Numerics, packed: PackedModel, bodies):
        self.config, self.numerics, self.packed, self.bodies = config, numerics, packed, bodies

    def commit(self, state: DecodeState, taps: jax.Array, start: jax.Array, count: jax.Array) -> DecodeState:
        """Writes context rows of the first `count` (verified) rows, standing at positions start.. ."""
        config, packed = self.config, self.packed
        tokens = jnp.zeros((taps.shape[0],), jnp.int32)
        run = Pass.start(self.bodies, config, self.numerics, tokens, start, count)
        matrix = PackedMatrix(packed.tap_words["taps.words"], packed.tap_words["taps.scales"])
        product = Columns(run.ops.product(run.rounded(taps), matrix), 0, config.hidden_size)
        main = rms_norm(
            product.summed().astype(self.numerics.dtype),
            packed.draft_floats["main_norm"],
            config.rms_norm_eps,
        )
        main, rings = run.rounded(main), []
        for pack, ring in zip(packed.stages, state.draft_windows, strict=True):
            kv = Columns(run.ops.product(main, layers.key_matrix(pack, config)), 0, config.head_dim)
            rows = Rows(kv, pack.floats["kv_norm"], run.turns.plain)
            spec = specs.row_spec(config, self.numerics)
            rings.append(run.ops.write(rows, Caches(ring), start, count, spec).window)
        return state.replace(draft_windows=tuple(rings))

    def block(
        self, backbone: FusedBackbone, state: DecodeState, anchor: jax.Array, rows: int, live: jax.Array
    ) -> Block:
        """Runs the block [anchor, noise, ...] behind the committed context; arguments as in `Drafter.block`."""
        config, packed, draft = self.config, self.packed, self.config.draft
        spec = specs.boundary_spec(config, self.numerics)
        tokens = jnp.full((ROWS,), draft.noise_token_id, jnp.int32).at[0].set(anchor)
        run = Pass.start(self.bodies, config, self.numerics, tokens, state.length, live)
        source, output, routes = (packed.embed, tokens), None, []
        coefficients = boundaries.first_coefficients(ROWS, spec) if spec.delayed else None
        for number, (pack, ring) in enumerate(zip(packed.stages, state.draft_windows, strict=True)):
            with jax.named_scope(f"draft_stage_{number}"):
                with jax.named_scope("attention"):
                    made, projected = layers.enter_attention(run, pack, source, coefficients, output)
                    parts = layers.attend_block(run, pack, projected, ring)
                with jax.named_scope("ffn"):
                    source, coefficients, output, ids, _ = layers.feed_forward(
                        run, pack, made, parts, draft.num_experts_per_tok, draft.n_routed_experts
                    )
                routes.append(ids[:rows])
        floats = packed.draft_floats
        head = projection(floats, "hc_head") if "hc_head.fn" in floats else None
        made = run.ops.boundary(spec, source, floats["norm"], head, coefficients, output, last=True)
        with jax.named_scope("head"):
            logits = run.ops.logits(made.x, packed.head)
        return Block(made.hidden[:rows], logits[:rows], [], routes)

    def chain(
        self, block: Block, anchor: jax.Array, draw: Callable, wanted: Callable | None = None
    ) -> tuple[Drafts, Any]:
        """Draws the tokens one after another by any rule, as `Drafter.chain` does; a step has better ways."""

        def bias(embedded: jax.Array) -> jax.Array:
            return self.numerics.exact_product("r,vr->v", embedded, self.packed.markov_head)

        return drawn_chain(block, anchor, draw, wanted, self._embedded, bias, self._confidence)

    def greedy_chain(self, block: Block, anchor: jax.Array, count: jax.Array) -> Drafts:
        """The likeliest tokens, as `Drafter.greedy_chain`; rows behind `count` hold id 0."""
        return Drafts(*self._chain(block, anchor, count, None))

    def drawn_chains(self, block: Block, anchor: jax.Array, drawing: Drawing) -> list[Callable[[], Drafting]]:
        """What draws the tokens: one launch for all kinds of options, which draws all that are wanted."""

        def drawn() -> Drafting:
            draw = Draw(Filters.of(drawing.sampling), drawing.uniforms())
            return Drafting(*self._chain(block, anchor, drawing.count, draw))

        return [drawn]

    def _chain(self, block: Block, anchor: jax.Array, count: jax.Array, draw: Draw | None) -> tuple:
        """Ids, what they were chosen by, confidences and count, as in Drafts and Drafting."""
        packed, spec = self.packed, specs.chain_spec(self.config)
        ops = self.bodies(self.config, self.numerics, ROWS)
        with jax.named_scope("markov_chain"):
            ids, by = ops.chain(
                spec, block.base_logits, anchor, packed.markov_embed, packed.markov_head, count, draw
            )
            before = self._embedded(jnp.concatenate([anchor[None], ids[:-1]]))
            confidence = self._confidence(block.hidden, before)
            return ids, by, confidence, jnp.clip(count, 0, ids.shape[0])

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        """Markov embeddings float32 [..., rank] of tokens [...]."""
        return self.packed.markov_embed[tokens].astype(jnp.float32)

    def _confidence(self, hidden: jax.Array, before: jax.Array) -> jax.Array:
        """Log-odds [...] that drafts are accepted, from their rows [..., D] and embeddings of the tokens before."""
        joined = jnp.concatenate([hidden.astype(jnp.float32), before], axis=-1)
        weight = self.packed.draft_floats["confidence"]
        return self.numerics.exact_product("...k,nk->...n", joined, weight)[..., 0]


class FusedModel:
    """Target and drafter over one set of packed weights.

    Args: packed, from `packing.pack_model`; bodies, FusedBodies or ReferenceBodies; kept, the cold experts on the
    device where some lie in host memory (`two_memories`), which passes change.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        packed: PackedModel,
        bodies: type[ReferenceBodies] = FusedBodies,
        kept: Kept | None = None,
    ):
        self.config, self.numerics = config, numerics
        self.backbone = FusedBackbone(config, numerics, packed, bodies, kept)
        self.drafter = FusedDrafter(config, numerics, packed, bodies) if packed.stages else None
        self.bodies = bodies

    def sampling_laws(self, logits: jax.Array, sampling: Any) -> jax.Array:
        """The laws [R, V] that sampling options above temperature 0 make of up to ROWS rows of logits."""
        return self.bodies(self.config, self.numerics, ROWS).sampling_laws(logits, Filters.of(sampling))
