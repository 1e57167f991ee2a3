"""The constants that each fused operation needs, from a model's configuration.

Knows: which field of the configuration is which number of an operation. Does not know: weights or arrays.
"""

import jax.numpy as jnp

from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.engram.specs import EngramSpec
from pallas_kernels.hyper_connections.specs import BoundarySpec
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.key_rows.specs import FP4_GROUPS, FP8_BLOCKS, PoolSpec, RowSpec
from pallas_kernels.markov_chain.specs import ChainSpec
from pallas_kernels.router.specs import RouterSpec
from v4flash.config import OVERLAPPED_RATIO, LayerConfig, ModelConfig
from v4flash.model.numerics import Numerics


def _name(numerics: Numerics) -> str:
    return jnp.dtype(numerics.dtype).name


def boundary_spec(config: ModelConfig, numerics: Numerics) -> BoundarySpec:
    """Hyper-connections around every sublayer."""
    return BoundarySpec(
        width=config.hidden_size,
        streams=config.hc_mult,
        delayed=config.delayed_mixing,
        block=config.weight_block_size if numerics.quantise else 0,
        norm_eps=config.rms_norm_eps,
        mix_eps=config.hc_eps,
        iterations=config.hc_sinkhorn_iters,
        dtype=_name(numerics),
    )


def router_spec(config: ModelConfig, experts: int, chosen: int) -> RouterSpec:
    """The router of a layer with `experts` experts, `chosen` of them for a row."""
    return RouterSpec(
        config.hidden_size, experts, chosen, config.routed_scaling_factor, config.router_sum_eps
    )


def attention_spec(config: ModelConfig, numerics: Numerics) -> AttentionSpec:
    """The attention core of every layer."""
    return AttentionSpec(
        heads=config.num_attention_heads,
        width=config.head_dim,
        rope=config.qk_rope_head_dim,
        window=config.sliding_window,
        norm_eps=config.rms_norm_eps if config.normalise_query_heads else None,
        dtype=_name(numerics),
    )


def row_spec(config: ModelConfig, numerics: Numerics) -> RowSpec:
    """Key-value rows and query latents of every layer."""
    return RowSpec(
        width=config.head_dim,
        rope=config.qk_rope_head_dim,
        norm_eps=config.rms_norm_eps,
        rounded=config.kv_rounded_dims,
        block=config.kv_round_block,
        latent_block=config.weight_block_size,
        quantise=numerics.quantise,
        dtype=_name(numerics),
    )


def index_rope(config: ModelConfig) -> int:
    """Rotated columns of an index vector."""
    return min(config.qk_rope_head_dim, config.index_head_dim)


def has_index_keys(layer: LayerConfig, config: ModelConfig) -> bool:
    """Whether the layer writes index keys beside its entries."""
    return layer.owns_entries and (layer.owns_indexer or config.latent_index_keys)


def pool_spec(config: ModelConfig, layer: LayerConfig) -> PoolSpec:
    """Compressed entries of a layer that owns some."""
    keyed = has_index_keys(layer, config)
    return PoolSpec(
        ratio=layer.ratio,
        overlap=config.compressor_position_bias and layer.ratio == OVERLAPPED_RATIO,
        rounding=FP4_GROUPS if config.fp4_entries else FP8_BLOCKS,
        index_width=config.index_head_dim if keyed else 0,
        index_rope=index_rope(config) if keyed else 0,
        hadamard=config.hadamard_index,
    )


def index_spec(config: ModelConfig, layer: LayerConfig, numerics: Numerics, slots: int) -> IndexSpec:
    """The selection that an index source makes among `slots` entries."""
    return IndexSpec(
        heads=config.index_n_heads,
        width=config.index_head_dim,
        rope=index_rope(config),
        ratio=layer.ratio,
        topk=min(config.index_topk, slots),
        role=layer.candidate,
        block=config.candidate_block_size if layer.candidate else 8,
        kept=config.candidate_topk_blocks if layer.candidate else 0,
        hadamard=config.hadamard_index,
        quantise=numerics.quantise,
        dtype=_name(numerics),
    )


def engram_spec(config: ModelConfig, numerics: Numerics) -> EngramSpec:
    """The n-gram memory of any layer that has one."""
    engram = config.engram
    return EngramSpec(
        config.hidden_size, engram.max_ngram_size, engram.n_heads, engram.head_dim, engram.pad_token_id,
        config.weight_block_size if numerics.quantise else 0, config.hc_mult, config.rms_norm_eps,
        _name(numerics),
    )  # fmt: skip


def chain_spec(config: ModelConfig) -> ChainSpec:
    """The drafter's Markov chain."""
    return ChainSpec(config.vocab_size, config.draft.markov_rank)
