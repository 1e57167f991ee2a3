"""Configuration files: both families, both spellings, and one sentence for whatever is wrong."""

import json
from pathlib import Path

import pytest
from toy_models import toy_json

from v4flash.config import ModelConfig
from v4flash.errors import CheckpointError

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"


def published(name: str) -> dict:
    return json.loads((MODELS / f"{name}.json").read_text())


def test_published_layer_tables():
    flash = ModelConfig.from_file(MODELS / "v4-flash-0731.json")
    assert [layer.ratio for layer in flash.layers[:5]] == [0, 0, 4, 128, 4] and flash.layers[42].ratio == 4
    assert [layer.hash_routed for layer in flash.layers[:4]] == [True, True, True, False]
    assert flash.draft.stages == 3 and flash.preview_mtp_stages == 0
    assert flash.layers[3].index_source is None and flash.layers[4].index_source == 4
    preview = ModelConfig.from_file(MODELS / "v4-flash-preview.json")
    assert preview.draft is None and preview.preview_mtp_stages == 1
    later = ModelConfig.from_file(MODELS / "v4.1-flash.json")
    assert later.kv_source_layers == (2, 8, 14, 20)
    assert [later.layers[i].kv_source for i in (1, 2, 7, 8, 19, 20, 39)] == [None, 2, 2, 8, 14, 20, 20]
    assert [later.layers[i].index_source for i in (7, 20, 23, 24, 39)] == [2, 20, 20, 24, 36]
    roles = {layer.index: layer.candidate for layer in later.layers if layer.candidate}
    assert roles == {20: "source", 24: "member", 28: "member", 32: "member", 36: "member"}
    assert [layer.index for layer in later.layers if layer.engram] == [1, 14]
    assert later.draft.n_routed_experts == 128 and later.draft.num_experts_per_tok == 3
    assert later.weight_block_size == 32 and later.expert_dtype == "fp4"


def test_new_spelling_reads_like_the_old_one():
    old = published("v4-flash-0731")
    new = {
        k: v
        for k, v in old.items()
        if k not in ("compress_ratios", "rope_scaling", "rope_theta", "num_hash_layers")
    }
    new.pop("compress_rope_theta")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    new["layer_types"] = [names[ratio] for ratio in old["compress_ratios"][:43]]
    new["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    new["mlp_layer_types"] = ["hash_moe"] * 3 + ["moe"] * 40
    yarn = {k: v for k, v in old["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": 10000},
        "compress": {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0, **yarn},
    }
    new["partial_rotary_factor"] = 64 / 512
    new.pop("qk_rope_head_dim")
    new["quantization_config"] = {**old["quantization_config"], "expert_dtype": new.pop("expert_dtype")}
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(old)


def test_stages_follow_the_ratios_not_the_counter():
    raw = published("v4-flash-0731") | {"num_nextn_predict_layers": 7}
    assert ModelConfig.from_dict(raw).draft.stages == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; v4flash runs deepseek_v4 and deepseek_v41"),
        ({"compress_ratios": [0, 3, 128, 4, 0, 0]}, "layer 1: compression ratio is 3, allowed: 0/4/128"),
        ({"compress_ratios": [0, 4]}, "compress_ratios is 'a list of 2', allowed: one ratio for each of 4"),
        ({"compress_ratios": [0, 4, 128, 4, 4, 0]}, "layer 4: compression ratio of a draft stage is 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: silu"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', allowed: sqrtsoftplus"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, "hidden_size is '64', allowed: a whole number"),
        ({"sliding_window": 16.5}, "sliding_window is 16.5, allowed: a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"o_groups": 3}, "o_groups is 3, allowed: a divisor of num_attention_heads (4)"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4', allowed: fp4 or fp8"),
        ({"dspark_target_layer_ids": [1, 2, 9]}, "dspark_target_layer_ids is [9], allowed: layers 0 to 3"),
        ({"dspark_noise_token_id": 96}, "dspark_noise_token_id is 96, allowed: ids 0 to 95"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling.type is 'linear', allowed: yarn or default",
        ),
        ({"gate_temp": 0.5}, "gate_temp is 0.5, allowed: 1.0"),
    ],
)
def test_wrong_values_name_field_found_and_allowed(change, words):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(toy_json("v4") | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_source_layer_ids": [3]}, "layer 1: kv_source_layer_ids/index_source_layer_ids"),
        (
            {"compress_ratios": [0, 2, 1, 1, 1, 1, 0, 0]},
            "layer 2: compression ratio is 1, allowed: 2, that of its source",
        ),
        (
            {"candidate_source_layer_id": 4},
            "candidate_source_layer_id is 4, allowed: one of index_source_layer_ids",
        ),
        ({"engram_num_embeddings": [5]}, "engram_num_embeddings is [5], allowed: one table size for each"),
        (
            {"index_source_layer_ids": [0, 1, 3]},
            "index_source_layer_ids is 0, allowed: layers with a compression ratio",
        ),
    ],
)
def test_wrong_sharing_is_refused(change, words):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(toy_json("v41") | change)
    assert words in str(caught.value)


def test_candidates_belong_to_one_cache():
    raw = toy_json("v41") | {"candidate_source_layer_id": 1}
    assert {
        layer.index: layer.candidate for layer in ModelConfig.from_dict(raw).layers if layer.candidate
    } == {1: "source"}


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json at"):
        ModelConfig.from_file(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_file(file)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        ModelConfig.from_file(file)
