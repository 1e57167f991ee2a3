import json

import numpy as np
import pytest

from v4flash.checkpoint.safetensors_file import write_safetensors
from v4flash.checkpoint.shards import INDEX_NAME, CheckpointFiles
from v4flash.errors import CheckpointError

ONE = np.ones(1, np.float32)
SHARDS = {"x-1.safetensors": ["a", "b"], "x-2.safetensors": ["c"], "x-3.safetensors": ["d"]}


def write_index(folder, weight_map) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path):
    for number, (shard, names) in enumerate(SHARDS.items()):
        write_safetensors(tmp_path / shard, {name: ("F32", ONE * number) for name in names})
    write_index(tmp_path, {name: shard for shard, names in SHARDS.items() for name in names})
    return tmp_path


def edit_index(folder, edit) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    edit(index)
    write_index(folder, index)


def test_all_shards_form_one_table(folder):
    files = CheckpointFiles.open(folder)
    assert sorted(files.tensors) == ["a", "b", "c", "d"]
    assert files.shard_of("c") == "x-2.safetensors"
    assert float(files.tensor("d")[0]) == 2.0
    assert files.data_bytes == 16


def test_one_file_needs_no_index(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", ONE)})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        files = CheckpointFiles.open(path)
        assert list(files.tensors) == ["a"]
        assert files.directory == tmp_path


def test_missing_shards_are_listed_together_with_their_tensors(folder):
    (folder / "x-1.safetensors").unlink()
    (folder / "x-3.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.open(folder)
    message = str(caught.value)
    assert "lacks 2 of 3 shards" in message
    assert "x-1.safetensors (2 tensors: a, b)" in message
    assert "x-3.safetensors (1 tensors: d)" in message


def test_a_name_that_no_shard_and_no_index_knows(folder):
    with pytest.raises(CheckpointError, match="tensor z was never in this checkpoint"):
        CheckpointFiles.open(folder).tensor("z")


def test_a_shard_that_lacks_an_indexed_tensor(folder):
    edit_index(folder, lambda index: index.update(z="x-2.safetensors"))
    with pytest.raises(CheckpointError, match=r"different revisions: x-2.safetensors lacks 1 \(z\)"):
        CheckpointFiles.open(folder)


def test_a_tensor_indexed_in_the_wrong_shard(folder):
    edit_index(folder, lambda index: index.update(a="x-2.safetensors"))
    with pytest.raises(CheckpointError, match=r"different revisions: x-2.safetensors lacks 1 \(a\)"):
        CheckpointFiles.open(folder)


def test_a_tensor_that_the_index_does_not_name(folder):
    edit_index(folder, lambda index: index.pop("b"))
    with pytest.raises(
        CheckpointError, match=r"x-1.safetensors holds 1 tensors that the index does not place"
    ):
        CheckpointFiles.open(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_an_index_of_another_form_is_refused(folder, text):
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="index|must map tensor names"):
        CheckpointFiles.open(folder)


def test_an_index_cannot_point_outside_the_folder(folder):
    edit_index(folder, lambda index: index.update(a="../x-1.safetensors"))
    with pytest.raises(CheckpointError, match="files beside it"):
        CheckpointFiles.open(folder)


def test_a_folder_without_weights_says_what_it_found(tmp_path):
    with pytest.raises(CheckpointError, match="found 0 .safetensors, no config.json"):
        CheckpointFiles.open(tmp_path)
    nested = tmp_path / "DeepSeek-V4-Flash"
    nested.mkdir()
    (nested / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="did you mean .*DeepSeek-V4-Flash"):
        CheckpointFiles.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointFiles.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="it is a file"):
        CheckpointFiles.open(nested / "config.json")


def test_shards_without_their_index_are_not_guessed_at(folder):
    (folder / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="found 3 .safetensors but neither"):
        CheckpointFiles.open(folder)


def test_a_directory_named_like_a_shard(folder):
    (folder / "x-2.safetensors").unlink()
    (folder / "x-2.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="x-2.safetensors is a directory"):
        CheckpointFiles.open(folder)
