"""A loaded model's weights in the form that the fused operations read.

Knows: which published matrices share an input and are joined, and which small arrays share an arena. Does not know: the
bits of a packed matrix (`pallas_kernels.tiles`), or how operations follow each other.

    projections   wq_a, wkv                            read the rounded input of attention
    exact         compressors, index weights           read the unrounded one
    queries       wq_b, the indexer's wq_b             read the query latent
"""

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from pallas_kernels.dense.packing import join_bf16, pack_fp8
from pallas_kernels.experts.packing import PackedExperts, pack_routed, pack_shared
from pallas_kernels.experts.tiers import TieredExperts
from pallas_kernels.tiles import PackedMatrix
from v4flash.config import LayerConfig, ModelConfig
from v4flash.model.backbone import Layer
from v4flash.model.drafter import DraftStage, Model
from v4flash.model.engram import Engram
from v4flash.model.fused.arena import Arena
from v4flash.model.fused.peer import HeldExperts
from v4flash.model.hyper_connections import HyperConnection, HyperHead
from v4flash.model.numerics import Linear
from v4flash.model.paired_experts import PeerExperts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """One layer.

    Attributes:
      words: int32, the dense matrices and the shared expert, `NAME.words` and `NAME.scales`.
      plain: bfloat16, the joined `exact` matrix, the router's `gate`, the `index_projection`.
      floats: float32, hyper-connections, norms, sinks, biases.
      experts: the routed experts: all on the device, in two memories, or those of one device of two.
      table: int32 [V, K] of hash routing, else None.
      exact_columns: (name, width) of the joined exact matrix' parts in order.
    """

    words: Arena
    plain: Arena
    floats: Arena
    experts: PackedExperts | TieredExperts | HeldExperts
    table: jax.Array | None
    exact_columns: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})

    def matrix(self, name: str) -> PackedMatrix:
        """A packed dense matrix."""
        return PackedMatrix(self.words[f"{name}.words"], self.words[f"{name}.scales"])

    @property
    def shared(self) -> PackedExperts:
        return PackedExperts(self.matrix("shared.gate_up"), self.matrix("shared.down"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedEngram:
    """The n-gram memory of one layer.

    Attributes:
      table: [rows, head_dim], E4M3 payload, or decoded values.
      scale: uint8 [rows, head_dim / 32] of a payload, else None.
      words: int32, the product: `wkv.words` and `wkv.scales`.
      weights: float32, `q_weight` and `k_weight` [S, D].
    """

    table: jax.Array
    scale: jax.Array | None
    words: Arena
    weights: Arena

    @property
    def wkv(self) -> PackedMatrix:
        return PackedMatrix(self.words["wkv.words"], self.words["wkv.scales"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedModel:
    """The whole model.

    Attributes:
      embed, head: bfloat16 [V, D].
      floats: the final norm and, where the model has one, the final hyper-connection.
      token_map: int32 [V] of the n-gram memory, else None.
      engrams: {layer: its n-gram memory}.
      layers, stages: backbone and drafter.
      tap_words: the projection of the drafter's taps; None without a drafter.
      draft_floats: its norm, the drafter's final norm and final hyper-connection, and the confidence weight.
      markov_embed, markov_head: bfloat16 [V, rank].
      placement: int32 [L, E, 2], (tier, slot) of the backbone's experts where they lie in two memories, else None.
    """

    embed: jax.Array
    head: jax.Array
    floats: Arena
    token_map: jax.Array | None
    engrams: dict[int, PackedEngram]
    layers: tuple[PackedLayer, ...]
    stages: tuple[PackedLayer, ...]
    tap_words: Arena | None = None
    draft_floats: Arena | None = None
    markov_embed: jax.Array | None = None
    markov_head: jax.Array | None = None
    placement: jax.Array | None = None


def _published(linear: Linear) -> tuple[jax.Array, jax.Array]:
    if linear.scale is None:
        raise ValueError("packing needs weights in their published payload, found decoded ones")
    return linear.weight[...], linear.scale[...]


def _named(name: str, matrix: PackedMatrix) -> dict[str, jax.Array]:
    return {f"{name}.words": matrix.words, f"{name}.scales": matrix.scales}


def _hyper(name: str, module: HyperConnection | HyperHead) -> dict[str, jax.Array]:
    return {
        f"{name}.{part}": value[...]
        for part, value in (("fn", module.fn), ("base", module.base), ("scale", module.scale))
    }


def pack_layer(config: ModelConfig, layer: LayerConfig, module: Layer) -> PackedLayer:
    """Packs a backbone layer or a drafter stage with payload weights."""
    attn, ffn, block = module.attn, module.ffn, config.weight_block_size
    name = f"layer {layer.index}"
    queries, exact = [_published(attn.wq_b)], {}
    floats = {
        **_hyper("hc_attn", module.hc_attn),
        **_hyper("hc_ffn", module.hc_ffn),
        "attn_norm": module.attn_norm.weight[...],
        "ffn_norm": module.ffn_norm.weight[...],
        "q_norm": attn.q_norm.weight[...],
        "kv_norm": attn.kv_norm.weight[...],
        "attn_sink": attn.attn_sink[...],
    }
    plain = {"gate": ffn.gate.weight[...]}
    compressors = {"compressor": attn.compressor, "index": attn.indexer and attn.indexer.compressor}
    for part, compressor in compressors.items():
        if compressor is None:
            continue
        exact[f"{part}.value"] = compressor.wkv.weight[...]
        if compressor.wgate is not None:
            exact[f"{part}.gate"] = compressor.wgate.weight[...]
        if compressor.ape is not None:
            floats[f"{part}.bias"] = compressor.ape[...]
        floats[f"{part}.norm"] = compressor.norm.weight[...]
    if attn.indexer is not None and attn.indexer.wq_b is not None:
        queries.append(_published(attn.indexer.wq_b))
        exact["index_weights"] = attn.indexer.weights_proj.weight[...]
    if attn.indexer is not None and attn.indexer.wk is not None:
        plain["index_projection"] = attn.indexer.wk.weight[...]
        floats["index.norm"] = attn.indexer.k_norm.weight[...]
    if exact:
        plain["exact"] = join_bf16(list(exact.values()))
    if ffn.gate.bias is not None:
        floats["gate.bias"] = ffn.gate.bias[...]
    shared = ffn.shared_experts
    own = pack_shared(
        *_published(shared.w1), *_published(shared.w3), *_published(shared.w2), block, f"{name} shared expert"
    )
    routed = ffn.experts.held if isinstance(ffn.experts, PeerExperts) else ffn.experts
    packed = pack_routed(
        *_published(routed.w1), *_published(routed.w3), *_published(routed.w2), f"{name} expert"
    )
    if isinstance(ffn.experts, PeerExperts):
        places = ffn.experts.table
        packed = HeldExperts(packed, jnp.stack([places.tier[...], places.slot[...]]))
    words = {
        **_named("projections", pack_fp8([_published(attn.wq_a), _published(attn.wkv)], block, name)),
        **_named("queries", pack_fp8(queries, block, name)),
        **_named("wo_a", pack_fp8([_published(attn.wo_a)], block, name)),
        **_named("wo_b", pack_fp8([_published(attn.wo_b)], block, name)),
        **_named("shared.gate_up", own.gate_up),
        **_named("shared.down", own.down),
    }
    table = ffn.gate.tid2eid
    return PackedLayer(
        Arena.pack(words, jnp.int32),
        Arena.pack(plain, jnp.bfloat16),
        Arena.pack(floats, jnp.float32),
        packed,
        None if table is None else table[...],
        tuple((part, weight.shape[0]) for part, weight in exact.items()),
    )


def pack_engram(config: ModelConfig, module: Engram) -> PackedEngram:
    """Packs the n-gram memory of one layer; its table is handed over as it is."""
    table = module.embed
    name = f"layer {module.layer} engram.wkv"
    wkv = pack_fp8([_published(module.wkv)], config.weight_block_size, name)
    return PackedEngram(
        table.weight[...],
        None if table.scale is None else table.scale[...],
        Arena.pack(_named("wkv", wkv), jnp.int32),
        Arena.pack({"q_weight": module.q_weight[...], "k_weight": module.k_weight[...]}, jnp.float32),
    )


def pack_model(model: Model, *, drain: bool = False) -> PackedModel:
    """Packs a model whose weights are in their published payload (`Numerics.packed`), on the device they lie on.

    With `drain` the model gives up its layers as they are packed, and is of no use afterwards: embedding, head and
    n-gram tables are handed over as they are, a packed layer is as large as the loaded one (padding aside), and no
    more than one layer exists twice. If nothing else holds the weights, the most memory in use is that of the loaded
    model plus about three times that of its largest layer, most of which is room for shuffling its experts' bits.

    Raises ValueError, naming the tensor, for a scale that packed tiles cannot hold.
    """
    config, backbone = model.config, model.backbone
    layers, stages = list(backbone.layers), list(model.drafter.stages) if model.drafter else []
    if drain:
        backbone.layers = nnx.List([])
        if model.drafter:
            model.drafter.stages = nnx.List([])
    floats = {"norm": backbone.norm.weight[...]}
    if backbone.hc_head is not None:
        floats |= _hyper("hc_head", backbone.hc_head)
    packed = PackedModel(
        embed=backbone.embed[...],
        head=backbone.head[...],
        floats=Arena.pack(floats, jnp.float32),
        token_map=None if backbone.token_map is None else backbone.token_map[...],
        engrams={
            module.layer.index: pack_engram(config, module.engram)
            for module in layers
            if module.engram is not None
        },
        layers=(),
        stages=(),
    )
    if stages:
        packed = _with_drafter(packed, config, stages)
    return dataclasses.replace(packed, layers=_emptied(config, layers), stages=_emptied(config, stages))


def _emptied(config: ModelConfig, modules: list[Layer]) -> tuple[PackedLayer, ...]:
    """Packs the modules one by one, taking each out of the list."""
    packed = []
    while modules:
        packed.append(pack_layer(config, modules[0].layer, modules[0]))
        if not isinstance(packed[-1].words.data, jax.core.Tracer):
            jax.block_until_ready(packed[-1])  # or work in flight would keep more layers alive
        del modules[0]
    return tuple(packed)


def _with_drafter(packed: PackedModel, config: ModelConfig, stages: list[DraftStage]) -> PackedModel:
    """With everything of the drafter but its stages."""
    first, last = stages[0], stages[-1]
    floats = {
        "main_norm": first.main_norm.weight[...],
        "norm": last.norm.weight[...],
        "confidence": last.confidence.weight[...],
    }
    if last.hc_head is not None:
        floats |= _hyper("hc_head", last.hc_head)
    taps = pack_fp8([_published(first.main_proj)], config.weight_block_size, "main_proj")
    return dataclasses.replace(
        packed,
        tap_words=Arena.pack(_named("taps", taps), jnp.int32),
        draft_floats=Arena.pack(floats, jnp.float32),
        markov_embed=last.markov_head.embed[...],
        markov_head=last.markov_head.head[...],
    )
