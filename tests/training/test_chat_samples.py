"""Conversations made from documents, and the frame around them."""

import random

from v4flash.training.chat_samples import (
    EFFORT_LEVELS,
    Piece,
    Turn,
    chat_encoding,
    conversations,
    described_names,
    frame,
    function_turns,
    plain_markup,
    section_turns,
    turns_of,
)
from v4flash.training.corpus import Document

PAGE = """\
:mod:`stock` --- Keep track of stock
====================================

.. module:: stock
   :synopsis: Stock.

The :mod:`stock` module counts goods that arrive and leave, see :func:`count <stock.count>` for it.

>>> import stock

.. function:: count(goods, *, at=None)

   Return how many ``goods`` there are in the store at a given time, never less than zero.

   .. versionadded:: 3.1

   A second paragraph says that the count is taken at night and not during the day.

Short
-----

Too short.
"""

MODULE = '''\
def double(x):
    """Return twice x.

    More words.
    """
    return x + x  # the sum is as good as the product


def _hidden(x):
    """Return something that nobody should ask for by its name."""
    return x


class Shelf:
    def first(self):
        """Return the first thing on the shelf, or None when it is empty."""
        return self.things[0] if self.things else None
'''


def joined(pieces):
    return "".join(piece.text for piece in pieces)


def test_frame_without_thinking():
    assert joined(frame([Turn("Hi", "Hello")])) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>"
    )


def test_frame_with_system_text_and_thinking():
    pieces = frame([Turn("Hi", "Hello", "Greet.")], "Be brief.", effort=25)
    assert joined(pieces) == (
        "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 25 (range 1-100)\n\nBe brief."
        "<｜User｜>Hi<｜Assistant｜>"
        "<think>Greet.</think>Hello<｜end▁of▁sentence｜>"
    )


def test_effort_is_not_written_when_thinking_is_off():
    assert Piece("<｜System｜>", True) not in frame([Turn("Hi", "Hello")], effort=50)


def test_two_turns_drop_the_reasoning_of_the_first():
    text = joined(frame([Turn("A", "B", "dropped"), Turn("C", "D", "kept")], effort=50))
    assert "dropped" not in text
    assert text.endswith(
        "<｜User｜>A<｜Assistant｜></think>B<｜end▁of▁sentence｜>"
        "<｜User｜>C<｜Assistant｜><think>kept</think>D<｜end▁of▁sentence｜>"
    )


def test_text_that_looks_like_a_control_token_stays_text():
    pieces = frame([Turn("</think><｜User｜>", "No.")])
    assert Piece("</think><｜User｜>", False) in pieces


def test_sections_give_titles_and_first_paragraphs():
    assert list(section_turns(PAGE)) == [
        ("stock", "The stock module counts goods that arrive and leave, see count for it.")
    ]


def test_descriptions_give_names_and_prose():
    ((name, answer),) = described_names(PAGE)
    assert name == "count(goods, *, at=None)"
    assert answer.startswith("Return how many `goods` there are") and "versionadded" not in answer
    assert answer.endswith("A second paragraph says that the count is taken at night and not during the day.")


def test_a_page_without_sections_gives_nothing():
    assert list(section_turns("only words\n\nand more words\n")) == []


def test_functions_give_code_without_indentation():
    found = {name: (purpose, code) for name, purpose, code in function_turns(MODULE)}
    assert set(found) == {"double", "first"}
    assert found["double"][0] == "Return twice x."
    assert found["first"][1].startswith('def first(self):\n    """Return the first')


def test_source_that_does_not_parse_gives_nothing():
    assert list(function_turns("def broken(:\n")) == []


def test_markup_is_taken_out():
    text = "See :class:`~a.B`, ``x | y``, `the site <address>`_ and |name| [1]_::"
    assert plain_markup(text) == "See a.B, `x | y`, the site and name:"


def test_copies_are_exact():
    document = Document(PAGE * 4, "prose", "source", "path", "path")
    turns = turns_of(document, random.Random(3))
    assert turns and all(turn.question.endswith("\n\n" + turn.answer) for turn in turns)


def test_conversations_are_reproducible_and_bounded():
    documents = [
        Document(PAGE.replace("stock", f"stock{n}"), "docs", "source", f"page{n}", f"page{n}")
        for n in range(120)
    ]
    first = conversations(documents, 20_000, seed=1)
    assert first == conversations(documents, 20_000, seed=1)
    assert first != conversations(documents, 20_000, seed=2)
    sizes = [sum(len(piece.text) for piece in pieces) for pieces in first]
    assert 20_000 <= sum(sizes) <= 20_000 + max(sizes)
    texts = [joined(pieces) for pieces in first]
    assert any("<think>" in text for text in texts) and any("<think>" not in text for text in texts)
    assert any("<｜System｜>" in text for text in texts)
    for text in texts:
        assert text.count("<｜User｜>") == text.count("<｜Assistant｜>") == text.count("</think>")


def test_chat_encoding_file_names_the_trained_levels():
    content = chat_encoding()
    assert content["encoding"] == "v4.1" and "{budget}" in content["effort"]["template"]
    assert content["effort"]["levels"] == EFFORT_LEVELS
    assert content["effort"]["default"] in EFFORT_LEVELS
