"""The least bytes of a step, against counts made by hand from the published shapes."""

import dataclasses
from pathlib import Path

import pytest

from v4flash.checkpoint.inventory import parameters
from v4flash.config import ModelConfig
from v4flash.profile import floor, targets
from v4flash.profile.floor import CORRELATED, GIVEN, UNIFORM, Routing

CONFIGS = Path(floor.__file__).resolve().parents[3] / "configs" / "models"
# FP4: half a byte per weight and one scale byte per 32; three matrices of hidden by intermediate size.
EXPERT_BYTES = {
    "v4-flash-0731": 3 * 4096 * 2048 * (1 / 2 + 1 / 32),
    "v4.1-flash": 3 * 5120 * 2304 * (1 / 2 + 1 / 32),
}
# Everything the target reads but its experts and caches, added up from the published shapes by hand, in GB; the
# hand count leaves out norms, sinks and scales' rounding up, which are under a thousandth.
DENSE_GIGABYTES = {"v4-flash-0731": 7.76, "v4.1-flash": 8.52}
HAND_COUNT = 2e-3
# Two thousand samples leave the mean of about 25 distinct experts uncertain by a few hundredths.
SAMPLING = 0.3
NAMES = tuple(EXPERT_BYTES)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def config(name):
    return ModelConfig.from_file(CONFIGS / f"{name}.json")


def part(found, name: str) -> float:
    return next((part.bytes for part in found.parts if part.name == name), 0.0)


def test_experts_count_their_distinct_ones(config, name):
    found = floor.floor(config, 5, 2048, Routing(25.5, 11.0, GIVEN, "given"))
    assert part(found, "experts") == pytest.approx(config.num_hidden_layers * 25.5 * EXPERT_BYTES[name])
    assert part(found, "drafter experts") == pytest.approx(config.draft.stages * 11.0 * EXPERT_BYTES[name])
    assert {p.label for p in found.parts if "experts" in p.name} == {GIVEN}


def test_dense_parts_match_the_count_by_hand(config, name):
    found = floor.floor(config, 0, 2048)
    dense = sum(p.bytes for p in found.parts if p.name not in ("experts", "cache", "drafter"))
    assert dense / 1e9 == pytest.approx(DENSE_GIGABYTES[name], rel=HAND_COUNT)


def test_with_every_expert_the_floor_is_the_checkpoint(config):
    """All weights once, but for tables of which a step reads rows, and the head that is read twice."""
    everything = Routing(config.n_routed_experts, config.draft.n_routed_experts, GIVEN, "given")
    found = floor.floor(config, 5, 2048, everything)
    tables = {"embed", "tid2eid", "token_map"}
    whole = sum(floor.stored_bytes(p) for p in parameters(config) if not tables & set(p.path))
    head = config.vocab_size * config.hidden_size * 2
    read = found.bytes - part(found, "cache")
    assert 0 < read - whole - head < 1e-3 * whole


def test_nothing_drafted_leaves_the_context_rows_of_the_drafter(config):
    none, five = floor.floor(config, 0, 2048), floor.floor(config, 5, 2048)
    assert 0 < part(none, "drafter") < part(five, "drafter")
    assert part(none, "drafter experts") == 0
    assert part(five, "head") == 2 * part(none, "head")
    without = floor.floor(dataclasses.replace(config, draft=None), 0, 2048)
    assert part(without, "drafter") == 0


def test_longer_contexts_read_more_cache_and_nothing_else(config):
    short, long = floor.floor(config, 5, 2048), floor.floor(config, 5, 65536)
    assert part(long, "cache") > part(short, "cache")
    assert long.bytes - part(long, "cache") == pytest.approx(short.bytes - part(short, "cache"))
    assert part(long, "cache") < 5e-3 * long.bytes


def test_index_keys_of_candidate_layers_are_bounded():
    config = ModelConfig.from_file(CONFIGS / "v4.1-flash.json")
    member = next(layer for layer in config.layers if layer.candidate == "member")
    assert floor._keys(config, member, 10**6) == config.candidate_topk_blocks * config.candidate_block_size
    assert floor._keys(config, member, 1000) == 1000


@pytest.mark.parametrize(
    ("experts", "chosen", "rows", "expected"), [(256, 6, 1, 6), (256, 6, 6, 34.0), (384, 6, 10, 56.0)]
)
def test_uniform_choice(experts, chosen, rows, expected):
    assert floor.uniform_experts(experts, chosen, rows) == pytest.approx(expected, abs=0.05)


def test_correlated_choice_lies_between_repeating_and_uniform():
    found = [floor.correlated_experts(256, 6, rows) for rows in (1, 6)]
    assert found[0] == 6
    # Public counts of six rows lie between 22 and 30; an independent sampling of this model gave 25.5.
    assert found[1] == pytest.approx(25.5, abs=SAMPLING)
    assert found[1] < floor.uniform_experts(256, 6, 6)
    assert floor.correlated_experts(256, 6, 6) == found[1], "sampling is seeded"


@pytest.mark.parametrize("model", [UNIFORM, CORRELATED])
def test_times_name_where_the_bandwidth_comes_from(config, model):
    target = targets.target("h200")
    found = floor.floor(config, 5, 65536, model)
    document = found.to_json(target)
    times = {time["bandwidth_label"]: time["milliseconds"] for time in document["times"]}
    assert times["published"] == pytest.approx(1e3 * found.bytes / target.bandwidth)
    assert times["measured"] > times["published"]
    assert document["routing"]["label"] == "modelled"
    assert sum(part["bytes"] for part in document["parts"]) == pytest.approx(document["bytes"], abs=50)


def test_unmeasured_target_has_no_measured_time(config):
    document = floor.floor(config, 5, 65536).to_json(targets.target("gb300"))
    assert [time["bandwidth_label"] for time in document["times"]] == ["published"]
