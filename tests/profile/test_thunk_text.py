"""The list of launches as a tree, and the launches of a step."""

import pytest

from v4flash.profile import thunk_text

DUMP = """001: kCopy          [source        | next=002 (1)] kCopy
002: kCustomKernel  [prev=001 (1)  | next=020 (1)] loop_add_fusion grid: [1, 1, 1] threads: [8, 1, 1]
020: kConditional   [prev=002 (1)  | next=000 (1)]   
  false_branch:
  true_branch:
    000: kCommandBuffer [source | next=006 (1)] 
        003: kCustomKernel [source       | next=004 (1)] a grid: [1, 1, 1] threads: [8, 1, 1]
        004: kMemzero      [prev=003 (1) | sink        ] kMemzero
    006: kWhile         [prev=000 (1) | next=000 (1)]       
condition:
        007: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        008: kCustomKernel [source       | next=009 (1)] b grid: [1, 1, 1] threads: [8, 1, 1]
        009: kWhile        [prev=008 (1) | sink        ] 
condition:
            010: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]
          body:
            011: kCustomKernel [source | sink] c grid: [1, 1, 1] threads: [8, 1, 1]
    012: kAsyncStart   [prev=006 (1) | sink        ] stream=computation_stream[0], async_id=12
        013: kDynamicSliceFusion [source | sink] params=1, results=1
            014: kCopy [source | sink] kCopy
    015: kAsyncDone    [source       | sink        ] async_id=12
000: kCommandBuffer [prev=020 (1) | sink] 
    016: kCustomCall [source | sink] kCustomCall
    017: kDynamicSliceFusion [source | sink] params=2, results=1
"""
NAMES = "\n".join(
    f'thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}'
    for number, name in [(2, "loop_add_fusion.7"), (6, "outer"), (9, "inner"), (16, "call.3"), (20, "cond.1")]
)
TRIPS = {"outer": 3, "inner": 5}


@pytest.fixture(scope="module")
def thunks():
    return thunk_text.parse(DUMP, 'profile_annotation: "command_buffer_1"\n' + NAMES)


def test_tree_follows_the_indentation(thunks):
    assert [thunk.kind for thunk in thunks] == ["kCopy", "kCustomKernel", "kConditional", "kCommandBuffer"]
    branches = thunks[2].parts
    assert branches["false_branch"] == []
    assert [t.kind for t in branches["true_branch"]] == [
        "kCommandBuffer", "kWhile", "kAsyncStart", "kAsyncDone"
    ]  # fmt: skip
    outer = branches["true_branch"][1]
    assert {label: len(part) for label, part in outer.parts.items()} == {"condition": 1, "body": 2}
    assert len(list(thunk_text.every(thunks))) == 19


def test_launches_get_the_names_of_their_instructions(thunks):
    assert [thunk.name for thunk in thunks] == ["", "loop_add_fusion.7", "cond.1", ""]
    assert thunks[3].parts[""][0].name == "call.3"


def test_a_launch_knows_the_frames_that_are_its_own(thunks):
    apart = thunks[2].parts["true_branch"][2]
    sliced = apart.parts[""][0]
    copy = sliced.parts[""][0]
    assert (copy.owner, sliced.owner, apart.owner) == (sliced, apart, None)
    assert thunks[3].parts[""][0].owner is None, "a command buffer is no frame of one launch"


def test_loops_multiply_and_counted_loops_skip_their_condition(thunks):
    launches = list(thunk_text.walk(thunks, TRIPS.get))
    assert [launch.times for launch in launches] == [1, 1, 1, 1, 3, 15, 1, 1, 1]
    # outside, a, b three times, c fifteen times, the call, and the slice that encloses nothing
    assert thunk_text.kernels(launches) == 1 + 1 + 3 + 15 + 1 + 1
    assert launches[5].inside == ("cond.1", "outer", "inner")


def test_loops_of_unknown_length_count_once_with_their_condition(thunks):
    launches = list(thunk_text.walk(thunks, {}.get))
    assert thunk_text.kernels(launches) == 1 + 1 + 2 + 2 + 1 + 1


def test_the_shortest_branch_may_be_empty(thunks):
    launches = list(thunk_text.walk(thunks, TRIPS.get, lambda name: -1 if name != "cond.1" else 0))
    assert thunk_text.kernels(launches) == 3


def test_roles(thunks):
    roles = {thunk.kind: thunk.role for thunk in thunk_text.every(thunks)}
    assert roles["kMemzero"] == "memset" and roles["kCopy"] == "copy"
    assert roles["kAsyncDone"] == "silent" and roles["kCustomCall"] == "kernel"


def test_cuts_are_counted_between_graphs(thunks):
    # launches outside, a graph, the loops, a graph
    assert thunk_text.graph_cuts(thunks) == 3
    assert thunk_text.graph_cuts(thunks[3:]) == 0
    assert thunk_text.graph_cuts([thunks[3], thunks[3]]) == 1
    assert thunk_text.graph_cuts([]) == 0


def test_the_host_launches_graphs_whole(thunks):
    # copy, kernel, graph, b and c of the loops, the copy of a slice, graph
    assert thunk_text.host_launches(thunks, TRIPS.get) == 1 + 1 + 1 + 3 + 15 + 1 + 1


def test_sums_over_devices_are_neither_kernels_nor_part_of_a_graph():
    text = """000: kCommandBuffer [source | next=002 (1)] 
    001: kCustomKernel [source | sink] a grid: [1, 1, 1] threads: [8, 1, 1]
002: kAllReduce [prev=000 (1) | next=000 (1)] 
000: kCommandBuffer [prev=002 (1) | next=004 (1)] 
    003: kCustomKernel [source | sink] b grid: [1, 1, 1] threads: [8, 1, 1]
004: kAsyncStart [prev=000 (1) | sink] async_id=12
    005: kAllReduce [source | sink] 
006: kAsyncDone [source | sink] async_id=12
"""
    thunks = thunk_text.parse(text, "")
    launches = list(thunk_text.walk(thunks, lambda name: None))
    assert [launch.thunk.role for launch in launches] == ["kernel", "collective", "kernel", "collective"]
    assert thunk_text.kernels(launches) == 2
    assert thunk_text.graph_cuts(thunks) == 3
    assert thunk_text.host_launches(thunks, lambda name: None) == 4
