"""Where a text ends, when the end lies inside an accepted block: the first reason counts, and nothing comes behind it.

The scripted model's drafter is always right, so every block is accepted whole, and what ends a text may stand at each
of its places.
"""

import pytest
from mini_sessions import SHAPES
from scripted_model import END, FIRST, scripted_model

DRAFT_LENGTHS = (0, 1, 5, 7)
LETTERS = list("abcdefghijklmnop")
PLACES = range(9)  # among the generated tokens; blocks begin behind the first


def ended(model, prompt: list[int], k: int, **options):
    """(letters said, why it ended, session) with all counts checked."""
    session = model.session()
    generation = model.generate(prompt, session=session, k=k, **options)
    records = list(generation)
    statistics = generation.statistics
    assert session.tokens == [*prompt, *generation.tokens]
    assert statistics.generated == len(generation.tokens) == sum(len(record.tokens) for record in records)
    # The drafter is always right: every draft that counts was emitted, as all tokens but one of every whole step.
    assert statistics.accepted == statistics.drafted
    whole = sum(len(record.tokens) > record.accepted for record in records[1:])
    assert sum(statistics.drafted) == max(len(generation.tokens) - 1, 0) - whole
    return generation.text, statistics.finish


def letters(count: int) -> str:
    """What the script says behind its first letter."""
    return "".join(LETTERS[1 : count + 1])


@pytest.fixture(scope="module")
def model():
    return scripted_model(LETTERS)


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_stop_string_and_limit_at_every_place(model, k):
    for place in PLACES:
        stop = LETTERS[place + 1]
        for limit in (place, place + 1, place + 2, 20):
            found = ended(model, [FIRST], k, stop=(stop,), max_tokens=limit)
            # The stop string ends the text even with the last token that was allowed; before that the limit does.
            expected = (letters(limit), "length") if limit <= place else (letters(place), "stop")
            assert found == expected, (place, limit)


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_end_token_and_limit_at_every_place(k):
    for place in PLACES:
        model = scripted_model(LETTERS[: place + 1])
        for limit in (place, place + 1, place + 2, 20):
            found = ended(model, [FIRST], k, max_tokens=limit)
            assert found == (letters(min(place, limit)), "length" if limit <= place else "eos"), (
                place,
                limit,
            )


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_end_of_the_context_at_every_place(model, k):
    for place in PLACES:
        prompt = [FIRST + 9] * (SHAPES.context - place - 1) + [FIRST]
        assert ended(model, prompt, k, max_tokens=50) == (letters(place), "context")
        # The limit is named where both are reached at once, and a stop string where it comes with the last token.
        assert ended(model, prompt, k, max_tokens=place) == (letters(place), "length")
        if place:
            found = ended(model, prompt, k, stop=(LETTERS[place],), max_tokens=50)
            assert found == (letters(place - 1), "stop")


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_a_stop_string_over_several_tokens_and_blocks(model, k):
    for first in range(6):
        for length in (2, 3, 7):
            stop = "".join(LETTERS[first + 1 : first + 1 + length])
            assert ended(model, [FIRST], k, stop=(stop,)) == (letters(first), "stop")
    # Whichever is complete first wins, though the other one began earlier.
    assert ended(model, [FIRST], k, stop=("cdefgh", "de")) == (letters(2), "stop")
    # What looked like the beginning of a stop string is text where the text ends otherwise.
    assert ended(model, [FIRST], k, stop=("nopq",)) == (letters(15), "eos")
    assert ended(model, [FIRST], k, stop=("fgx",), max_tokens=6) == (letters(6), "length")


def test_the_session_goes_on_behind_a_stop_as_if_nothing_more_had_been_drafted(model):
    for k in DRAFT_LENGTHS:
        session = model.session()
        assert "".join(r.text for r in model.generate([FIRST], session=session, k=k, stop=("e",))) == "bcd"
        assert session.tokens[-1] == FIRST + 4 and END not in session.tokens
        assert "".join(r.text for r in model.generate([], session=session, k=k, max_tokens=3)) == "fgh"
