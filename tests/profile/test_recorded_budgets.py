"""The budgets in docs/budgets: whole, consistent, and still what the step compiles to."""

import json
from pathlib import Path

import pytest

from v4flash.config import ModelConfig
from v4flash.profile import budget, targets

FOLDER = Path(budget.__file__).resolve().parents[3] / "docs" / "budgets"
FILES = sorted(FOLDER.glob("*.json"))
WANTED = {
    f"{config}-{target}-{backend}"
    for config in ("v4-flash-0731", "v4.1-flash")
    for target in ("h200", "gb300")
    for backend in ("xla", "fused")
} | {"v4.1-flash-h200-xla-peer", "v4.1-flash-h200-fused-peer"}
# XLA decides anew what to fuse whenever a line of the step changes; a table that is further off than this
# describes another step. What is fused by hand must not grow at all.
STALE = 0.02
GROWTH = {"xla": STALE, "fused": 0.0}
COUNTS = (
    "kernels", "kernels_per_step", "kernels_at_least", "host_launches_per_step", "command_buffers", "graph_cuts",
    "weight_copies", "weight_copies_bytes", "argument_leaves", "temp_bytes",
)  # fmt: skip
AGAIN = "make budgets"
MOST_ARGUMENTS = 600  # each costs the host half a microsecond a step
LAUNCHES_A_LAYER = 8  # on average over backbone and drafter
# A sum over devices stands between two graphs; where something can run beside it, its end is another cut.
CUTS_A_LAYER = {"fused": 2.1, "xla": 3}
KERNELS_OF_A_SUM = 2  # which experts are a device's own, and zeros for the other's


# CI compiles the step for two devices every time; the others are compiled with the slow tests.
COMPILED = [
    pytest.param(file.stem, marks=() if file.stem.endswith("fused-peer") else pytest.mark.slow)
    for file in FILES
]


def recorded(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_every_wanted_budget_is_recorded():
    assert WANTED <= {file.stem for file in FILES}


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_recorded_figures_agree_with_each_other(name):
    found = recorded(name)
    assert found["schema"] == budget.SCHEMA
    way = "" if found.get("experts", "resident") == "resident" else f"-{found['experts']}"
    assert name == f"{found['config']}-{found['target']['name']}-{found['backend']}{way}"
    config = ModelConfig.from_file(budget.configuration(found["config"]))
    assert (found["layers"], found["draft_stages"]) == (config.num_hidden_layers, config.draft.stages)
    assert found["target"]["capability"] == targets.target(found["target"]["name"]).capability
    assert (found["k"], found["rows"], found["context"]) == (5, 8, 65536)
    for sums in ("kernels_by_scope", "kernels_by_kind", "kernels_by_part"):
        assert sum(found[sums].values()) == found["kernels_per_step"]
    assert sum(copy["copies"] for copy in found["weight_copies_by_argument"]) == found["weight_copies"]
    layers = {scope.split("/")[1] for scope in found["kernels_by_scope"] if scope.startswith("verify/layer_")}
    assert len(layers) == found["layers"]
    assert found["fits"] == (found["argument_bytes"] + found["temp_bytes"] <= found["target"]["memory"])
    assert found["weight_bytes"] < found["argument_bytes"] * found.get("devices", 1)


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_recorded_steps_keep_their_state_in_place_and_spill_nothing(name):
    found = recorded(name)
    assert found["aliased_bytes"] == found["state_bytes"] and found["not_in_place"] == []
    assert (found["spills"], found["state_copies"]) == (0, 0)


@pytest.mark.parametrize("name", [file.stem for file in FILES if file.stem.endswith("fused")])
def test_the_hand_fused_step_is_one_graph_that_copies_no_weight(name):
    found = recorded(name)
    assert (found["command_buffers"], found["graph_cuts"], found["host_launches_per_step"]) == (1, 0, 1)
    assert found["weight_copies"] == 0
    assert found["argument_leaves"] <= MOST_ARGUMENTS
    by_part = found["kernels_by_part"]
    launches = sum(
        by_part[f"{layers}/{sublayer}"]
        for layers in ("verify/layer", "draft/draft_stage")
        for sublayer in ("attention", "ffn")
    )
    assert launches <= LAUNCHES_A_LAYER * (found["layers"] + found["draft_stages"])


@pytest.mark.parametrize("name", [file.stem for file in FILES if file.stem.endswith("peer")])
def test_two_devices_add_once_a_layer_and_wait_for_nothing_else(name):
    found = recorded(name)
    assert (found["devices"], 2 * found["experts_each"]) == (2, 384)
    assert found["collectives_per_step"] == found["layers"]
    alone = recorded(name.removesuffix("-peer"))
    assert found["graph_cuts"] - alone["graph_cuts"] <= CUTS_A_LAYER[found["backend"]] * found["layers"]


def test_the_sum_costs_two_kernels_a_layer():
    found, alone = recorded("v4.1-flash-h200-fused-peer"), recorded("v4.1-flash-h200-fused")
    added = {part: count - alone["kernels_by_part"][part] for part, count in found["kernels_by_part"].items()}
    assert 0 <= added["verify/layer/ffn"] - KERNELS_OF_A_SUM * found["layers"] <= 2
    assert found["weight_copies"] == found["state_copies"] == 0


@pytest.mark.parametrize("name", COMPILED)
def test_the_real_step_still_compiles_to_its_record(name):
    """The whole step at real shapes, compiled here for a GPU that is not."""
    before = recorded(name)
    experts = before.get("experts", "resident")
    request = budget.Request(
        before["config"], before["target"]["name"], before["backend"], experts, before["k"]
    )
    now = budget.budget(request)
    assert now["aliased_bytes"] == now["state_bytes"] and now["not_in_place"] == []
    assert now["spills"] == now["state_copies"] == 0
    assert now["kernels_by_part"].keys() == before["kernels_by_part"].keys(), AGAIN
    growth = GROWTH[before["backend"]] if experts == "resident" else STALE  # what surrounds a sum is XLA's
    if experts == "peer":
        assert now["collectives_per_step"] == now["layers"]
    for count in COUNTS:
        least, most = before[count] * (1 - STALE), before[count] * (1 + growth)
        assert least <= now[count] <= most, (
            f"{count} was {before[count]}: run `{AGAIN}` and look at the difference"
        )
