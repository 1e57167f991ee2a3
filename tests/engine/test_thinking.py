"""Reasoning and answer are told apart by what was said, whatever was drafted and wherever a block ended."""

import itertools

import pytest
from scripted_model import END, FIRST, scripted_model

from v4flash.engine.language_model import Prompt
from v4flash.text import split_reasoning

DRAFT_LENGTHS = (1, 3, 4, 5, 7, "auto")
CLOSE, CALL = "</think>", "<｜DSML｜function_calls>"
TOOL = [
    CALL, "\n", '<｜DSML｜invoke name="', "weather", '">', "\n", '<｜DSML｜parameter name="', "city",
    '" string="true">', "Paris", "</｜DSML｜parameter>", "\n", "</｜DSML｜invoke>", "\n", "</｜DSML｜function_calls>",
]  # fmt: skip
# One piece is one token; a tag may also come in parts, and a character in two.
SCRIPTS = {
    "answer": [
        "We",
        " add",
        " two",
        " and",
        " two",
        ".",
        " Four",
        CLOSE,
        "2",
        " +",
        " 2",
        " =",
        " 4",
        ".",
        "\n",
    ],
    "tool call": ["I", " need", " the", " weather", ".", CLOSE, "\n", "\n", *TOOL],
    "tag in parts": ["<", "th", "ink>", "a <", " b", "</th", "ink", ">", "yes", "</thin", " no", ".", "!"],
    "opened by itself": [
        "<think>",
        "hm",
        " </",
        "think",
        ">",
        " ",
        CLOSE,
        "x",
        "<think>",
        "y",
        CLOSE,
        "z",
        ".",
    ],
    "never closed": ["a", " b", " c", " d", " <", "/", " e", " f", " g", " h", " i", " j", " k"],
}
# Where the drafter is wrong, and which place it expects there.
DRAFTERS = {
    "perfect": lambda pieces: {},
    "wrong in places": lambda pieces: {at: 0 for at in range(2, len(pieces), 4)},
    "control pieces while thinking": lambda pieces: {
        at: pieces.index(control)
        for at, control in zip(range(0, 5), itertools.cycle([CLOSE, CALL]), strict=False)
        if control in pieces
    },
}
OFFSETS = (0, 1, 3, 6)


def said(model, offset: int, thinking: bool, k: int | str, **options):
    """Everything a caller sees of a generation behind the first `offset` + 1 pieces, and its records."""
    prompt = Prompt(list(range(FIRST, FIRST + offset + 1)), "", thinking)
    generation = model.generate(prompt, k=k, lookup=k == "auto", **options)
    records = list(generation)
    streamed = {part: "" for part in ("reasoning", "content")}
    for record in records:
        for part, text in record.parts:
            streamed[part] += text
    assert (streamed["reasoning"], streamed["content"]) == (generation.reasoning, generation.text)
    statistics = generation.statistics
    seen = (
        generation.reasoning,
        generation.text,
        generation.reasoning_open,
        generation.tokens,
        statistics.finish,
        statistics.generated,
    )
    return seen, records


@pytest.mark.parametrize("thinking", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_answer_is_split_as_without_drafting(name, drafter, thinking):
    pieces = SCRIPTS[name]
    model = scripted_model(pieces, DRAFTERS[drafter](pieces))
    for offset in OFFSETS if drafter == "perfect" else (0, 3):
        expected, _ = said(model, offset, thinking, 0)
        text = "".join(pieces[offset + 1 :])
        assert expected[:3] == split_reasoning(text, thinking)
        assert expected[3:] == (
            [*range(FIRST + offset + 1, FIRST + len(pieces)), END],
            "eos",
            len(pieces) - offset,
        )
        for k in DRAFT_LENGTHS:
            assert said(model, offset, thinking, k)[0] == expected, (offset, k)


def test_reasoning_ends_at_every_place_of_an_accepted_block():
    pieces = SCRIPTS["answer"]
    model, places = scripted_model(pieces), set()
    close = FIRST + pieces.index(CLOSE)
    for offset, k in itertools.product(range(pieces.index(CLOSE)), range(1, 6)):
        _, records = said(model, offset, True, k)
        for record in records[1:]:
            if close in record.tokens:
                # The whole block was accepted, and the tag was a draft unless it is the target's own last token.
                assert record.accepted == len(record.tokens) - 1
                places.add((k, record.tokens.index(close)))
    assert {(k, place) for k in range(1, 6) for place in range(k + 1)} <= places


@pytest.mark.parametrize("thinking", [True, False], ids=["on", "off"])
def test_texts_cut_short_are_split_alike(thinking):
    pieces = SCRIPTS["tool call"]
    model = scripted_model(pieces, {3: 0})
    for options in (
        *({"max_tokens": limit} for limit in range(1, 12)),
        {"stop": ("weather",)},
        {"stop": ("</th",)},
        {"stop": ("\n\n",)},
        {"stop": ("DSML",)},
    ):
        expected, _ = said(model, 0, thinking, 0, **options)
        assert expected[4] in ("length", "stop")
        for k in (1, 4, 5, 7):
            assert said(model, 0, thinking, k, **options)[0] == expected, (options, k)


def test_pieces_are_drafted_as_the_test_says():
    """The drafters are what their names say, so that the tests above mean something."""
    pieces = SCRIPTS["tool call"]
    _, records = said(scripted_model(pieces), 0, True, 5)
    assert all(record.accepted == len(record.drafts) for record in records[1:-1]) and len(records) < 6
    wrong = DRAFTERS["control pieces while thinking"](pieces)
    _, records = said(scripted_model(pieces, wrong), 0, True, 5)
    proposed = [token for record in records for token in record.drafts]
    assert FIRST + pieces.index(CALL) in proposed and records[1].accepted == 0
