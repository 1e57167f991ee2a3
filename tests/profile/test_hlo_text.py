"""Reading HLO text: sizes, attributes, and where a value comes from."""

import pytest

from v4flash.profile import hlo_text

MODULE = r"""HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias), {1}: (3, {}, must-alias) }

%fused_inner (p.1: f32[8,4]) -> f32[8] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%p.1, %p.1), dimensions={1}, to_apply=%add
}

%fused_outer (p.2: f32[8,4]) -> f32[8] {
  %p.2 = f32[8,4]{1,0} parameter(0)
  ROOT %fusion.1 = f32[8]{0} fusion(%p.2), kind=kCustom, calls=%fused_inner
}

%condition (state.1: LOOPED) -> pred[] {
  %state.1 = LOOPED parameter(0)
  ROOT %less = pred[] compare(%state.1, %state.1), direction=LT
}

%body (state.2: LOOPED) -> LOOPED {
  %state.2 = LOOPED parameter(0)
  %held = f32[512,1024]{1,0} get-tuple-element(%state.2), index=1
  %count = s32[] get-tuple-element(%state.2), index=0
  %changed = f32[4]{0} get-tuple-element(%state.2), index=2
  %used = f32[8]{0} fusion(%held), kind=kInput, calls=%fused_outer, metadata={op_name="jit(step)/verify/add"}
  %next = f32[4]{0} copy(%used)
  ROOT %out = LOOPED tuple(%count, %held, %next)
}

%taken (branch.1: (f32[512,1024])) -> f32[4] {
  %branch.1 = (f32[512,1024]{1,0}) parameter(0)
  %mine = f32[512,1024]{1,0} get-tuple-element(%branch.1), index=0
  ROOT %small = f32[4]{0} fusion(%mine), kind=kLoop, calls=%fused_outer, x={"fusion_backend_config":{"kind":"__triton"}}
}

%passed (branch.2: ()) -> f32[4] {
  %branch.2 = () parameter(0)
  ROOT %nothing = f32[4]{0} constant({1, 2, 3, 4})
}

ENTRY %main.9 (params__w__.1: f32[512,1024], stream_x.1: f32[4]) -> (f32[4], f32[4]) {
  %params__w__.1 = f32[512,1024]{1,0} parameter(0), metadata={op_name="params[\'layers\'][3][\'w\'].value"}
  %stream_x.1 = f32[4]{0} parameter(1), metadata={op_name="stream.x"}
  %flag = pred[] constant(true)
  %view = f32[524288]{0} bitcast(%params__w__.1)
  %start = LOOPED tuple(%flag, %params__w__.1, %stream_x.1)
  %while.4 = LOOPED while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"19"}}
  %given.0 = () tuple()
  %given.1 = (f32[512,1024]{1,0}) tuple(%params__w__.1)
  %cond.1 = f32[4]{0} conditional(%flag, %given.1, %given.0), true_computation=%taken, false_computation=%passed
  %call.1 = f32[4]{0} custom-call(%view), custom_call_target="triton", backend_config={kernel_data = "a\0A\22\5C\0A"}
  %apart = ((f32[512,1024]{1,0:S(5)}, f32[4]{0}), f32[4]{0}, u32[]) fusion-start(%view), calls=%fused_outer
  ROOT %result = (f32[4]{0}, f32[4]{0}) tuple(%cond.1, %call.1)
}
""".replace("LOOPED", "(s32[], f32[512,1024]{1,0}, /*index=2*/f32[4]{0})")


@pytest.fixture(scope="module")
def module():
    return hlo_text.parse(MODULE)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("f32[8,4]{1,0}", [128]),
        ("pred[]", [1]),
        ("(bf16[3]{0}, /*index=1*/f8e4m3fn[5,2]{1,0}, u8[7]{0})", [6, 10, 7]),
        ("s4[3]{0:E(4)}", [2]),
        ("f4e2m1fn[8]{0}", [4]),
        ("f32[0,4]{1,0}", [0]),
        ("()", []),
    ],
)
def test_sizes_follow_from_shapes(shape, sizes):
    assert list(hlo_text.array_bytes(shape)) == sizes


def test_entry_parameters_and_aliases(module):
    assert module.entry == "main.9"
    assert [p.argument for p in module.parameters] == ["params.layers.3.w", "stream.x"]
    assert module.aliased == {1, 3}


def test_attributes_of_instructions(module):
    assert module.find("while.4").trips == 19
    assert module.find("while.4").arrays == (4, 4 * 512 * 1024, 16)
    assert module.find("cond.1").branches == ("taken", "passed")
    assert module.find("used").op_name == "jit(step)/verify/add"
    assert module.find("used").fusion_kind == "kInput"
    assert module.find("small").fusion_kind == "__triton"
    assert module.find("used").trips is None
    assert module.find("apart").arrays == (16, 4)
    assert module.find("call.1").custom_call_target == "triton"


def test_a_kernel_in_a_call_is_unescaped(module):
    assert module.find("call.1").kernel_text == 'a\n"\\\n'


def test_operations_inside_nested_fusions_are_seen(module):
    assert "reduce" in {operation.opcode for operation in module.operations(module.find("used"))}
    assert [operation.name for operation in module.operations(module.find("next"))] == ["next"]


def test_instructions_inside_fusions_are_no_launches(module):
    assert module.find("reduce.1") is None and module.find("fusion.1") is None
    assert module.find("mine") is not None


@pytest.mark.parametrize("value", ["params__w__.1", "view", "held", "mine"])
def test_a_weight_is_found_behind_views_tuples_branches_and_loops(module, value):
    instruction, element = module.source(value)
    assert (instruction.argument, element) == ("params.layers.3.w", 0)


def test_a_value_that_a_loop_changes_has_no_source(module):
    assert module.source("changed") is None


def test_elements_of_results_keep_their_number(module):
    text = MODULE.replace(
        "ROOT %result =", "%picked = f32[4]{0} get-tuple-element(%while.4), index=2\n  ROOT %result ="
    )
    instruction, element = hlo_text.parse(text).source("picked")
    assert (instruction.name, element) == ("while.4", 2)
