"""Plans: every byte has one place, as many hot experts as fit, and what cannot hold says what is short."""

import dataclasses
import json

import numpy as np
import pytest

from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.errors import CapacityError, UsageError
from v4flash.placement import statistics
from v4flash.placement.cache import SPARE
from v4flash.placement.statistics import DECIDE, JUDGE, Counts, RoutingStatistics, Text
from v4flash.profile import budget, floor, machines, plan
from v4flash.profile.machines import GIB, machine


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_file(budget.configuration(name))


@pytest.fixture(scope="module")
def flash():
    return config_of("v4-flash-0731")


@pytest.fixture(scope="module")
def successor():
    return config_of("v4.1-flash")


@pytest.mark.parametrize("devices", ["139,128h", "139,139", "275", *machines.names()])
def test_every_byte_has_one_place(flash, devices):
    found = plan.plan(flash, machine(devices), 65536, 5)
    weights = sum(floor.stored_bytes(parameter) for parameter in floor.parameters(flash))
    behind = found.bytes_behind(1) + found.bytes_behind(2)
    assert found.first_bytes + behind - found.parts["state"] - found.parts.get(plan.SLOTS, 0) == weights


def test_slots_for_cold_experts_take_room_where_these_lie_in_host_memory(flash):
    hosted, alone, peer = (
        plan.plan(flash, machine(sizes), 65536, 5) for sizes in ("139,128h", "275", "139,139")
    )
    assert hosted.parts[plan.SLOTS] == SPARE * hosted.layers * hosted.expert
    assert hosted.hot == peer.hot - SPARE
    assert plan.SLOTS not in alone.parts and plan.SLOTS not in peer.parts


def test_as_many_experts_are_hot_as_fit(flash):
    chosen = machine("139,128h")
    found = plan.plan(flash, chosen, 65536, 5)
    room = chosen.memories[0].size - plan.RESERVED
    assert found.first_bytes <= room < found.first_bytes + found.layers * found.expert
    assert 200 < found.hot < flash.n_routed_experts
    more = plan.plan(flash, machine("145,128h"), 65536, 5)
    assert more.hot > found.hot and more.choice.cold < found.choice.cold
    choice, spread = found.choice, 1 - found.hot / found.experts
    assert 0 < choice.cold < choice.distinct * spread, "popular experts are the hot ones"
    assert 0 < choice.share < spread


def test_nothing_is_cold_where_everything_fits(flash):
    found = plan.plan(flash, machine("275"), 65536, 5)
    assert (found.hot, found.choice.cold, found.choice.share) == (flash.n_routed_experts, 0, 0)
    assert found.bytes_behind(1) == 0


def test_tables_lie_in_host_memory_where_there_is_some(successor):
    found = plan.plan(successor, machine("139,512h"), 65536, 5)
    assert found.tables[1] == 1 and found.tables[0] > 100 * GIB and "n-gram tables" not in found.parts
    found = plan.plan(successor, machine("139,160,256h"), 65536, 5)
    assert found.bytes_behind(2) == found.tables[0] and found.hot < successor.n_routed_experts
    with pytest.raises(CapacityError, match="the n-gram tables take"):
        plan.plan(successor, machine("139,160,128h"), 65536, 5)
    with pytest.raises(CapacityError, match="n-gram tables"):
        plan.plan(successor, machine("139,512"), 65536, 5)


def test_what_is_short_would_be_enough(flash):
    with pytest.raises(CapacityError, match="there is no second memory") as problem:
        plan.plan(flash, machine("139"), 65536, 5)
    wanted = float(str(problem.value).split("a second memory of ")[1].split(" GiB")[0])
    assert plan.plan(flash, machine(f"139,{wanted + 0.1}h"), 65536, 5).hot < flash.n_routed_experts
    with pytest.raises(CapacityError, match="find no place"):
        plan.plan(flash, machine(f"139,{wanted - 0.1}h"), 65536, 5)
    with pytest.raises(CapacityError, match="the first device is") as problem:
        plan.plan(flash, machine("10,256h"), 65536, 5)
    short = float(str(problem.value).split("the first device is ")[1].split(" GiB")[0])
    assert plan.plan(flash, machine(f"{10 + short + 0.1},256h"), 65536, 5).hot == flash.num_experts_per_tok


def test_what_would_fit_is_said(successor):
    """As many experts a layer as the message says find a place, and no more."""
    with pytest.raises(CapacityError, match="so 366 experts a layer have a place .342 with --experts peer"):
        plan.plan(successor, machine("h200-x2"), 65536, 5)
    for experts, fits in ((366, True), (367, False)):
        smaller = dataclasses.replace(successor, n_routed_experts=experts)
        if fits:
            assert plan.plan(smaller, machine("h200-x2"), 65536, 5).hot < experts
        else:
            with pytest.raises(CapacityError):
                plan.plan(smaller, machine("h200-x2"), 65536, 5)


def test_largest_context_is_the_last_that_fits(flash):
    memories = machine("31,160h")
    largest = plan.largest_context(flash, memories)
    assert 0 < largest < flash.max_position_embeddings
    plan.plan(flash, memories, largest, 5)
    with pytest.raises(CapacityError):
        plan.plan(flash, memories, largest + 1024, 5)


@pytest.mark.parametrize(("context", "k"), [(1, 5), (1 << 30, 5), (65536, 8)])
def test_contexts_and_drafts_out_of_range_are_refused(flash, context, k):
    with pytest.raises(UsageError):
        plan.plan(flash, machine("139,128h"), context, k)


def test_a_link_costs_what_it_carries(flash):
    made = plan.document("v4-flash-0731", flash, machine("139,128h"), 65536, 5)
    whole, fetched = (time["milliseconds"] for time in made["floors"])
    away, link = made["cold_experts"]["bytes"], made["rates"]["host_link"]["bytes_per_second"]
    assert fetched - whole == pytest.approx(1e3 * away * (1 / link - 1 / 4.3e12), rel=1e-3)
    peer = plan.document("v4-flash-0731", flash, machine("139,139"), 65536, 5)["floors"][1]
    assert whole * 0.8 < peer["milliseconds"] < fetched


def test_the_command_prints_a_plan(capsys):
    arguments = ["plan", "--config", "v4.1-flash", "--devices", "139,512h", "--ctx", "32768", "--k", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (
        "n-gram tables" in text
        and "experts a layer" in text
        and "(measured: copies of a large array on an H200" in text
    )
    assert "modelled: a popularity" in text
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == plan.SCHEMA and made["context"] == 32768
    assert made["first_bytes"] + made["reserved"]["bytes"] <= made["memories"][0]["bytes"]


def counts(config: ModelConfig, rows: int, seed: int) -> Counts:
    """Rows that like some experts, other ones in every layer."""
    random = np.random.default_rng(seed)
    likes = np.random.default_rng(1).gumbel(size=(config.num_hidden_layers, 1, config.n_routed_experts))
    scores = random.gumbel(size=(config.num_hidden_layers, rows, config.n_routed_experts)) + 2 * likes
    chosen = np.argpartition(-scores, config.num_experts_per_tok, axis=2)[:, :, : config.num_experts_per_tok]
    return Counts.of(chosen, config.n_routed_experts)


@pytest.fixture(scope="module")
def counted(flash):
    texts = Text("a", "00", 120, DECIDE), Text("b", "01", 90, JUDGE)
    return RoutingStatistics(
        statistics.identity(flash), "ff", texts, counts(flash, 120, 2), counts(flash, 90, 3)
    )


def test_counts_take_the_place_of_the_model(flash, counted):
    made = plan.document("v4-flash-0731", flash, machine("139,128h"), 65536, 5, counted)
    modelled = plan.document("v4-flash-0731", flash, machine("139,128h"), 65536, 5)
    hot = counted.hot(made["hot_experts"])
    assert made["hot_experts"] == modelled["hot_experts"], "what fits does not depend on what is chosen"
    assert made["cold_experts"]["value"] == pytest.approx(counted.judge.distinct(6, ~hot), abs=1e-3)
    assert made["cold_routes"]["value"] == pytest.approx(
        (1 - counted.judge.share(hot)) * 6 * 6 * flash.num_hidden_layers, abs=0.05
    )
    assert made["routing"] == {"label": "measured", "source": "90 rows of text, out of sample"}
    labels = {
        name: made[name]["label"]
        for name in ("distinct_experts", "cold_experts", "cold_routes", "step_bytes")
    }
    assert labels.pop("step_bytes") == "modelled", "the drafter's experts and the caches are"
    assert set(labels.values()) == {"measured"} and {time["label"] for time in made["floors"]} == {"modelled"}
    assert {modelled[name]["label"] for name in labels} == {"modelled"}
    more = (
        made["distinct_experts"]["value"] - modelled["distinct_experts"]["value"]
    ) * flash.num_hidden_layers
    grown = made["step_bytes"]["value"] - modelled["step_bytes"]["value"]
    assert grown == pytest.approx(more * made["expert"]["bytes"], rel=1e-2)


def test_a_single_text_is_said_to_be_in_sample(flash, counted):
    alone = dataclasses.replace(counted, judge=None)
    made = plan.document("v4-flash-0731", flash, machine("139,128h"), 65536, 5, alone)
    assert made["routing"]["source"] == "120 rows of text, in sample, for a single text was counted"
    short = dataclasses.replace(alone, decide=counts(flash, 5, 2))
    with pytest.raises(UsageError, match="texts shorter than 6 rows"):
        plan.plan(flash, machine("139,128h"), 65536, 5, short)


def test_the_command_plans_by_counts_of_the_same_model_only(flash, counted, tmp_path, capsys):
    file = tmp_path / "stats.json"
    counted.write(file)
    arguments = ["plan", "--devices", "139,512h", "--stats", str(file)]
    assert main([*arguments, "--config", "v4-flash-0731"]) == 0
    assert "(measured: 90 rows of text, out of sample)" in capsys.readouterr().out
    assert main([*arguments, "--config", "v4.1-flash"]) == 2
    said = capsys.readouterr().err
    assert "counts another model: it has family deepseek_v4, layers 43" in said and said.count("\n") == 1
    assert main([*arguments[:-1], str(tmp_path / "absent"), "--config", "v4-flash-0731"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_counts_of_other_weights_are_refused(tmp_path, capsys):
    """A configuration alone cannot tell two checkpoints of one shape apart; a folder with weights can."""
    config = ModelConfig.from_file("demo")
    made = RoutingStatistics(
        statistics.identity(config), "ff", (Text("a", "00", 20, DECIDE),), counts(config, 20, 2), None
    )
    made.write(tmp_path / "stats.json")
    arguments = [
        "plan",
        "--devices",
        "139,128h",
        "--ctx",
        "4096",
        "--stats",
        str(tmp_path / "stats.json"),
        "--config",
    ]
    assert main([*arguments, "configs/models/demo.json"]) == 0
    capsys.readouterr()
    assert main([*arguments, "demo"]) == 2
    assert "counts other weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", machines.names())
def test_the_command_takes_the_name_of_a_machine(name, capsys):
    assert main(["plan", "--config", "v4-flash-0731", "--devices", name, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["machine"] == machine(name).about
    for figure in (*made["memories"], *made["rates"].values()):
        assert figure["label"] in machines.LABELS and figure["source"]


def test_an_unequal_second_device_takes_its_own_time(successor):
    made = plan.document("v4.1-flash", successor, machine("gb300-rtx-pro-6000"), 65536, 5)
    assert made["third_bytes"] == made["n_gram_tables"]["bytes"] and made["second_bytes"] > 0
    near, far = (time["milliseconds"] for time in made["floors"])
    waits = 1e3 * successor.num_hidden_layers * made["rates"]["exchange"]["seconds_per_layer"]
    cold = made["cold_experts"]["bytes"]
    beside = near - 1e3 * cold / made["rates"]["memory"]["bytes_per_second"]
    there = 1e3 * cold / made["rates"]["second_memory"]["bytes_per_second"]
    assert far == pytest.approx(max(beside, there) + waits, abs=2e-3)


def test_the_command_says_what_is_short(capsys):
    assert main(["plan", "--config", "v4-flash-0731", "--devices", "139"]) == 4
    assert "find no place" in capsys.readouterr().err
    assert main(["plan", "--config", "v4-flash-0731", "--devices", "lots"]) == 2
