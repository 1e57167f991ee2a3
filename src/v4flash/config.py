"""The architecture of one checkpoint, read from a published-style `config.json`.

Knows: both families (`deepseek_v4`, `deepseek_v41`), both spellings of their configuration files, and which
features each family has. Every other room asks this dataclass for a feature; none asks for the family.
Does not know: devices, number types of the computation, or where weights come from.

Sources: the published configuration values; DeepSeek inference/model.py for what they mean.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from v4flash.errors import CheckpointError

V4, V41 = "deepseek_v4", "deepseek_v41"
FAMILIES = (V4, V41)
OVERLAPPED_RATIO = 4  # V4 entries that also pool the previous group, and are chosen by an indexer
ALLOWED_RATIOS = {V4: (0, 4, 128), V41: (0, 1, 2)}
_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


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
                _refuse(name, getattr(self, name), "an even number")
        if self.qk_rope_head_dim > self.head_dim:
            _refuse("qk_rope_head_dim", self.qk_rope_head_dim, f"at most head_dim ({self.head_dim})")
        if self.num_attention_heads % self.o_groups:
            _refuse(
                "o_groups", self.o_groups, f"a divisor of num_attention_heads ({self.num_attention_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            _refuse(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most n_routed_experts ({self.n_routed_experts})",
            )
        if self.expert_dtype not in ("fp4", "fp8"):
            _refuse("expert_dtype", self.expert_dtype, "fp4 or fp8")
        if self.kv_rounded_dims % self.kv_round_block:
            _refuse("head_dim", self.head_dim, f"{self.kv_round_block}-multiples in its rounded part")
        if self.draft:
            bad = [i for i in self.draft.target_layer_ids if not 0 <= i < self.num_hidden_layers]
            if bad:
                _refuse("dspark_target_layer_ids", bad, f"layers 0 to {self.num_hidden_layers - 1}")
            if not 0 <= self.draft.noise_token_id < self.vocab_size:
                _refuse("dspark_noise_token_id", self.draft.noise_token_id, f"ids 0 to {self.vocab_size - 1}")
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
        return _Reader(raw).read()


def _refuse(field: str, found: Any, allowed: str, layer: int | None = None) -> None:
    where = f"config.json, layer {layer}: " if layer is not None else "config.json: "
    raise CheckpointError(f"{where}{field} is {found!r}, allowed: {allowed}")


class _Reader:
    """Turns the published JSON into a ModelConfig, refusing what the code does not know."""

    def __init__(self, raw: Mapping[str, Any]):
        family = raw.get("model_type")
        family = {"deepseek_v41_text": V41}.get(family, family)
        if family not in FAMILIES:
            raise CheckpointError(f"model_type is {family!r}; v4flash runs {V4} and {V41}")
        self.family = family
        self.fields: dict[str, Any] = {**raw, **raw.get("text_config", {})}
        self.quant = self.fields.get("quantization_config") or {}
        self.n_layers = self.number("num_hidden_layers", int)

    def number(self, field: str, kind: type = int, default: Any = None, minimum: float = 0) -> Any:
        value = self.fields.get(field, default)
        if value is None:
            _refuse(field, None, "a number; the field is required")
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not whole):
            _refuse(field, value, "a whole number" if kind is int else "a number")
        if not math.isfinite(value) or value < minimum:
            _refuse(field, value, f"a number of at least {minimum}")
        return kind(value)

    def choice(self, field: str, allowed: tuple, default: Any) -> Any:
        value = self.fields.get(field, default)
        if value not in allowed:
            _refuse(field, value, " or ".join(map(str, allowed)))
        return value

    def read(self) -> ModelConfig:
        self.choice("hidden_act", ("silu",), "silu")
        self.choice("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
        self.choice("topk_method", ("noaux_tc",), "noaux_tc")
        self.choice("norm_topk_prob", (True,), True)
        self.choice("n_shared_experts", (1,), 1)
        self.choice("num_key_value_heads", (1,), 1)
        self.choice("attention_bias", (False,), False)
        self.choice("tie_word_embeddings", (False,), False)
        if self.fields.get("gate_temp", 1.0) != 1.0:
            _refuse("gate_temp", self.fields["gate_temp"], "1.0")
        ratios, stages = self.ratios()
        rope, compress_rope = self.ropes()
        head_dim = self.number("head_dim", minimum=2)
        v41 = self.family == V41
        draft = self.draft(stages)
        return ModelConfig(
            family=self.family,
            vocab_size=self.number("vocab_size", minimum=1),
            hidden_size=self.number("hidden_size", minimum=1),
            moe_intermediate_size=self.number("moe_intermediate_size", minimum=1),
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.number("num_attention_heads", minimum=1),
            head_dim=head_dim,
            qk_rope_head_dim=self.rope_dims(head_dim),
            q_lora_rank=self.number("q_lora_rank", minimum=1),
            o_lora_rank=self.number("o_lora_rank", minimum=1),
            o_groups=self.number("o_groups", minimum=1),
            sliding_window=self.number("sliding_window", minimum=1),
            n_routed_experts=self.number("n_routed_experts", minimum=1),
            num_experts_per_tok=self.number("num_experts_per_tok", minimum=1),
            routed_scaling_factor=self.number("routed_scaling_factor", float),
            swiglu_limit=self.number("swiglu_limit", float),
            rms_norm_eps=self.number("rms_norm_eps", float),
            hc_mult=self.number("hc_mult", minimum=1),
            hc_sinkhorn_iters=self.number("hc_sinkhorn_iters", minimum=1),
            hc_eps=self.number("hc_eps", float),
            max_position_embeddings=self.number("max_position_embeddings", minimum=1),
            index_n_heads=self.number("index_n_heads", minimum=1),
            index_head_dim=self.number("index_head_dim", minimum=1),
            index_topk=self.number("index_topk", minimum=1),
            candidate_topk_blocks=self.number("candidate_topk_blocks", minimum=1) if v41 else 0,
            candidate_block_size=self.number("candidate_block_size", minimum=1) if v41 else 0,
            rope=rope,
            compress_rope=compress_rope,
            layers=self.layers(ratios),
            weight_block_size=self.weight_block(),
            expert_dtype=str(self.quant.get("expert_dtype") or self.fields.get("expert_dtype") or "fp8"),
            bos_token_id=self.number("bos_token_id"),
            eos_token_id=self.number("eos_token_id"),
            draft=draft,
            preview_mtp_stages=0 if draft else stages,
            engram=self.engram() if v41 else None,
            simulated_quantisation=self.quant.get("activation_scheme") == "dynamic",
        ).validate()

    def rope_dims(self, head_dim: int) -> int:
        if "qk_rope_head_dim" in self.fields:
            return self.number("qk_rope_head_dim", minimum=2)
        return round(head_dim * self.number("partial_rotary_factor", float))

    def weight_block(self) -> int:
        default = 32 if self.family == V41 else 128
        block = self.quant.get("weight_block_size", [default, default])
        if (
            not isinstance(block, list | tuple)
            or len(block) != 2
            or block[0] != block[1]
            or block[0] not in (32, 64, 128)
        ):
            _refuse("quantization_config.weight_block_size", block, "two equal numbers, 32, 64 or 128")
        if self.quant.get("scale_fmt", "ue8m0") != "ue8m0":
            _refuse("quantization_config.scale_fmt", self.quant["scale_fmt"], "ue8m0")
        return block[0]

    def ratios(self) -> tuple[tuple[int, ...], int]:
        """Compression ratio of each backbone layer, and the number of stages stored behind them."""
        allowed = ALLOWED_RATIOS[self.family]
        if "compress_ratios" in self.fields:
            ratios = list(self.fields["compress_ratios"])
            if len(ratios) < self.n_layers:
                _refuse(
                    "compress_ratios",
                    f"a list of {len(ratios)}",
                    f"one ratio for each of {self.n_layers} layers, then the stages'",
                )
        elif "layer_types" in self.fields:
            rates = {name: 0 for name in ("sliding_attention",)} | dict(
                self.fields.get("compress_rates") or {}
            )
            ratios = []
            for index, name in enumerate(self.fields["layer_types"]):
                if name not in _LAYER_TYPES:
                    _refuse("layer_types", name, ", ".join(_LAYER_TYPES), layer=index)
                ratios.append(rates.get(name, _LAYER_TYPES[name]))
            if len(ratios) < self.n_layers:
                _refuse(
                    "layer_types", f"a list of {len(ratios)}", f"one name for each of {self.n_layers} layers"
                )
            ratios += [0] * (self.stage_hint() - (len(ratios) - self.n_layers))
        else:
            _refuse("compress_ratios", None, "a list of ratios (or layer_types with compress_rates)")
        for index, ratio in enumerate(ratios):
            if ratio not in allowed:
                _refuse("compression ratio", ratio, "/".join(map(str, allowed)), layer=index)
            if index >= self.n_layers and ratio:
                _refuse("compression ratio of a draft stage", ratio, "0", layer=index)
        return tuple(ratios[: self.n_layers]), len(ratios) - self.n_layers

    def stage_hint(self) -> int:
        """Stages behind the backbone where the ratios do not tell: a drafter has one per tapped layer."""
        if "dspark_block_size" in self.fields:
            return len(self.fields.get("dspark_target_layer_ids", ()))
        return self.number("num_nextn_predict_layers", default=0)

    def ropes(self) -> tuple[RopeConfig, RopeConfig]:
        fields = self.fields
        if "rope_parameters" in fields and "main" in fields["rope_parameters"]:
            main, compress = fields["rope_parameters"]["main"], fields["rope_parameters"]["compress"]
            theta, compress_theta = main["rope_theta"], compress["rope_theta"]
            scaling = compress
        else:
            theta = self.number("rope_theta", float, minimum=1)
            compress_theta = self.number("compress_rope_theta", float, minimum=1)
            scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("yarn", "default"):
            _refuse("rope_scaling.type", kind, "yarn or default")
        if kind == "default":
            return RopeConfig(float(theta)), RopeConfig(float(compress_theta))
        compress = RopeConfig(
            theta=float(compress_theta),
            factor=float(scaling["factor"]),
            beta_fast=float(scaling.get("beta_fast", 32)),
            beta_slow=float(scaling.get("beta_slow", 1)),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
        return RopeConfig(float(theta)), compress

    def layers(self, ratios: tuple[int, ...]) -> tuple[LayerConfig, ...]:
        if self.family == V4:
            hashed = self.hash_layers()
            return tuple(
                LayerConfig(
                    index=i,
                    ratio=ratio,
                    kv_source=i if ratio else None,
                    index_source=i if ratio == OVERLAPPED_RATIO else None,
                    hash_routed=i in hashed,
                )
                for i, ratio in enumerate(ratios)
            )
        kv_ids, index_ids = self.id_list("kv_source_layer_ids"), self.id_list("index_source_layer_ids")
        candidate_source = self.number("candidate_source_layer_id")
        engram_ids = self.id_list("engram_layer_ids")
        candidate_entries = max((s for s in kv_ids if s <= candidate_source), default=None)

        def shares_candidates(layer: int, entries: int) -> bool:
            """Candidate blocks are blocks of one cache; layers reading another cache know nothing of them."""
            return layer > candidate_source and entries == candidate_entries

        layers = []
        for i, ratio in enumerate(ratios):
            source = max((s for s in kv_ids if s <= i), default=None) if ratio else None
            index = max((s for s in index_ids if s <= i), default=None) if ratio else None
            if ratio and (source is None or index is None):
                _refuse(
                    "kv_source_layer_ids/index_source_layer_ids",
                    (kv_ids, index_ids),
                    "a source at or before every compressed layer",
                    layer=i,
                )
            if ratio and ratios[source] != ratio:
                _refuse(
                    "compression ratio",
                    ratio,
                    f"{ratios[source]}, that of its source layer {source}",
                    layer=i,
                )
            candidate = None
            if i == candidate_source:
                candidate = "source"
            elif ratio and index == i and shares_candidates(i, source):
                candidate = "member"
            layers.append(LayerConfig(i, ratio, source, index, candidate, False, i in engram_ids))
        for name, ids in (("kv_source_layer_ids", kv_ids), ("index_source_layer_ids", index_ids)):
            for i in ids:
                if not ratios[i]:
                    _refuse(name, i, "layers with a compression ratio above 0")
        if candidate_source not in index_ids:
            _refuse(
                "candidate_source_layer_id",
                candidate_source,
                f"one of index_source_layer_ids {list(index_ids)}",
            )
        return tuple(layers)

    def hash_layers(self) -> set[int]:
        kinds = self.fields.get("mlp_layer_types")
        if kinds is None:
            return set(range(self.number("num_hash_layers", default=0)))
        for index, kind in enumerate(kinds):
            if kind not in ("hash_moe", "moe"):
                _refuse("mlp_layer_types", kind, "hash_moe or moe", layer=index)
        return {i for i, kind in enumerate(kinds) if kind == "hash_moe"}

    def id_list(self, field: str) -> tuple[int, ...]:
        ids = self.fields.get(field)
        if not isinstance(ids, list | tuple) or any(
            not isinstance(i, int) or not 0 <= i < self.n_layers for i in ids
        ):
            _refuse(field, ids, f"a list of layers 0 to {self.n_layers - 1}")
        return tuple(sorted(ids))

    def draft(self, stages: int) -> DraftConfig | None:
        if self.fields.get("dspark_block_size") is None:
            return None
        if stages < 1:
            _refuse(
                "compress_ratios",
                "no entries behind the backbone",
                "one 0 for each draft stage, since dspark_block_size is set",
            )
        return DraftConfig(
            stages=stages,
            block_size=self.number("dspark_block_size", minimum=1),
            noise_token_id=self.number("dspark_noise_token_id"),
            target_layer_ids=tuple(self.fields.get("dspark_target_layer_ids") or ()),
            markov_rank=self.number("dspark_markov_rank", minimum=1),
            n_routed_experts=self.number(
                "dspark_n_routed_experts", default=self.fields.get("n_routed_experts"), minimum=1
            ),
            num_experts_per_tok=self.number(
                "dspark_num_experts_per_tok", default=self.fields.get("num_experts_per_tok"), minimum=1
            ),
        )

    def engram(self) -> EngramConfig | None:
        ids = self.id_list("engram_layer_ids")
        if not ids:
            return None
        rows = tuple(self.fields.get("engram_num_embeddings") or ())
        if len(rows) != len(ids):
            _refuse(
                "engram_num_embeddings",
                list(rows),
                f"one table size for each of engram_layer_ids {list(ids)}",
            )
        return EngramConfig(
            layer_ids=ids,
            num_embeddings=rows,
            max_ngram_size=self.number("engram_max_ngram_size", minimum=2),
            vocab_size=self.number("engram_vocab_size", minimum=2),
            n_heads=self.number("engram_n_heads", minimum=1),
            head_dim=self.number("engram_head_dim", minimum=1),
            pad_token_id=self.number("engram_pad_token_id"),
            compressed_vocab_size=self.number("engram_compressed_vocab_size", minimum=1),
        )
