"""The report of small programs that were really compiled, for both targets, without a GPU."""

import pytest
from doubling_kernel import doubling_kernel

from v4flash.profile import executable_report
from v4flash.profile.executable_report import LARGE, report, scope_of

MEGABYTES_DECODED = 4  # [2048, 1024] in bfloat16
TRITON_CALLS = 3  # one of them reads a slice of a larger array, and stands inside a fusion for that
TARGETS = ("h200", "gb300")


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.fixture
def found(compiled, target, state_bytes):
    return report(compiled(target), state_bytes)


def test_only_the_decoded_weight_counts_as_copied(found):
    assert [copy.arguments for copy in found.weight_copies] == [("params.coded",)]
    (copy,) = found.weight_copies
    assert (copy.scope, copy.times) == ("verify/layer_0/attention", 1)
    assert copy.bytes == MEGABYTES_DECODED << 20


def test_donated_state_stays_in_place(compiled, target, found, state_bytes):
    assert found.aliased_bytes == found.state_bytes == state_bytes
    assert found.state_copies == found.not_in_place == ()
    kept = report(compiled(target, donated=False), state_bytes)
    assert (kept.aliased_bytes, kept.not_in_place) == (0, ("stream.cache",))
    assert [copy.arguments for copy in kept.state_copies] == [("stream.cache",)]
    assert kept.state_copies[0].bytes == state_bytes > LARGE


def test_every_trip_of_a_loop_counts(compiled, target, found, state_bytes):
    longer = report(compiled(target, trips=12), state_bytes)
    body, rest = divmod(longer.kernels_per_step - found.kernels_per_step, 12 - 7)
    assert body > 0 and rest == 0
    assert longer.kernels == found.kernels < found.kernels_per_step
    assert longer.kernels_by_scope["verify/layer_0/ffn"] == found.kernels_by_scope["verify/layer_0/ffn"]
    # The loop is no part of a graph: the host turns it.
    assert longer.host_launches_per_step - found.host_launches_per_step == 12 - 7


def test_branches_give_the_range(found):
    assert found.kernels_at_least < found.kernels_per_step


def test_scopes_add_up(found):
    assert sum(found.kernels_by_scope.values()) == found.kernels_per_step
    assert sum(found.kernels_by_kind.values()) == found.kernels_per_step
    assert {"verify/layer_0/attention", "verify/layer_0/ffn", "reject", "commit"} <= set(
        found.kernels_by_scope
    )
    assert found.kernels_by_part["verify/layer/ffn"] == found.kernels_by_scope["verify/layer_0/ffn"]


def test_our_triton_kernels_are_counted_and_assembled(compiled, target, found, state_bytes):
    name = doubling_kernel.fn.__name__
    assert found.kernels_by_kind[name] == TRITON_CALLS
    (binary,) = found.triton
    assert (binary.name, binary.spilled) == (name, 0) and binary.registers > 0
    without = report(compiled(target, triton=False), state_bytes)
    assert without.triton == () and name not in without.kernels_by_kind


def test_branches_are_part_of_the_graph_where_no_loop_is(compiled, target, found, state_bytes):
    straight = report(compiled(target, trips=0), state_bytes)
    assert (straight.command_buffers, straight.graph_cuts, straight.host_launches_per_step) == (1, 0, 1)
    assert straight.kernels_at_least < straight.kernels_per_step
    assert found.graph_cuts > 0


def test_unused_arguments_are_dropped(found):
    assert (found.argument_leaves, found.unused_leaves) == (7, 1)


def test_memory_is_that_of_the_call(found, state_bytes):
    assert found.argument_bytes > state_bytes + (2 + 4 << 20)
    assert found.temp_bytes >= MEGABYTES_DECODED << 20


def test_json_has_plain_values(found):
    values = found.to_json()
    assert values["weight_copies"] == 1 and values["weight_copies_bytes"] == MEGABYTES_DECODED << 20
    assert values["weight_copies_by_argument"] == [
        {
            "part": "verify/layer/attention",
            "arguments": ["params.coded"],
            "copies": 1,
            "bytes": MEGABYTES_DECODED << 20,
        }
    ]
    assert (values["spills"], values["spilled_kernels"], values["triton_kernels"]) == (0, {}, 1)


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("jit(step)/verify/layer_12/attention/while/body/closed_call/div", "verify/layer_12/attention"),
        (
            "jit(step)/draft/cond/branch_1_fun/draft_stage_0/ffn/jit(_where)/select_n",
            "draft/draft_stage_0/ffn",
        ),
        ("jit(step)/verify/head/td,vd->tv/dot_general", "verify/head"),
        ("jit(step)/add", ""),
        ("", ""),
    ],
)
def test_scopes_leave_control_flow_and_primitives_out(path, scope):
    assert scope_of(path) == scope


def test_a_loop_traced_for_another_layer_counts_where_it_runs():
    narrowed = executable_report._narrowed
    assert narrowed("verify/layer_1/ffn", "verify/layer_0/attention") == "verify/layer_1/ffn"
    assert narrowed("verify", "verify/layer_0") == "verify/layer_0"
    assert narrowed("verify/layer_1", "verify/layer_10/ffn") == "verify/layer_1"
    assert narrowed("", "draft") == "draft"
