"""Plans: every byte has one place, as many hot experts as fit, and what cannot hold says what is short."""

import json

import pytest

from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.errors import CapacityError, UsageError
from v4flash.profile import budget, floor, plan
from v4flash.profile.plan import GIB, Memory, parse_memories


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_file(budget.configuration(name))


@pytest.fixture(scope="module")
def flash():
    return config_of("v4-flash-0731")


@pytest.fixture(scope="module")
def successor():
    return config_of("v4.1-flash")


def test_memories_are_read():
    assert parse_memories("139,128h") == (Memory(139 * GIB), Memory(128 * GIB, True))
    assert parse_memories("80.5") == (Memory(80.5 * GIB),)


@pytest.mark.parametrize("text", ["", "139,", "128h", "1,2,3", "-5", "0", "many", "139 GB"])
def test_other_memories_are_refused(text):
    with pytest.raises(UsageError, match="devices are"):
        parse_memories(text)


@pytest.mark.parametrize("devices", ["139,128h", "139,139", "275"])
def test_every_byte_has_one_place(flash, devices):
    found = plan.plan(flash, parse_memories(devices), 65536, 5)
    weights = sum(floor.stored_bytes(parameter) for parameter in floor.parameters(flash))
    assert found.first_bytes + found.second_bytes - found.parts["state"] == weights


def test_as_many_experts_are_hot_as_fit(flash):
    memories = parse_memories("139,128h")
    found = plan.plan(flash, memories, 65536, 5)
    room = memories[0].size - plan.RESERVED
    assert found.first_bytes <= room < found.first_bytes + found.layers * found.expert
    assert 200 < found.hot < flash.n_routed_experts
    more = plan.plan(flash, parse_memories("145,128h"), 65536, 5)
    assert more.hot > found.hot and more.cold < found.cold
    assert 0 < found.cold < found.distinct * (1 - found.hot / found.experts), (
        "popular experts are the hot ones"
    )


def test_nothing_is_cold_where_everything_fits(flash):
    found = plan.plan(flash, parse_memories("275"), 65536, 5)
    assert (found.hot, found.cold, found.second_bytes) == (flash.n_routed_experts, 0, 0)


def test_tables_lie_in_host_memory_where_there_is_some(successor):
    found = plan.plan(successor, parse_memories("139,512h"), 65536, 5)
    assert found.tables[1] and found.tables[0] > 100 * GIB and "n-gram tables" not in found.parts
    with pytest.raises(CapacityError, match="n-gram tables"):
        plan.plan(successor, parse_memories("139,512"), 65536, 5)


def test_what_is_short_would_be_enough(flash):
    with pytest.raises(CapacityError, match="there is no second memory") as problem:
        plan.plan(flash, parse_memories("139"), 65536, 5)
    wanted = float(str(problem.value).split("a second memory of ")[1].split(" GiB")[0])
    assert plan.plan(flash, parse_memories(f"139,{wanted + 0.1}h"), 65536, 5).hot < flash.n_routed_experts
    with pytest.raises(CapacityError, match="find no place"):
        plan.plan(flash, parse_memories(f"139,{wanted - 0.1}h"), 65536, 5)
    with pytest.raises(CapacityError, match="the first device is") as problem:
        plan.plan(flash, parse_memories("10,256h"), 65536, 5)
    short = float(str(problem.value).split("the first device is ")[1].split(" GiB")[0])
    assert (
        plan.plan(flash, parse_memories(f"{10 + short + 0.1},256h"), 65536, 5).hot
        == flash.num_experts_per_tok
    )


def test_largest_context_is_the_last_that_fits(flash):
    memories = parse_memories("26,160h")
    largest = plan.largest_context(flash, memories)
    assert 0 < largest < flash.max_position_embeddings
    plan.plan(flash, memories, largest, 5)
    with pytest.raises(CapacityError):
        plan.plan(flash, memories, largest + 1024, 5)


@pytest.mark.parametrize(("context", "k"), [(1, 5), (1 << 30, 5), (65536, 8)])
def test_contexts_and_drafts_out_of_range_are_refused(flash, context, k):
    with pytest.raises(UsageError):
        plan.plan(flash, parse_memories("139,128h"), context, k)


def test_a_link_costs_what_it_carries(flash):
    made = plan.document("v4-flash-0731", flash, parse_memories("139,128h"), 65536, 5)
    whole, fetched = (time["milliseconds"] for time in made["floors"])
    away = made["cold_experts"]["bytes"]
    assert fetched - whole == pytest.approx(1e3 * away * (1 / plan.HOST_LINK - 1 / 4.3e12), rel=1e-3)
    peer = plan.document("v4-flash-0731", flash, parse_memories("139,139"), 65536, 5)["floors"][1]
    assert whole * 0.8 < peer["milliseconds"] < fetched


def test_the_command_prints_a_plan(capsys):
    arguments = ["plan", "--config", "v4.1-flash", "--devices", "139,512h", "--ctx", "32768", "--k", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "n-gram tables" in text and "experts a layer" in text and "(measured on H200s)" in text
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == plan.SCHEMA and made["context"] == 32768
    assert made["first_bytes"] + made["reserved"]["bytes"] <= made["memories"][0]["bytes"]


def test_the_command_says_what_is_short(capsys):
    assert main(["plan", "--config", "v4-flash-0731", "--devices", "139"]) == 4
    assert "find no place" in capsys.readouterr().err
    assert main(["plan", "--config", "v4-flash-0731", "--devices", "lots"]) == 2
