"""Reasoning and content are told apart wherever the pieces fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v4flash.text import Piece, ReasoningSplitter, split_reasoning

# (answer, thinking, reasoning, content, unfinished)
CASES = [
    ("<think>a</think>b", True, "a", "b", False),
    ("<think>a</think>b", False, "a", "b", False),
    ("a</think>b", True, "a", "b", False),
    ("b", False, "", "b", False),
    ("<think>a", True, "a", "", True),
    ("<think>a", False, "a", "", True),
    ("a", True, "a", "", True),
    ("", True, "", "", True),
    ("", False, "", "", False),
    ("</think>b", True, "", "b", False),
    ("x <think>y</think>z", True, "x <think>y", "z", False),
    ("1 </thin 2</think>3 < 4", True, "1 </thin 2", "3 < 4", False),
    ("tail <", False, "", "tail <", False),
    ("tail </thin", True, "tail </thin", "", True),
]


def stream(pieces, thinking):
    splitter = ReasoningSplitter(thinking)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    assert splitter.reasoning == "".join(p.text for p in parts if p.part == "reasoning")
    assert splitter.content == "".join(p.text for p in parts if p.part == "content")
    return splitter


@pytest.mark.parametrize(("answer", "thinking", "reasoning", "content", "unfinished"), CASES)
def test_whole_and_one_character_at_a_time(answer, thinking, reasoning, content, unfinished):
    assert split_reasoning(answer, thinking) == (reasoning, content, unfinished)
    splitter = stream(list(answer), thinking)
    assert (splitter.reasoning, splitter.content, splitter.unfinished) == (reasoning, content, unfinished)


@pytest.mark.parametrize(
    ("answer", "thinking", "content", "stray"),
    [
        ("</think>hi</think>", False, "hi", 2),
        ("a</think>b</think>c", True, "bc", 1),
        ("a<think>b</think>c", False, "abc", 2),
    ],
)
def test_tags_in_the_content_are_dropped_and_counted(answer, thinking, content, stray):
    splitter = stream([answer], thinking)
    assert (splitter.content, splitter.stray_tags, splitter.unfinished) == (content, stray, False)


def test_text_is_released_before_the_tag_is_decided():
    splitter = ReasoningSplitter(thinking=True)
    assert splitter.push("so 1 </th") == [Piece("reasoning", "so 1 ")]
    assert splitter.push("ink>\n") == [Piece("content", "\n")]


@given(
    fragments=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", "\n"]), max_size=10),
    size=st.integers(1, 9),
    thinking=st.booleans(),
)
def test_result_does_not_depend_on_the_pieces(fragments, size, thinking):
    answer = "".join(fragments)
    cut = stream([answer[at : at + size] for at in range(0, len(answer), size)], thinking)
    whole = stream([answer], thinking)
    for name in ("reasoning", "content", "unfinished", "stray_tags"):
        assert getattr(cut, name) == getattr(whole, name)
