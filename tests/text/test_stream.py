"""Streaming text: whole characters only, and stop strings cut wherever the pieces fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v4flash.errors import UsageError
from v4flash.text import StopMatcher, StreamDecoder

HARD = ["🙂", "👩‍👩‍👧", "𝔘", "한국어", "毕老师", "e\u0301", "a🙂b", "naïve — “quoted”"]


def blocks(items, cuts):
    bounds = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_broken_character_is_ever_released(golden, text, size):
    ids = golden.encode_text(text)
    stream = StreamDecoder(golden)
    pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_character_waits_for_its_last_byte(golden):
    stream = StreamDecoder(golden)
    assert stream.push([23166, 80300]) == "Hi"
    assert stream.push([]) == ""
    assert stream.push([227, 23166]) == "🙂Hi"


def test_character_open_at_the_end_is_marked(golden):
    stream = StreamDecoder(golden, skip={golden.eos_id})
    assert stream.push([80300, golden.eos_id]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push([23166]) == "Hi"


@given(ids=st.lists(st.integers(0, 320), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_stream_equals_decode_for_any_ids_and_blocks(trained, ids, cuts):
    stream = StreamDecoder(trained)
    streamed = "".join(stream.push(block) for block in blocks(ids, cuts)) + stream.flush()
    assert streamed == trained.decode(ids)


def run(stops, pieces):
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["ab", "ST", "OP", "cd"], ("ab", "STOP")),
        (["STOP"], ["abSTO", "Rage"], ("abSTORage", None)),
        (["STOP"], ["SSTOP"], ("S", "STOP")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["\n\n"], ["x\n", "\ny"], ("x", "\n\n")),
        (["🙂"], ["a", "🙂", "b"], ("a", "🙂")),
        (["abcd", "bc"], ["abcd"], ("a", "bc")),
        (["c", "abc"], ["xabc"], ("x", "abc")),
        ([], ["anything"], ("anything", None)),
    ],
)
def test_stop_strings(stops, pieces, expected):
    assert run(stops, pieces) == expected
    assert run(stops, list("".join(pieces))) == expected


def test_text_before_a_possible_stop_is_released_at_once():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abcS") == "abc"
    assert matcher.push("x") == "Sx"
    assert matcher.push("STOP and more") == ""
    assert matcher.stopped == "STOP"
    assert matcher.push("later") == "" == matcher.flush()


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_stops_do_not_depend_on_the_pieces(text, stops, cuts):
    kept, stopped = run(stops, blocks(text, cuts))
    assert (kept, stopped) == run(stops, [text])
    assert not any(stop in kept for stop in stops)
    assert text.startswith(kept + (stopped or ""))
    assert stopped is not None or kept == text


def test_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="a stop string is empty"):
        StopMatcher(["x", ""])
