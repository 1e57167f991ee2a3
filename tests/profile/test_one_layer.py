"""One layer at real shapes, fused by hand: these launches in this order, whatever else changes."""

import re

import pytest

from pallas_kernels import launch
from v4flash.profile import one_layer

ATTENTION = [
    "boundary_and_products", "cache_writes_and_queries", "index_scores", "index_choice", "attention_core",
    "output_projection",
]  # fmt: skip
EXPERTS = ["boundary_and_route", "gate_up", "down"]
COLD_EXPERTS = ["boundary_and_route", "place_experts", "gate_up_tiered", "down_tiered"]
COMPUTED_ONCE = 2  # kernels for rotations, which all layers of a model share


@pytest.mark.parametrize("target", ["h200", "gb300"])
def test_a_layer_launches_what_is_written_here(target):
    found = one_layer.layer("v4-flash-0731", target, "fused")
    by_hand = [name for scope, name in found.kernels if scope and name in {*ATTENTION, *EXPERTS}]
    assert by_hand == ATTENTION + EXPERTS
    assert found.launches("attention") <= len(ATTENTION) + COMPUTED_ONCE
    assert found.launches("ffn") == len(EXPERTS)
    assert found.copied_weights == 0
    assert (
        found.hlo.count(f'custom_call_target="{launch.TARGET}"') == len(by_hand) + 1
    )  # and the last boundary


def test_cold_experts_cost_one_launch_and_no_copy():
    found = one_layer.layer("v4-flash-0731", "h200", "fused", hot=200)
    assert [name for scope, name in found.kernels if scope == "ffn"] == COLD_EXPERTS
    assert found.copied_weights == 0 and found.not_in_place == ()


def test_early_fetches_wait_for_their_plan_alone_and_no_other_launch_for_them():
    found = one_layer.layer("v4-flash-0731", "h200", "fused", hot=200, early=True)
    by_hand = [name for scope, name in found.kernels if scope == "ffn" and "fusion" not in name]
    assert by_hand == [*COLD_EXPERTS[:2], "fetch_experts", *COLD_EXPERTS[2:]]
    assert found.copied_weights == 0 and found.not_in_place == ()
    launches = {
        name: (number, before, behind)
        for number, before, behind, name in re.findall(
            r"(\d+): kCustomKernel \[prev=(\d+) *\(\d+\) *\| next=(\d+) *\(\d+\) *\] (\w+)", found.thunks
        )
    }
    number, before, behind = launches["fetch_experts"]
    assert before == launches["plan_fetches"][0] and behind == launches["gate_up_tiered"][0]
    assert int(before) < int(launches["attention_core"][0]) < int(number)


def test_plain_modules_fetch_cold_experts_in_loops_and_copy_no_stack():
    found = one_layer.layer("v4-flash-0731", "h200", "xla", hot=200)
    loops = {scope for scope in re.findall(r'op_name="([^"]*)"', found.hlo) if scope.endswith("/cold/while")}
    assert len(loops) == 1
    # Hot, cold and spare ones: XLA decodes what it gathers of them, but moves none as a whole.
    assert re.search(r"u8\[56,2048,2048\]", found.hlo) and re.search(r"u8\[8,2048,2048\]", found.hlo)
    assert not re.search(r"= u8\[(200|56|8),\d+,\d+\]\S* copy\(", found.hlo)
    assert found.not_in_place == ()
