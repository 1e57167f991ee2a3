"""Published-style export: what is read back is exactly what the stored formats can hold."""

import json

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, random_params, shard_names

from pallas_kernels import formats
from v4flash.checkpoint.export import encode, save_published
from v4flash.checkpoint.loading import decode_rows, load
from v4flash.checkpoint.shards import INDEX_NAME, CheckpointFiles
from v4flash.errors import CheckpointError, UsageError
from v4flash.model.numerics import Numerics

DECODED = Numerics(packed=False)
FP8_ROUND_TRIP = jax.jit(formats.fp8_weight_round_trip, static_argnums=1)
FP4_ROUND_TRIP = jax.jit(formats.fp4_weight_round_trip)


def flat(params: nnx.State) -> dict:
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(params)}


@pytest.mark.parametrize("family", CONFIGS)
def test_decoded_weights_return_as_their_round_trip(tmp_path, family):
    raw = CONFIGS[family]()
    params = random_params(raw, seed=5, packed=False)
    save_published(tmp_path / "a", raw, params)
    model = nnx.merge(load(tmp_path / "a", DECODED).graphdef, params)
    loaded = load(tmp_path / "a", DECODED).model
    layer, read = model.backbone.layers[1], loaded.backbone.layers[1]
    np.testing.assert_array_equal(read.attn.wo_b.weight[...], FP8_ROUND_TRIP(layer.attn.wo_b.weight[...], 32))
    np.testing.assert_array_equal(
        read.ffn.experts.w3.weight[...], FP4_ROUND_TRIP(layer.ffn.experts.w3.weight[...])
    )
    np.testing.assert_array_equal(
        read.attn_norm.weight[...], np.asarray(layer.attn_norm.weight[...]).astype(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(read.hc_ffn.fn[...], layer.hc_ffn.fn[...])
    if layer.engram is not None:
        np.testing.assert_array_equal(
            read.engram.embed.weight[...], decode_rows(*encode("rows", 32, layer.engram.embed.weight[...]))
        )


@pytest.mark.parametrize("family", CONFIGS)
def test_exporting_again_changes_nothing(tmp_path, family):
    """Packed weights keep their bytes. Decoded ones keep their values: a block whose largest payload was rounded
    to a power of two below may be stored with half the scale the next time."""
    raw = CONFIGS[family]()
    save_published(tmp_path / "a", raw, random_params(raw, seed=6, packed=False))
    for numerics in (DECODED, Numerics()):
        first = load(tmp_path / "a", numerics).params
        save_published(tmp_path / "b", raw, first, overwrite=True)
        again = flat(load(tmp_path / "b", numerics).params)
        for path, value in flat(first).items():
            assert again[path].tobytes() == value.tobytes(), path


def test_table_rows_have_a_scale_for_each_row_and_group():
    weight = jnp.asarray(
        np.random.default_rng(0).standard_normal((5, 64)) * 2.0 ** np.arange(5)[:, None], jnp.float32
    )
    payload, scale = encode("rows", 128, weight)
    assert (payload.shape, scale.shape, scale.dtype) == ((5, 64), (5, 2), jnp.uint8)
    expected = jnp.stack([FP8_ROUND_TRIP(row[None], 32)[0] for row in weight])
    np.testing.assert_array_equal(decode_rows(payload, scale), expected)


def test_weights_that_are_no_multiple_of_the_block():
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((40, 70)), jnp.float32)
    payload, scale = encode("fp8", 32, weight)
    assert (payload.shape, scale.shape) == ((40, 70), (2, 3))
    largest_step = 2.0**-4  # half a unit of E4M3's three mantissa bits, relative
    np.testing.assert_allclose(formats.decode_fp8(payload, scale, 32), weight, rtol=largest_step, atol=2e-3)


def test_shards_stay_below_the_limit_and_the_index_names_them(tmp_path):
    raw = CONFIGS["v4"]()
    total = save_published(tmp_path / "a", raw, random_params(raw), max_shard_bytes=30_000)
    shards = shard_names(tmp_path / "a")
    assert len(shards) > 5
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    files = CheckpointFiles.open(tmp_path / "a")
    assert files.data_bytes == total
    assert json.loads((tmp_path / "a" / INDEX_NAME).read_text())["metadata"]["total_size"] == total
    for shard in files.shards.values():
        assert sum(info.nbytes for info in shard.tensors.values()) <= 30_000 or len(shard.tensors) == 1


def test_extra_files_are_stored_beside_the_weights(tmp_path):
    raw = CONFIGS["v41"]()
    save_published(tmp_path / "a", raw, random_params(raw), extra_files={"tokenizer.json": b"{}"})
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == b"{}"
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == raw


def test_weights_of_another_configuration_are_refused(tmp_path):
    v4, v41 = CONFIGS["v4"](), CONFIGS["v41"]()
    with pytest.raises(ValueError, match="the weights have no backbone"):
        save_published(tmp_path / "a", v4, random_params(v41))
    wide = {**v4, "moe_intermediate_size": 64}
    with pytest.raises(ValueError, match=r"has shape \[.*the configuration asks for"):
        save_published(tmp_path / "a", wide, random_params(v4))
    assert not (tmp_path / "a").exists()


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path):
    raw = CONFIGS["v4"]()
    save_published(tmp_path / "a", raw, random_params(raw, seed=1))
    with pytest.raises(UsageError, match="exists already"):
        save_published(tmp_path / "a", raw, random_params(raw, seed=2))
    save_published(tmp_path / "a", raw, random_params(raw, seed=2), overwrite=True)
    expected, found = flat(random_params(raw, seed=2)), flat(load(tmp_path / "a").params)
    assert all(found[path].tobytes() == value.tobytes() for path, value in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    raw = CONFIGS["v4"]()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(CheckpointError, match=r"1,000 bytes free, \d+,\d+ are needed"):
        save_published(tmp_path / "a", raw, random_params(raw))
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_keeps_the_old_folder_and_says_where_the_rest_is(tmp_path, monkeypatch):
    raw = CONFIGS["v4"]()
    save_published(tmp_path / "a", raw, random_params(raw, seed=1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("v4flash.checkpoint.export.write_safetensors", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*a\.partial"):
        save_published(tmp_path / "a", raw, random_params(raw, seed=2), overwrite=True)
    monkeypatch.undo()
    expected, found = flat(random_params(raw, seed=1)), flat(load(tmp_path / "a").params)
    assert all(found[path].tobytes() == value.tobytes() for path, value in expected.items())
    save_published(tmp_path / "a", raw, random_params(raw, seed=2), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
