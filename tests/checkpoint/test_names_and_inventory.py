"""Names in both directions, and the published totals from configurations alone."""

from pathlib import Path

import pytest
from tiny_checkpoints import CONFIGS

from v4flash.checkpoint import names
from v4flash.checkpoint.inventory import inventory, is_ignored, parameters
from v4flash.config import V4, V41, ModelConfig

MODELS = Path(__file__).parents[2] / "configs" / "models"

# Tensors and payload bytes of the published index files; V4.1 without its 263 vision tensors.
PUBLISHED_TOTALS = {
    "v4-flash-preview": (69_187, 159_609_485_896),
    "v4-flash-0731": (72_317, 166_878_536_440),
    "v4-pro-preview": (145_116, 864_704_792_696),
}
V41_TEXT_TENSORS = 96_085 - 263
DRAFTER_TENSORS_0731 = 4_705
PREDICTION_STAGE_TENSORS = 1_575


@pytest.mark.parametrize(
    ("path", "family", "name"),
    [
        (("backbone", "embed"), V4, "embed.weight"),
        (("backbone", "head"), V41, "head.weight"),
        (("backbone", "norm", "weight"), V4, "norm.weight"),
        (("backbone", "hc_head", "fn"), V4, "hc_head_fn"),
        (("backbone", "layers", 3, "hc_ffn", "scale"), V4, "layers.3.hc_ffn_scale"),
        (("backbone", "layers", 3, "attn", "wq_a", "scale"), V4, "layers.3.attn.wq_a.scale"),
        (("backbone", "layers", 0, "ffn", "gate", "tid2eid"), V4, "layers.0.ffn.gate.tid2eid"),
        (
            ("backbone", "layers", 2, "attn", "indexer", "compressor", "ape"),
            V4,
            "layers.2.attn.indexer.compressor.ape",
        ),
        (("backbone", "layers", 1, "engram", "embed", "weight"), V41, "layers.1.engram.embed.weight"),
        (("drafter", "stages", 0, "main_proj", "weight"), V4, "mtp.0.main_proj.weight"),
        (("drafter", "stages", 2, "confidence", "weight"), V4, "mtp.2.confidence_head.proj.weight"),
        (("drafter", "stages", 2, "markov_head", "embed"), V4, "mtp.2.markov_head.markov_w1.weight"),
        (("drafter", "stages", 2, "markov_head", "head"), V4, "mtp.2.markov_head.markov_w2.weight"),
        (("drafter", "stages", 2, "markov_head", "embed"), V41, "mtp.2.markov_head.embed.weight"),
        (("drafter", "stages", 2, "markov_head", "head"), V41, "mtp.2.markov_head.head.weight"),
    ],
)
def test_published_spelling(path, family, name):
    assert names.published_names(path, family, 1) == (name,)
    assert names.parameter_of(name, family) == (path, None)


def test_stacked_experts_are_published_one_by_one():
    path = ("drafter", "stages", 1, "ffn", "experts", "w2", "scale")
    published = names.published_names(path, V4, 12)
    assert published[11] == "mtp.1.ffn.experts.11.w2.scale"
    assert [names.parameter_of(name, V4) for name in published] == [(path, expert) for expert in range(12)]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_is_found_again_from_its_names(family):
    config = ModelConfig.from_dict(CONFIGS[family]())
    seen = set()
    for parameter in parameters(config):
        for expert, tensor in enumerate(parameter.published):
            found = names.parameter_of(tensor.name, config.family)
            assert found == (parameter.path, expert if parameter.stacked else None)
            assert tensor.name not in seen
            seen.add(tensor.name)


@pytest.mark.parametrize("model", PUBLISHED_TOTALS)
def test_published_totals_follow_from_the_configuration(model):
    tensors = inventory(ModelConfig.from_file(MODELS / f"{model}.json"))
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors.values())) == PUBLISHED_TOTALS[model]
    drafter = [tensor for name, tensor in tensors.items() if name.startswith("mtp.")]
    if model == "v4-flash-0731":
        assert len(drafter) == DRAFTER_TENSORS_0731
        assert all(tensor.used for tensor in drafter)
    if model == "v4-flash-preview":
        assert len(drafter) == PREDICTION_STAGE_TENSORS
        assert not any(tensor.used for tensor in drafter)


def test_v41_text_tensors_and_the_parts_text_leaves_out():
    config = ModelConfig.from_file(MODELS / "v4.1-flash.json")
    tensors = inventory(config)
    assert len(tensors) == V41_TEXT_TENSORS
    assert not tensors["layers.7.ffn.gate.bias_vl"].used
    assert tensors["mtp.1.ffn.gate.bias_vl"].shape == (128,)
    assert not tensors["image_newline"].used
    assert is_ignored("vision.blocks.3.attn.wqkv.bias", config)
    assert is_ignored("aligner.w1.weight", config)
    assert not is_ignored("layers.0.attn.wq_a.weight", config)


def test_real_shapes_and_types_of_a_few_tensors():
    tensors = inventory(ModelConfig.from_file(MODELS / "v4-flash-0731.json"))
    expected = {
        "layers.0.ffn.gate.tid2eid": ("I64", (129280, 6)),
        "layers.0.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
        "layers.0.ffn.experts.255.w1.scale": ("F8_E8M0", (2048, 128)),
        "layers.5.attn.wq_b.weight": ("F8_E4M3", (32768, 1024)),
        "layers.5.attn.wq_b.scale": ("F8_E8M0", (256, 8)),
        "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
        "layers.3.attn.compressor.ape": ("F32", (128, 512)),
        "layers.2.attn.indexer.weights_proj.weight": ("BF16", (64, 4096)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 4352)),
    }
    assert {name: (tensors[name].dtype, tensors[name].shape) for name in expected} == expected
