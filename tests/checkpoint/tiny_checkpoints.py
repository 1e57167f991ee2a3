"""Seeded checkpoints of a few kilobytes in the published layout, with every number type of the real ones."""

import json
from pathlib import Path

import flax.nnx as nnx
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from v4flash.checkpoint.export import save_published
from v4flash.checkpoint.inventory import abstract_model
from v4flash.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from v4flash.checkpoint.shards import INDEX_NAME, read_index
from v4flash.config import EngramConfig, ModelConfig
from v4flash.model.engram import table_primes
from v4flash.model.numerics import Numerics

_SCALE_BYTES = (118, 131)

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [1, 2],
    "dspark_markov_rank": 8,
}
_QUANTISATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def v4_config() -> dict:
    """A V4 configuration with a hash-routed layer, both kinds of compressor and two drafter stages."""
    return {
        **_COMMON,
        "model_type": "deepseek_v4",
        "head_dim": 96,
        "compress_ratios": [0, 4, 128, 0, 0],
        "num_hash_layers": 1,
        "expert_dtype": "fp4",
        "quantization_config": _QUANTISATION,
    }


def v41_config() -> dict:
    """A V4.1 configuration with an Engram layer, two entry sources and two drafter stages."""
    engram = {
        "layer_ids": [1],
        "max_ngram_size": 3,
        "vocab_size": 20,
        "n_heads": 2,
        "head_dim": 64,
        "pad_token_id": 2,
        "compressed_vocab_size": 40,
    }
    sizes = EngramConfig(**{**engram, "layer_ids": (1,)}, num_embeddings=())
    rows = [sum(sum(primes) for primes in table_primes(sizes)[layer]) for layer in sizes.layer_ids]
    text = {
        **_COMMON,
        "model_type": "deepseek_v41_text",
        "head_dim": 64,
        "compress_ratios": [0, 2, 1, 0, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "dspark_n_routed_experts": 2,
        "dspark_num_experts_per_tok": 1,
        "engram_num_embeddings": rows,
        **{f"engram_{name}": value for name, value in engram.items()},
    }
    quantisation = {**_QUANTISATION, "expert_dtype": "fp4"}
    return {"model_type": "deepseek_v41", "quantization_config": quantisation, "text_config": text}


CONFIGS = {"v4": v4_config, "v41": v41_config}


def random_params(raw_config: dict, seed: int = 0, *, packed: bool = True) -> nnx.State:
    """Weights of a configuration drawn from a seed; packed payloads cover all finite codes."""
    config, rng = ModelConfig.from_dict(raw_config), np.random.default_rng(seed)
    filled = []
    for path, variable in abstract_model(config, Numerics(packed=packed))[1]:
        value = variable.get_value()
        filled.append((path, variable.replace(jnp.asarray(_random_array(path, value, config, rng)))))
    return nnx.from_flat_state(filled)


def _random_array(path: tuple, value, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    shape = value.shape
    if path[-1] == "token_map":
        return (np.arange(shape[0]) % config.engram.compressed_vocab_size).astype(np.int32)
    if path[-1] == "tid2eid":
        return rng.integers(0, config.n_routed_experts, shape).astype(np.int32)
    if value.dtype == jnp.float8_e4m3fn:
        codes = rng.integers(0, 0x7F, shape) | (rng.integers(0, 2, shape) << 7)
        return codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    if value.dtype == jnp.uint8:
        low, high = _SCALE_BYTES if path[-1] == "scale" else (0, 256)
        return rng.integers(low, high, shape).astype(np.uint8)
    return rng.standard_normal(shape).astype(value.dtype)


def write_checkpoint(directory: Path, family: str, *, seed: int = 0, max_shard_bytes: int = 60_000) -> Path:
    """Writes a random checkpoint of several shards and returns its folder."""
    raw = CONFIGS[family]()
    save_published(directory, raw, random_params(raw, seed), max_shard_bytes=max_shard_bytes)
    return directory


def shard_names(directory: Path) -> list[str]:
    return sorted(set(read_index(directory / INDEX_NAME).values()))


def edit_tensors(directory: Path, edit) -> None:
    """Rewrites every shard with the {name: (dtype, array)} that `edit` leaves, and the index with them."""
    weight_map = {}
    for shard in shard_names(directory):
        file = SafetensorsFile(directory / shard)
        tensors = {name: (info.dtype, np.array(file.tensor(name))) for name, info in file.tensors.items()}
        edit(tensors)
        write_safetensors(directory / shard, tensors)
        weight_map.update(dict.fromkeys(tensors, shard))
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
