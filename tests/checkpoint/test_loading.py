"""Strict loading of generated checkpoints: equality, decoding, and refusal of everything damaged."""

import json

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, edit_tensors, random_params, shard_names, write_checkpoint

from pallas_kernels import formats
from v4flash.checkpoint.loading import load
from v4flash.checkpoint.published import TOKEN_MAP_NAME
from v4flash.config import ModelConfig
from v4flash.errors import CheckpointError
from v4flash.model.numerics import Linear, Numerics

DECODED = Numerics(packed=False)


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture
def checkpoint(tmp_path, family):
    return write_checkpoint(tmp_path / "model", family)


@pytest.fixture
def v4(tmp_path):
    return write_checkpoint(tmp_path / "model", "v4")


@pytest.fixture
def v41(tmp_path):
    return write_checkpoint(tmp_path / "model", "v41")


def arrays(params: nnx.State) -> dict:
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(params)}


def assert_same(found: nnx.State, expected: nnx.State) -> None:
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        assert found[path].tobytes() == value.tobytes(), path


@nnx.jit
def decoded_by_model(linear: Linear) -> jax.Array:
    return linear.decoded()


def refusal(path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, **options)
    return str(caught.value)


def replace(name, dtype, array):
    """An edit that gives the tensor another content wherever it lies."""

    def edit(tensors):
        if name in tensors:
            tensors[name] = dtype, array

    return edit


def test_packed_arrays_are_the_stored_ones(checkpoint, family):
    loaded = load(checkpoint)
    assert_same(loaded.params, random_params(CONFIGS[family]()))
    assert loaded.config == ModelConfig.from_dict(CONFIGS[family]())
    assert loaded.path == checkpoint
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded.params))


def test_decoded_weights_are_what_the_packed_model_decodes(checkpoint):
    packed, decoded = load(checkpoint).model, load(checkpoint, DECODED).model
    layers = [*zip(packed.backbone.layers, decoded.backbone.layers, strict=True)]
    layers += [*zip(packed.drafter.stages, decoded.drafter.stages, strict=True)]
    for ours, theirs in layers:
        for part in (lambda x: x.attn.wq_b, lambda x: x.ffn.experts.w2, lambda x: x.ffn.shared_experts.w1):
            weight = part(theirs).weight[...]
            assert part(theirs).scale is None
            assert weight.dtype == jnp.float32
            np.testing.assert_array_equal(weight, decoded_by_model(part(ours)))
        if ours.engram is not None:
            rows = jnp.arange(theirs.engram.embed.weight.shape[0])
            np.testing.assert_array_equal(theirs.engram.embed.weight[...], ours.engram.embed(rows))


def test_half_precision_decoding_rounds_once(v4):
    wide = load(v4, DECODED).model.backbone.layers[0].attn.wq_a.weight[...]
    narrow = (
        load(v4, Numerics(dtype=jnp.bfloat16, packed=False)).model.backbone.layers[0].attn.wq_a.weight[...]
    )
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_nibbles_and_scale_bytes_mean_what_was_published(v4):
    def edit(tensors):
        if "layers.0.ffn.experts.2.w1.weight" in tensors:
            tensors["layers.0.ffn.experts.2.w1.weight"][1][0, 0] = 0x21
            tensors["layers.0.ffn.experts.2.w1.scale"][1][:] = 127
        if "layers.0.attn.wq_a.weight" in tensors:
            tensors["layers.0.attn.wq_a.weight"][1][0, 0] = ml_dtypes.float8_e4m3fn(1.0)
            tensors["layers.0.attn.wq_a.scale"][1][0, 0] = 120

    edit_tensors(v4, edit)
    layer = load(v4, DECODED).model.backbone.layers[0]
    assert layer.ffn.experts.w1.weight[2, 0, :2].tolist() == [0.5, 1.0]
    assert float(layer.attn.wq_a.weight[0, 0]) == 2.0**-7


def test_hash_tables_become_int32(v4):
    table = load(v4).model.backbone.layers[0].ffn.gate.tid2eid[...]
    assert table.dtype == jnp.int32


def test_the_drafter_can_be_left_out(checkpoint):
    full, without = load(checkpoint), load(checkpoint, drafter=False)
    assert without.config.draft is None
    assert without.model.drafter is None
    backbone = {path: value for path, value in arrays(full.params).items() if path[0] == "backbone"}
    assert arrays(without.params).keys() == backbone.keys()


def test_known_unused_tensors_may_be_there(v41):
    def edit(tensors):
        if "layers.0.ffn.gate.bias" in tensors:
            tensors["layers.0.ffn.gate.bias_vl"] = "F32", np.zeros(4, np.float32)
            tensors["image_start"] = "BF16", np.zeros(64, ml_dtypes.bfloat16)
            tensors["vision.norm.weight"] = "BF16", np.zeros(3, ml_dtypes.bfloat16)

    edit_tensors(v41, edit)
    assert_same(load(v41).params, random_params(CONFIGS["v41"]()))


def test_a_missing_tensor_is_named(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.pop("layers.1.attn.wq_a.scale", None))
    assert "lacks 1 of" in refusal(checkpoint)
    assert "layers.1.attn.wq_a.scale" in refusal(checkpoint)


def test_many_missing_tensors_are_counted_and_a_handful_named(checkpoint):
    def edit(tensors):
        for name in [name for name in tensors if ".experts." in name and name.startswith("layers.")]:
            del tensors[name]

    edit_tensors(checkpoint, edit)
    message = refusal(checkpoint)
    assert "lacks 72 of" in message
    assert "layers.0.ffn.experts.0.w1.scale" in message
    assert "and 67 more" in message


def test_missing_drafter_tensors_offer_decoding_without_it(checkpoint):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith("mtp.1.ffn.shared_experts.")]:
            del tensors[name]

    edit_tensors(checkpoint, edit)
    message = refusal(checkpoint)
    assert "6 drafter tensors" in message
    assert "mtp.1.ffn.shared_experts.w1.scale" in message
    assert "--no-draft" in message
    assert load(checkpoint, drafter=False).model.drafter is None


def test_unexpected_tensors_are_named_even_without_the_drafter(checkpoint):
    def edit(tensors):
        if "mtp.0.attn.attn_sink" in tensors:
            tensors["mtp.0.attn.renamed"] = tensors["mtp.0.attn.attn_sink"]

    edit_tensors(checkpoint, edit)
    for options in ({}, {"drafter": False}):
        assert "1 tensors that config.json does not explain: mtp.0.attn.renamed" in refusal(
            checkpoint, **options
        )


@pytest.mark.parametrize(
    ("dtype", "array", "found"),
    [
        ("F32", np.zeros(32, np.float32), r"found F32 [32]"),
        ("BF16", np.zeros(16, ml_dtypes.bfloat16), r"found BF16 [16]"),
        ("BF16", np.zeros((1, 32), ml_dtypes.bfloat16), r"found BF16 [1, 32]"),
    ],
)
def test_another_type_or_shape_names_tensor_expected_and_found(v4, dtype, array, found):
    edit_tensors(v4, replace("layers.0.attn.q_norm.weight", dtype, array))
    message = refusal(v4)
    assert "layers.0.attn.q_norm.weight: expected BF16 [32]" in message
    assert found in message


def test_a_scale_byte_that_is_not_a_number(v4):
    scale = np.full((32, 2), 120, np.uint8)
    scale[3, 1] = 255
    edit_tensors(v4, replace("layers.2.ffn.experts.3.w1.scale", "F8_E8M0", scale))
    assert "layers.2.ffn.experts.3.w1.scale holds the scale byte 255" in refusal(v4)


def test_expert_ids_out_of_range(v4):
    edit_tensors(v4, replace("layers.0.ffn.gate.tid2eid", "I64", np.full((64, 2), 4, np.int64)))
    assert "layers.0.ffn.gate.tid2eid holds expert ids 4 to 4, expected 0 to 3" in refusal(v4)


def test_the_configuration_of_another_model(v4, tmp_path):
    raw = CONFIGS["v4"]()
    (v4 / "config.json").write_text(
        json.dumps(
            {
                **raw,
                "num_hidden_layers": 2,
                "compress_ratios": [0, 4, 0, 0],
                "dspark_target_layer_ids": [0, 1],
            }
        )
    )
    assert "config.json does not explain: layers.2." in refusal(v4)
    (v4 / "config.json").write_text(json.dumps({**raw, "model_type": "qwen3"}))
    assert "model_type is 'qwen3'" in refusal(v4)
    (v4 / "config.json").unlink()
    assert "no config.json" in refusal(v4)


def damage_truncate(shard):
    shard.write_bytes(shard.read_bytes()[:-1])


def damage_empty(shard):
    shard.write_bytes(b"")


def damage_pointer(shard):
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "1 bytes short"),
        (damage_empty, "is empty"),
        (damage_pointer, "Git LFS pointer"),
        (lambda shard: shard.unlink(), "lacks 1 of"),
    ],
)
def test_damaged_shards_are_refused_before_anything_is_read(v4, damage, message):
    shard = v4 / shard_names(v4)[1]
    damage(shard)
    text = refusal(v4)
    assert message in text
    assert shard.name in text


def test_the_token_map_file_is_used_and_checked(v41):
    path = v41 / TOKEN_MAP_NAME
    ids = json.loads(path.read_text())
    np.testing.assert_array_equal(load(v41).model.backbone.token_map[...], ids)
    for wrong, message in (
        (ids[:-1], "one Engram id for each of 64 token ids"),
        ({"map": ids}, "one Engram id for each of 64 token ids"),
        ([*ids[:-1], 40], "gives Engram ids 0 to 40, expected 0 to 39"),
    ):
        path.write_text(json.dumps(wrong))
        assert message in refusal(v41)
    path.write_text("[")
    assert "not valid JSON" in refusal(v41)
    path.unlink()
    assert "neither tokenizer.json nor engram_token_map.json" in refusal(v41)


def test_the_token_map_follows_from_the_tokenizer(v41):
    from tokenizers import Tokenizer, models

    (v41 / TOKEN_MAP_NAME).unlink()
    words = [chr(0x4E00 + i) for i in range(40)] + [
        chr(0x4E00 + i % 40) + " " * (1 + i // 40) for i in range(24)
    ]
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(v41 / "tokenizer.json")
    )
    np.testing.assert_array_equal(load(v41).model.backbone.token_map[...], [i % 40 for i in range(64)])
    (v41 / "tokenizer.json").write_text("{}")
    assert "not a readable tokenizer" in refusal(v41)


def test_loaded_arrays_do_not_follow_later_changes_of_the_file(v4):
    loaded = load(v4)
    before = arrays(loaded.params)
    copies = {path: value.copy() for path, value in before.items()}
    for shard in shard_names(v4):
        with (v4 / shard).open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(size // 2)
            file.write(b"\xaa" * (size - size // 2))
    for path, value in arrays(loaded.params).items():
        assert value.tobytes() == copies[path].tobytes(), path


def test_decode_matches_the_format_functions(v4):
    layer, decoded = (load(v4, numerics).model.backbone.layers[1] for numerics in (Numerics(), DECODED))
    w1 = layer.ffn.experts.w1
    np.testing.assert_array_equal(
        decoded.ffn.experts.w1.weight[...], formats.decode_fp4(w1.weight[...], w1.scale[...])
    )
