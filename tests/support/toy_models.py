"""Small random models of both families, with every mechanism switched on, for fast tests.

The weights are seeded noise; norms, sinks, biases and hyper-connection tables are noise too, so that no term can
be left out unnoticed.
"""

import dataclasses
import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.config import ModelConfig
from v4flash.engine.visible_state import visible_state
from v4flash.model.drafter import Model
from v4flash.model.engram import table_primes
from v4flash.model.numerics import Numerics
from v4flash.state import DecodeState

_YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
_COMMON = dict(
    vocab_size=96, hidden_size=64, moe_intermediate_size=64, num_attention_heads=4, num_key_value_heads=1,
    q_lora_rank=32, o_lora_rank=32, o_groups=2, hidden_act="silu", swiglu_limit=10.0,
    max_position_embeddings=1 << 20, rope_theta=10000, compress_rope_theta=160000, rope_scaling=_YARN,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, scoring_func="sqrtsoftplus",
    topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.5, sliding_window=16, index_n_heads=8,
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, bos_token_id=0, eos_token_id=1,
    dspark_block_size=5, dspark_noise_token_id=95, dspark_markov_rank=16,
)  # fmt: skip
V4_TOY = _COMMON | dict(
    model_type="deepseek_v4", num_hidden_layers=4, compress_ratios=[0, 4, 128, 4, 0, 0], num_hash_layers=1,
    head_dim=96, qk_rope_head_dim=32, index_head_dim=32, index_topk=6, rms_norm_eps=1e-6,
    dspark_target_layer_ids=[1, 2, 3], expert_dtype="fp4",
    quantization_config={"activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
)  # fmt: skip
V41_TOY = _COMMON | dict(
    model_type="deepseek_v41", num_hidden_layers=6, compress_ratios=[0, 2, 2, 1, 1, 1, 0, 0],
    kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 5], candidate_source_layer_id=3,
    candidate_topk_blocks=6, candidate_block_size=2, head_dim=64, qk_rope_head_dim=32, index_head_dim=32,
    index_topk=6, rms_norm_eps=1e-20, engram_layer_ids=[1, 4], engram_max_ngram_size=4, engram_vocab_size=50,
    engram_n_heads=2, engram_head_dim=32, engram_pad_token_id=2, engram_compressed_vocab_size=80,
    dspark_target_layer_ids=[3, 4, 5], dspark_n_routed_experts=4, dspark_num_experts_per_tok=2,
    quantization_config={
        "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"
    },
)  # fmt: skip
# One layer and one drafter stage: what a step decides does not depend on depth, and this compiles fast.
MINI_TOY = V4_TOY | dict(
    num_hidden_layers=1, compress_ratios=[0, 0], num_hash_layers=0, dspark_target_layer_ids=[0], hc_sinkhorn_iters=2
)  # fmt: skip
FAMILIES = ("v4", "v41")


def toy_json(family: str) -> dict:
    """The published-style configuration of a toy model: of a family, or 'mini'."""
    raw = dict({"v4": V4_TOY, "v41": V41_TOY, "mini": MINI_TOY}[family])
    return with_table_sizes(raw)


def with_table_sizes(raw: dict) -> dict:
    """The configuration with the sizes that its n-gram tables must have, if it has any."""
    if not raw.get("engram_layer_ids"):
        return raw
    raw = raw | {"engram_num_embeddings": [1] * len(raw["engram_layer_ids"])}
    engram = dataclasses.replace(ModelConfig.from_dict(raw).engram)
    return raw | {"engram_num_embeddings": [sum(map(sum, sizes)) for sizes in table_primes(engram).values()]}


@dataclasses.dataclass(frozen=True)
class Toy:
    """A random model: configuration, structure and weights."""

    config: ModelConfig
    numerics: Numerics
    graphdef: nnx.GraphDef
    params: nnx.State

    @property
    def model(self) -> Model:
        return nnx.merge(self.graphdef, self.params)

    def state(self, context: int, max_rows: int) -> DecodeState:
        return DecodeState.create(self.config, context, max_rows, self.numerics.dtype)


@functools.cache
def toy(family: str, quantise: bool = False) -> Toy:
    """The toy model of a family with decoded float32 weights."""
    return random_toy(ModelConfig.from_dict(toy_json(family)), quantise)


def random_toy(config: ModelConfig, quantise: bool) -> Toy:
    """A toy model of any configuration with decoded float32 weights."""
    numerics = Numerics(quantise=quantise, packed=False)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Model(config, numerics)))
    random = np.random.default_rng(7)
    chosen = [
        (path, variable.replace(jnp.asarray(_noise(path, variable.get_value(), config, random))))
        for path, variable in nnx.to_flat_state(abstract)
    ]
    return Toy(config, numerics, graphdef, nnx.from_flat_state(chosen))


def _noise(
    path: tuple, shape: jax.ShapeDtypeStruct, config: ModelConfig, random: np.random.Generator
) -> np.ndarray:
    name = path[-1]
    if name == "token_map":
        ids = np.arange(config.vocab_size)
        return np.where(ids < 80, ids, 7 * ids % 80).astype(np.int32)
    if name == "tid2eid":
        table = [random.permutation(config.n_routed_experts)[: shape.shape[1]] for _ in range(shape.shape[0])]
        return np.asarray(table, np.int32)
    values = random.normal(size=shape.shape)
    if len(shape.shape) == 1 or "norm" in path[-2]:
        values = (1.0 if path[-2].endswith("norm") or name == "scale" else 0.0) + 0.3 * values
    elif name in ("q_weight", "k_weight"):
        values = 1 + 0.3 * values
    elif name not in ("embed", "ape"):
        values = 1.7 * values * shape.shape[-1] ** -0.5
    return values.astype(shape.dtype)


def assert_same_state(
    config: ModelConfig, found: DecodeState, expected: DecodeState, tolerance: float
) -> None:
    """Compares all visible parts; a tolerance of 0 asks for equal bits."""
    found, expected = visible_state(config, found), visible_state(config, expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)
