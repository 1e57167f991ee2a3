"""From the JSON object of a published `config.json` to a ModelConfig.

Knows: both spellings of the configuration files (`compress_ratios` or `layer_types`, `rope_scaling` or
`rope_parameters`, ...), and which values the code does not know. Does not know: what a feature means (config).
"""

import math
from collections.abc import Mapping
from typing import Any

from v4flash.config import (
    ALLOWED_RATIOS,
    FAMILIES,
    OVERLAPPED_RATIO,
    V4,
    V41,
    DraftConfig,
    EngramConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    refuse,
)
from v4flash.errors import CheckpointError

LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


class ConfigReader:
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
            refuse(field, None, "a number; the field is required")
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not whole):
            refuse(field, value, "a whole number" if kind is int else "a number")
        if not math.isfinite(value) or value < minimum:
            refuse(field, value, f"a number of at least {minimum}")
        return kind(value)

    def choice(self, field: str, allowed: tuple, default: Any) -> Any:
        value = self.fields.get(field, default)
        if value not in allowed:
            refuse(field, value, " or ".join(map(str, allowed)))
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
            refuse("gate_temp", self.fields["gate_temp"], "1.0")
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
            refuse("quantization_config.weight_block_size", block, "two equal numbers, 32, 64 or 128")
        if self.quant.get("scale_fmt", "ue8m0") != "ue8m0":
            refuse("quantization_config.scale_fmt", self.quant["scale_fmt"], "ue8m0")
        return block[0]

    def ratios(self) -> tuple[tuple[int, ...], int]:
        """Compression ratio of each backbone layer, and the number of stages stored behind them."""
        allowed = ALLOWED_RATIOS[self.family]
        if "compress_ratios" in self.fields:
            ratios = list(self.fields["compress_ratios"])
            if len(ratios) < self.n_layers:
                refuse(
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
                if name not in LAYER_TYPES:
                    refuse("layer_types", name, ", ".join(LAYER_TYPES), layer=index)
                ratios.append(rates.get(name, LAYER_TYPES[name]))
            if len(ratios) < self.n_layers:
                refuse(
                    "layer_types", f"a list of {len(ratios)}", f"one name for each of {self.n_layers} layers"
                )
            ratios += [0] * (self.stage_hint() - (len(ratios) - self.n_layers))
        else:
            refuse("compress_ratios", None, "a list of ratios (or layer_types with compress_rates)")
        for index, ratio in enumerate(ratios):
            if ratio not in allowed:
                refuse("compression ratio", ratio, "/".join(map(str, allowed)), layer=index)
            if index >= self.n_layers and ratio:
                refuse("compression ratio of a draft stage", ratio, "0", layer=index)
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
            refuse("rope_scaling.type", kind, "yarn or default")
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
                refuse(
                    "kv_source_layer_ids/index_source_layer_ids",
                    (kv_ids, index_ids),
                    "a source at or before every compressed layer",
                    layer=i,
                )
            if ratio and ratios[source] != ratio:
                refuse(
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
                    refuse(name, i, "layers with a compression ratio above 0")
        if candidate_source not in index_ids:
            refuse(
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
                refuse("mlp_layer_types", kind, "hash_moe or moe", layer=index)
        return {i for i, kind in enumerate(kinds) if kind == "hash_moe"}

    def id_list(self, field: str) -> tuple[int, ...]:
        ids = self.fields.get(field)
        if not isinstance(ids, list | tuple) or any(
            not isinstance(i, int) or not 0 <= i < self.n_layers for i in ids
        ):
            refuse(field, ids, f"a list of layers 0 to {self.n_layers - 1}")
        return tuple(sorted(ids))

    def draft(self, stages: int) -> DraftConfig | None:
        if self.fields.get("dspark_block_size") is None:
            return None
        if stages < 1:
            refuse(
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
            refuse(
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
