"""The architecture of one checkpoint, read from a published-style `config.json`.

Knows: both families (`deepseek_v4`, `deepseek_v41`), and which features each family has. Every other room asks this
dataclass for a feature; none asks for the family. Does not know: how the file spells it (config_reader), devices,
number types of the computation, or where weights come from.

Sources: the published configuration values; DeepSeek inference/model.py for what they mean.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from v4flash.errors import CheckpointError

V4, V41 = "deepseek_v4", "deepseek_v41"
FAMILIES = (V4, V41)
OVERLAPPED_RATIO = 4  # V4 entries that also pool the previous group, and are chosen by an indexer
ALLOWED_RATIOS = {V4: (0, 4, 128), V41: (0, 1, 2)}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies of one kind of layer; `factor` 1 means plain tables, otherwise YaRN (model card)."""

    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What distinguishes one layer from its neighbours.

    Attributes:
      ratio: tokens per compressed entry of the cache it reads; 0 means the sliding window only.
      kv_source: index of the layer whose compressed entries it reads (itself if it owns a compressor).
      index_source: index of the layer whose selection it uses; None means it reads every visible entry.
      candidate: 'source' scores the candidate blocks, 'member' is restricted to them, None is neither.
      hash_routed: experts come from a table over token ids instead of scores.
      engram: an n-gram memory is added to the streams at the layer's entry.
    """

    index: int
    ratio: int = 0
    kv_source: int | None = None
    index_source: int | None = None
    candidate: str | None = None
    hash_routed: bool = False
    engram: bool = False

    @property
    def owns_entries(self) -> bool:
        return self.kv_source == self.index

    @property
    def owns_indexer(self) -> bool:
        return self.index_source == self.index


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """The n-gram memory of V4.1: table sizes and the hashing constants' parameters."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Table rows read per token and layer."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The DSpark drafter: `stages` layers over a block of `block_size` rows."""

    stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture. Field names are the published ones wherever those exist."""

    family: str
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope: RopeConfig
    compress_rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    weight_block_size: int
    expert_dtype: str
    bos_token_id: int
    eos_token_id: int
    draft: DraftConfig | None = None
    preview_mtp_stages: int = 0
    engram: EngramConfig | None = None
    simulated_quantisation: bool = True

    # Features in which the families differ (model descriptions A and B.2 of the published code).
    @property
    def delayed_mixing(self) -> bool:
        """A sublayer collapses its streams with the weights its predecessor computed; no final `hc_head`."""
        return self.family == V41

    @property
    def normalise_query_heads(self) -> bool:
        return self.family == V4

    @property
    def latent_index_keys(self) -> bool:
        """Index keys are projected from the compressed latent instead of having a compressor of their own."""
        return self.family == V41

    @property
    def hadamard_index(self) -> bool:
        return self.family == V4

    @property
    def compressor_position_bias(self) -> bool:
        return self.family == V4

    @property
    def fp4_entries(self) -> bool:
        """Compressed entries are rounded to FP4 in groups of 16 instead of FP8 in blocks of 64."""
        return self.family == V41

    @property
    def kv_rounded_dims(self) -> int:
        """How many leading dims of a window row the KV rounding covers."""
        return self.head_dim if self.family == V41 else self.head_dim - self.qk_rope_head_dim

    @property
    def kv_round_block(self) -> int:
        return 32 if self.family == V41 else 64

    @property
    def router_sum_eps(self) -> float:
        return 1e-20 if self.family == V41 else 0.0

    @property
    def vision_bias(self) -> bool:
        """Routers carry a second selection bias for image tokens, unused for text."""
        return self.family == V41

    @property
    def taps_are_inputs(self) -> bool:
        """The drafter taps the streams entering the target layers (V4.1) rather than leaving them (V4)."""
        return self.family == V41

    @property
    def kv_source_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.owns_entries)

    @property
    def hc_width(self) -> int:
        """Rows of a hyper-connection projection: pre, post and the stream-mixing matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    def draft_layer(self, stage: int) -> LayerConfig:
        """A drafter stage is an ordinary score-routed, window-only layer."""
        return LayerConfig(index=self.num_hidden_layers + stage)

    def validate(self) -> "ModelConfig":
        """Checks relations between fields; raises CheckpointError naming field, found and allowed."""
        for name, block in (("head_dim", 2), ("qk_rope_head_dim", 2)):
            if getattr(self, name) % block:
                refuse(name, getattr(self, name), "an even number")
        if self.qk_rope_head_dim > self.head_dim:
            refuse("qk_rope_head_dim", self.qk_rope_head_dim, f"at most head_dim ({self.head_dim})")
        if self.num_attention_heads % self.o_groups:
            refuse(
                "o_groups", self.o_groups, f"a divisor of num_attention_heads ({self.num_attention_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            refuse(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most n_routed_experts ({self.n_routed_experts})",
            )
        if self.expert_dtype not in ("fp4", "fp8"):
            refuse("expert_dtype", self.expert_dtype, "fp4 or fp8")
        if self.kv_rounded_dims % self.kv_round_block:
            refuse("head_dim", self.head_dim, f"{self.kv_round_block}-multiples in its rounded part")
        if self.draft:
            bad = [i for i in self.draft.target_layer_ids if not 0 <= i < self.num_hidden_layers]
            if bad:
                refuse("dspark_target_layer_ids", bad, f"layers 0 to {self.num_hidden_layers - 1}")
            if not 0 <= self.draft.noise_token_id < self.vocab_size:
                refuse("dspark_noise_token_id", self.draft.noise_token_id, f"ids 0 to {self.vocab_size - 1}")
        return self

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads a `config.json` (or a checkpoint folder holding one)."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            where = path.parent if path.name == "config.json" else path
            raise CheckpointError(
                f"no config.json at {where}: expected a checkpoint folder or its configuration file"
            ) from None
        except (ValueError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}); copy this file again") from None
        if not isinstance(raw, Mapping):
            raise CheckpointError(
                f"{path} holds a {type(raw).__name__}, expected a JSON object with model_type"
            )
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Builds the configuration from the JSON object, in the old or the new spelling."""
        # The reader builds this class, so it imports this file.
        from v4flash.config_reader import ConfigReader

        return ConfigReader(raw).read()


def refuse(field: str, found: Any, allowed: str, layer: int | None = None) -> None:
    """Raises the CheckpointError of a wrong value: field, layer, found, allowed."""
    where = f"config.json, layer {layer}: " if layer is not None else "config.json: "
    raise CheckpointError(f"{where}{field} is {found!r}, allowed: {allowed}")
