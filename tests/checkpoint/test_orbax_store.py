"""Converted checkpoints and training states kept by Orbax."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, edit_tensors, random_params, shard_names, write_checkpoint

from v4flash.checkpoint import orbax_store
from v4flash.checkpoint.loading import load
from v4flash.checkpoint.orbax_store import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    convert,
    load_training_state,
    save_training_state,
)
from v4flash.errors import CheckpointError, UsageError
from v4flash.model.numerics import Numerics


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    for family in CONFIGS:
        (write_checkpoint(folder / family, family) / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def kept(published, tmp_path_factory):
    """A converted V4 checkpoint; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("kept") / "v4"
    convert(published / "v4", folder)
    return folder


@pytest.fixture
def converted(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "converted")


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert (other.dtype, other.shape) == (value.dtype, value.shape), path
        assert np.asarray(other).tobytes() == np.asarray(value).tobytes(), path


def refusal(path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_checkpoint_loads_the_same_arrays(published, tmp_path, family):
    source, target = published / family, tmp_path / "converted"
    stored = convert(source, target)
    for options in ({}, {"numerics": Numerics(packed=False)}, {"drafter": False}):
        expected, found = load(source, **options), load(target, **options)
        assert_same(found.params, expected.params)
        assert found.config == expected.config
    assert stored == sum(leaf.nbytes for leaf in jax.tree.leaves(load(source).params))
    assert (target / "tokenizer_config.json").exists()
    assert not list(target.glob("*.safetensors*"))


def test_nothing_is_overwritten_unasked(published, converted):
    before = (converted / MANIFEST_NAME).read_bytes()
    with pytest.raises(UsageError, match="exists already.*--overwrite"):
        convert(published / "v41", converted)
    assert (converted / MANIFEST_NAME).read_bytes() == before
    convert(published / "v41", converted, overwrite=True)
    assert_same(load(converted).params, load(published / "v41").params)
    assert [path.name for path in converted.parent.iterdir()] == [converted.name]


def test_a_converted_folder_is_no_source(converted, tmp_path):
    with pytest.raises(UsageError, match="converted checkpoint already"):
        convert(converted, tmp_path / "again")


def test_an_interrupted_conversion_leaves_no_final_name_and_can_be_repeated(published, tmp_path, monkeypatch):
    target, calls = tmp_path / "converted", []
    save = orbax_store.ocp.save

    def failing(path, tree):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(path, tree)

    monkeypatch.setattr(orbax_store.ocp, "save", failing)
    with pytest.raises(CheckpointError, match=r"No space left on device.*converted\.partial"):
        convert(published / "v4", target)
    monkeypatch.undo()
    assert not target.exists()
    assert "unfinished conversion" in refusal(tmp_path / "converted.partial")
    convert(published / "v4", target)
    assert_same(load(target).params, random_params(CONFIGS["v4"]()))
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]


def test_a_damaged_source_is_refused_before_anything_is_written(published, tmp_path):
    source = shutil.copytree(published / "v4", tmp_path / "source")
    edit_tensors(source, lambda tensors: tensors.pop("norm.weight", None))
    with pytest.raises(CheckpointError, match="norm.weight"):
        convert(source, tmp_path / "converted")
    (source / shard_names(source)[0]).unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        convert(source, tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_too_little_room_is_noticed_before_writing(published, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="1,000 bytes free"):
        convert(published / "v4", tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_its_manifest_is_unfinished(converted):
    (converted / MANIFEST_NAME).unlink()
    assert "unfinished conversion" in refusal(converted)


def test_a_lost_or_shortened_file_is_named(converted):
    victim = max(
        (file for file in (converted / WEIGHTS_NAME).rglob("*") if file.is_file()),
        key=lambda f: f.stat().st_size,
    )
    victim.write_bytes(victim.read_bytes()[:-1])
    assert f"1 files missing or of another size ({victim.relative_to(converted)})" in refusal(converted)
    victim.unlink()
    assert str(victim.relative_to(converted)) in refusal(converted)


def test_a_manifest_of_another_kind_or_damaged(converted):
    manifest = json.loads((converted / MANIFEST_NAME).read_text())
    for change in ({"schema": 99}, {"format": "other"}):
        (converted / MANIFEST_NAME).write_text(json.dumps({**manifest, **change}))
        assert "expected v4flash-orbax schema 1" in refusal(converted)
    (converted / MANIFEST_NAME).write_text("{")
    assert "is damaged" in refusal(converted)


def test_a_configuration_of_another_size_is_refused(converted):
    config = json.loads((converted / "config.json").read_text())
    changed = json.dumps({**config, "vocab_size": 65})
    (converted / "config.json").write_text(changed)
    manifest = json.loads((converted / MANIFEST_NAME).read_text())
    manifest["files"]["config.json"] = len(changed)
    (converted / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert "backbone.embed is bfloat16 [64, 64], expected bfloat16 [65, 64]" in refusal(converted)


def training_state() -> dict:
    rng = np.random.default_rng(4)
    weights = {
        "layers": {0: {"w": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)}},
        "norm": jnp.asarray(rng.standard_normal(4), jnp.bfloat16),
    }
    return {
        "params": weights,
        "moments": [jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 0.5, weights), ()],
        "step": jnp.int32(7),
        "key": jnp.arange(2, dtype=jnp.uint32),
    }


def test_a_training_state_returns_and_is_replaced(tmp_path):
    state = training_state()
    save_training_state(tmp_path / "run", state)
    later = {**state, "step": jnp.int32(8)}
    save_training_state(tmp_path / "run", later)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    assert_same(load_training_state(tmp_path / "run", abstract), later)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_training_state_of_another_run_is_refused(tmp_path):
    save_training_state(tmp_path / "run", {"a": jnp.ones(3), "b": jnp.ones(2)})
    for abstract in ({"a": jnp.ones(3)}, {"a": jnp.ones(3), "b": jnp.ones(4)}):
        with pytest.raises(CheckpointError, match="does not fit this run"):
            load_training_state(tmp_path / "run", abstract)
    with pytest.raises(CheckpointError, match="no training state"):
        load_training_state(tmp_path / "nowhere", {"a": jnp.ones(3)})
