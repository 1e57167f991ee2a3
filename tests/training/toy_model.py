"""A model small enough to compile in seconds, and a corpus it can learn in a few steps."""

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.config import ModelConfig
from v4flash.training.batches import Streams
from v4flash.training.initialise import initial_weights
from v4flash.training.stored_weights import Skeleton

TOY = {
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 0],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "engram_layer_ids": [],
    "dspark_block_size": 3,
    "dspark_noise_token_id": 63,
    "dspark_target_layer_ids": [1],
    "dspark_markov_rank": 8,
    "expert_dtype": "fp4",
    "quantization_config": {"weight_block_size": [32, 32], "expert_dtype": "fp4"},
}


def skeleton() -> Skeleton:
    return Skeleton.create(ModelConfig.from_dict(TOY), jnp.float32)


def weights(of: Skeleton, seed: int = 0) -> dict[str, jax.Array]:
    return initial_weights(of, jax.random.key(seed))


def streams(longest: int) -> Streams:
    """Documents that count upwards in steps of 1, 2, 3 or 5 behind a begin mark, a class each."""
    parts = []
    for step in (1, 2, 3, 5):
        document = np.concatenate([[0], 2 + (step * np.arange(60)) % 60, [1]])
        parts.append(np.tile(document, 20))
    return Streams.of_arrays(parts, longest, begin_id=0)


def compiled(function, *arguments):
    """A jitted function compiled for its arguments without code optimisation, which takes half the time."""
    return function.lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": "0"})
