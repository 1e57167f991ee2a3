"""Where the weights of published tensors lie in a packed layer, for whoever looks for a bad one.

Knows: which part of a joined matrix or of an arena came from which parameter of the modules. Does not know: what is
done with them. FP4 weights are left out: no bits of theirs mean NaN or infinity.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import PackedMatrix
from v4flash.config import ModelConfig
from v4flash.model.fused.layer import TILE
from v4flash.model.fused.packing import PackedLayer, PackedModel

Named = tuple[tuple[str | int, ...], jax.Array]
# Parts of the arenas `floats` and `plain` whose name alone does not say which parameter they are.
_PLACES = {
    "attn_norm": ("attn_norm", "weight"),
    "ffn_norm": ("ffn_norm", "weight"),
    "q_norm": ("attn", "q_norm", "weight"),
    "kv_norm": ("attn", "kv_norm", "weight"),
    "attn_sink": ("attn", "attn_sink"),
    "gate": ("ffn", "gate", "weight"),
    "gate.bias": ("ffn", "gate", "bias"),
    "compressor.value": ("attn", "compressor", "wkv", "weight"),
    "compressor.gate": ("attn", "compressor", "wgate", "weight"),
    "compressor.bias": ("attn", "compressor", "ape"),
    "compressor.norm": ("attn", "compressor", "norm", "weight"),
    "index.value": ("attn", "indexer", "compressor", "wkv", "weight"),
    "index.gate": ("attn", "indexer", "compressor", "wgate", "weight"),
    "index.bias": ("attn", "indexer", "compressor", "ape"),
    "index.norm": ("attn", "indexer", "compressor", "norm", "weight"),
    "index_weights": ("attn", "indexer", "weights_proj", "weight"),
    "index_projection": ("attn", "indexer", "wk", "weight"),
}
_LATENT_PLACES = {"index.norm": ("attn", "indexer", "k_norm", "weight")}


def backbone_tensors(config: ModelConfig, packed: PackedModel) -> Iterator[Named]:
    """(path in the module tree, values) of the backbone's weights; FP8 values come in any order and shape."""
    root = ("backbone",)
    yield (*root, "embed"), packed.embed
    yield (*root, "head"), packed.head
    yield (*root, "norm", "weight"), packed.floats["norm"]
    for name in _hyper_names(packed.floats):
        yield (*root, *name.split(".")), packed.floats[name]
    for layer, pack in zip(config.layers, packed.layers, strict=True):
        for path, values in _layer_tensors(config, pack):
            yield (*root, "layers", layer.index, *path), values
        if layer.index in packed.engrams:
            memory, place = packed.engrams[layer.index], (*root, "layers", layer.index, "engram")
            yield (*place, "embed", "weight"), memory.table
            yield (*place, "wkv", "weight"), _payload(memory.wkv)
            for name in ("q_weight", "k_weight"):
                yield (*place, name), memory.weights[name]


def _layer_tensors(config: ModelConfig, pack: PackedLayer) -> Iterator[Named]:
    places = _PLACES | (_LATENT_PLACES if "index_projection" in pack.plain else {})
    for arena in (pack.floats, pack.plain):
        for name, _, _ in arena.layout:
            if name in places:
                yield places[name], arena[name]
    for name in _hyper_names(pack.floats):
        yield tuple(name.split(".")), pack.floats[name]
    first = 0
    for name, width in pack.exact_columns:
        yield places[name], pack.plain["exact"][first : first + width]
        first += width
    rank, heads = config.q_lora_rank // TILE, -(-config.num_attention_heads * config.head_dim // TILE)
    words = {name: _bytes(pack, name) for name in ("projections", "queries", "wo_a", "wo_b")}
    yield ("attn", "wq_a", "weight"), words["projections"][:rank]
    yield ("attn", "wkv", "weight"), words["projections"][rank:]
    yield ("attn", "wq_b", "weight"), words["queries"][:heads]
    if len(words["queries"]) > heads:
        yield ("attn", "indexer", "wq_b", "weight"), words["queries"][heads:]
    yield ("attn", "wo_a", "weight"), words["wo_a"]
    yield ("attn", "wo_b", "weight"), words["wo_b"]
    both = _bytes(pack, "shared.gate_up")  # a tile holds 16 rows of the gate, then 16 of the other
    yield ("ffn", "shared_experts", "w1", "weight"), both[:, :, :2]
    yield ("ffn", "shared_experts", "w3", "weight"), both[:, :, 2:]
    yield ("ffn", "shared_experts", "w2", "weight"), _bytes(pack, "shared.down")


def _bytes(pack: PackedLayer, name: str) -> jax.Array:
    return _payload(pack.matrix(name))


def _payload(matrix: PackedMatrix) -> jax.Array:
    """The E4M3 weights of a packed matrix [tiles, ...]."""
    return jax.lax.bitcast_convert_type(matrix.words, jnp.float8_e4m3fn)


def _hyper_names(arena) -> list[str]:
    return [name for name, _, _ in arena.layout if name.startswith("hc_")]
