"""The two checkpoints that other implementations were run on load strictly and say what they are."""

import golden
import numpy as np
import pytest

from v4flash.checkpoint.inspection import inspect
from v4flash.checkpoint.inventory import inventory
from v4flash.checkpoint.loading import load
from v4flash.checkpoint.shards import CheckpointFiles
from v4flash.config import ModelConfig

TENSORS_AND_BYTES = {"v4-tiny": (658, 11_224_708), "v41-tiny": (1542, 13_715_212)}


@pytest.mark.parametrize("name", TENSORS_AND_BYTES)
def test_the_inventory_is_exactly_what_the_files_hold(golden_checkpoint, name):
    path = golden_checkpoint(name)
    files, known = CheckpointFiles.open(path), inventory(ModelConfig.from_file(path))
    assert known.keys() - files.tensors.keys() <= set(golden.IMAGE_MARKERS)
    assert {name: (info.dtype, info.shape) for name, info in files.tensors.items()} == {
        name: (tensor.dtype, tensor.shape)
        for name, tensor in known.items()
        if name not in golden.IMAGE_MARKERS
    }
    result = inspect(path)
    assert (result.tensors, result.data_bytes) == TENSORS_AND_BYTES[name]
    assert (result.missing, result.unexpected, result.mismatched) == ([], [], [])


@pytest.mark.parametrize("name", TENSORS_AND_BYTES)
def test_stacked_experts_keep_their_order(golden_checkpoint, name):
    path, layer = golden_checkpoint(name), golden.layers(name)[-1]
    files, model = CheckpointFiles.open(path), load(path).model
    stacked = np.asarray(model.backbone.layers[layer].ffn.experts.w2.weight[...])
    assert stacked.any()
    for expert in range(stacked.shape[0]):
        published = files.tensor(f"layers.{layer}.ffn.experts.{expert}.w2.weight")
        np.testing.assert_array_equal(stacked[expert], published.view(np.uint8))


def test_the_small_engram_map(golden_checkpoint):
    ids = np.arange(1024)
    expected = np.where(ids < 800, ids, (7 * ids) % 800)
    np.testing.assert_array_equal(load(golden_checkpoint("v41-tiny")).model.backbone.token_map[...], expected)
