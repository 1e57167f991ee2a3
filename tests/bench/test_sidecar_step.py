"""A step whose cold experts a second device computes: what is cut, what is chosen, and a small one timed."""

import json

import command_apart
import numpy as np
import pytest
from several_devices import QUICK, apart
from tiny_step import tiny_json

from v4flash.bench import cold_alone, random_weights, sidecar_step
from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.model.experts import NOWHERE
from v4flash.profile import budget


@pytest.mark.parametrize("name", ["v4-flash-0731", "v4.1-flash"])
def test_a_model_is_cut_behind_its_first_layers(name):
    config = ModelConfig.from_file(budget.configuration(name))
    cut = random_weights.first_layers(config, 4).validate()
    assert cut.layers == config.layers[:4] and cut.draft.target_layer_ids == (1, 2, 3)
    assert {layer.ratio for layer in cut.layers} <= {layer.ratio for layer in config.layers}
    if config.engram:
        assert cut.engram.layer_ids == (1,) and cut.engram.num_embeddings == config.engram.num_embeddings[:1]
    for count in (2, config.num_hidden_layers + 1):
        with pytest.raises(UsageError, match="expected 3 to"):
            random_weights.first_layers(config, count)


def test_the_first_four_layers_of_v4_flash_have_every_kind_of_attention():
    config = ModelConfig.from_file(budget.configuration("v4-flash-0731"))
    kinds = {layer.ratio for layer in config.layers}
    assert {layer.ratio for layer in random_weights.first_layers(config, 4).layers} == kinds


@pytest.mark.parametrize("count", cold_alone.CHOSEN)
@pytest.mark.parametrize("live", [2, 6])
def test_as_many_different_experts_are_chosen_as_asked_for(count, live):
    made = cold_alone.places(count, 30, (8, 6), live, 32)
    chosen = made[made != NOWHERE]
    assert len(np.unique(chosen)) == count and ((chosen >= 30) | (chosen < 4)).all()
    assert (made[live:] == NOWHERE).all() and ((made[:live] != NOWHERE).any(axis=1) == bool(count)).all()


def test_the_command_times_the_step_of_two_devices(tmp_path):
    config = ModelConfig.from_dict(tiny_json(drafter=True))
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    record = apart(
        command_apart.__file__, 2,
        "bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--experts", "sidecar",
        "--hot-experts", "5", "--cold-share", "20", "--layers", "2", "--k", "1", "--context", "200", "--steps", "4",
        "--repeats", "2", "--no-profile", "--json", "--quiet", **QUICK,
    )  # fmt: skip
    assert all(record["checks"].values()) and record["layers"] == 2
    assert record["ratios"] == [layer.ratio for layer in config.layers]
    assert record["second_device"]["platform"] == "cpu" and record["second_device"]["cores"] >= 1
    resident, redirected, cold = record["cells"]
    assert [cell["cell"] for cell in record["cells"]] == list(sidecar_step.CELLS)
    assert resident["cold_per_step"] == redirected["cold_per_step"] == 0 < cold["cold_per_step"] < 8
    assert resident["exposed_microseconds_per_layer"] == 0
    assert all(cell["usable"] and cell["verified"] == 1 for cell in record["cells"])
    assert all(taken > 0 for taken in record["exchange_microseconds"].values())
    for alone in record["second_device_alone"]:
        assert set(alone["milliseconds"]) == {str(count) for count in cold_alone.CHOSEN}


def test_layers_and_backend_are_refused_where_they_mean_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    given = ["bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--device", "cpu"]
    sidecar = ["--experts", "sidecar", "--hot-experts", "5", "--k", "1"]
    for more, code, word in (
        (["--layers", "2"], 2, "--layers needs --experts host or sidecar"),
        ([*sidecar, "--layers", "2", "--backend", "fused"], 2, "one backend, xla"),
        ([*sidecar, "--layers", "3"], 2, "3 layers, expected 1 to 2"),
        ([*sidecar, "--layers", "2", "--context", "200"], 4, "needs a device beside"),
    ):
        assert main([*given, *more]) == code
        assert word in capsys.readouterr().err
