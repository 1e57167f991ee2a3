import json
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, edit_tensors, shard_names, write_checkpoint

from v4flash.checkpoint.inspection import COMPONENTS, inspect
from v4flash.checkpoint.orbax_store import convert
from v4flash.checkpoint.shards import CheckpointFiles
from v4flash.errors import CheckpointError

MODELS = Path(__file__).parents[2] / "configs" / "models"

# Routed experts and DSpark stages of V4-Flash-0731: 256 experts of 13,369,344 bytes in 43 layers, and 10.86 GB.
EXPERT_BYTES_0731 = 43 * 256 * 13_369_344
DRAFTER_BYTES_0731 = 10_862_838_300


def test_a_published_configuration_alone():
    result = inspect(MODELS / "v4-flash-0731.json").to_json()
    assert (result["schema"], result["source"], result["family"]) == (1, "config", "deepseek_v4")
    assert (result["tensors"], result["data_bytes"]) == (72_317, 166_878_536_440)
    assert result["components"]["routed_experts"] == EXPERT_BYTES_0731
    assert result["components"]["drafter"] == DRAFTER_BYTES_0731
    drafter = result["drafter"]
    assert (drafter["stages"], drafter["block_size"], drafter["trained_k"], drafter["markov_rank"]) == (
        3,
        5,
        5,
        256,
    )
    assert (result["missing"], result["unexpected"], result["shards"]) == ([], [], [])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_with_weights(tmp_path, family):
    folder = write_checkpoint(tmp_path / "model", family)
    result = inspect(folder)
    files = CheckpointFiles.open(folder)
    assert result.source == "published"
    assert (result.tensors, result.data_bytes) == (len(files.tensors), files.data_bytes)
    assert tuple(result.components) == COMPONENTS
    assert sum(result.components.values()) == files.data_bytes
    assert (result.components["engram"] > 0) == (family == "v41")
    assert [shard["name"] for shard in result.shards] == shard_names(folder)
    assert sum(shard["data_bytes"] for shard in result.shards) == files.data_bytes
    assert (result.missing, result.unexpected, result.mismatched) == ([], [], [])
    assert json.loads(json.dumps(result.to_json()))["drafter"]["stages"] == 2
    assert result.family in result.as_text()
    assert f"{result.data_bytes:,} bytes" in result.as_text()


def test_a_converted_folder(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "v41")
    stored = convert(folder, tmp_path / "converted")
    result = inspect(tmp_path / "converted")
    assert result.source == "orbax"
    assert result.data_bytes == stored
    assert result.components["routed_experts"] == inspect(folder).components["routed_experts"]


def test_wrong_tensors_are_listed_not_raised(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "v4")

    def edit(tensors):
        tensors.pop("layers.0.attn.wkv.scale", None)
        if "norm.weight" in tensors:
            tensors["norm.bias"] = tensors["norm.weight"]
            tensors["norm.weight"] = "F32", np.zeros(64, np.float32)

    edit_tensors(folder, edit)
    result = inspect(folder)
    assert result.missing == ["layers.0.attn.wkv.scale"]
    assert result.unexpected == ["norm.bias"]
    assert [line.split(":")[0] for line in result.mismatched] == ["norm.weight"]
    assert "missing: 1 (layers.0.attn.wkv.scale)" in result.as_text()


def test_a_configuration_without_a_drafter(tmp_path):
    raw = {name: value for name, value in CONFIGS["v4"]().items() if not name.startswith("dspark")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    result = inspect(tmp_path / "config.json")
    assert result.drafter is None
    assert "drafter: none" in result.as_text()


def test_damage_is_raised(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "v4")
    shard = folder / shard_names(folder)[0]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="5 bytes short"):
        inspect(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        inspect(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(tmp_path / "nowhere")
