"""Ways of speculating timed by a table: what is counted, what follows, and how sure it is."""

import math
from pathlib import Path

import numpy as np
import pytest
from mini_sessions import compiled, prompt
from toy_models import toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine.advice import AUTO
from v4flash.engine.comparison import ALL, TOKENWISE, Walk, compare, per_step, rate, with_error
from v4flash.engine.language_model import LanguageModel, Prompt
from v4flash.errors import UsageError

# Rows past the first are so dear that verifying few drafts pays.
COSTS = [5.0, 5.5, 6.0, 9.0, 12.0]
LONGEST, TOKENS = 3, 12
SAMPLING = {"temperature": 1.0, "top_p": 0.95}
CLASSES = {"short": [Prompt(prompt(5), ""), Prompt(prompt(9), "")], "long": [Prompt(prompt(30), "")]}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    tiny = toy("mini")
    loaded = LoadedModel(tiny.config, tiny.numerics, tiny.graphdef, tiny.params, Path("no-files"))
    return LanguageModel(loaded, compiled())


def compared(model, sampling=SAMPLING, costs=COSTS, tokens=TOKENS):
    return compare(
        model, CLASSES, costs, sampling=sampling, tokens=tokens, longest=LONGEST, say=lambda sentence: None
    )


@pytest.fixture(scope="module")
def document(model):
    return compared(model)


def test_every_way_is_timed_by_the_table(document):
    assert list(document["classes"]) == ["short", "long", ALL]
    for found in document["classes"].values():
        ways = found["ways"]
        assert list(ways) == ["0", "1", "2", "3", AUTO, TOKENWISE]
        assert ways["0"]["tokens_per_second"] == pytest.approx(200)
        for name, figures in list(ways.items())[1:]:
            assert sum(figures["depths"]) == figures["steps"] > 0
            # A drafter of random weights is hardly ever right, but always possible.
            assert 1 <= figures["expected_tokens_per_step"] < 2 and figures["tokens_per_step"] >= 1
            if name not in (AUTO, TOKENWISE):
                assert figures["depths"][int(name)] == figures["steps"] and figures["undrafted"] == 0
                assert figures["milliseconds_per_step"] == pytest.approx(COSTS[int(name) + 1])
            assert figures["tokens_per_second"] == pytest.approx(
                1000 * figures["expected_tokens_per_step"] / figures["milliseconds_per_step"]
            )
    whole = document["classes"][ALL]
    assert whole["comparisons"]["auto_over_best_k"]["best_k"] == 0
    assert set(whole["comparisons"]) == {"auto_over_best_k", "auto_over_block", "block_rule_over_token_rule"}
    # Depths were chosen by the costs given: nothing dear is verified for drafts that are hardly ever accepted.
    auto = whole["ways"][AUTO]
    assert auto["milliseconds_per_step"] < 6 and whole["comparisons"]["auto_over_block"]["gain"] > 0.3
    assert document["calibration"]["temperature"] == 1.0 and document["block"] == LONGEST


def test_greedy_texts_have_no_rule_to_compare(model):
    document = compared(model, {"temperature": 0.0, "top_p": 1.0}, tokens=8)
    found = document["classes"][ALL]
    assert TOKENWISE not in found["ways"] and "block_rule_over_token_rule" not in found["comparisons"]
    for figures in found["ways"].values():
        # Nothing is left to chance: what is expected is what happens.
        assert figures["expected_tokens_per_step"] == pytest.approx(figures["tokens_per_step"])


def test_errors_are_those_of_leaving_out_a_prompt():
    tokens, steps = [30.0, 20.0, 27.0, 35.0], [10, 10, 10, 10]
    walks = [Walk(steps=s, expected=t, milliseconds=2.0 * s) for t, s in zip(tokens, steps, strict=True)]
    assert rate(walks) == pytest.approx(1400.0) and per_step(walks) == pytest.approx(2.8)
    whole, error = with_error(per_step, walks)
    # With equal steps the jackknife is the standard error of the mean.
    assert error == pytest.approx(np.std(np.array(tokens) / 10, ddof=1) / math.sqrt(4))
    gain, none = with_error(lambda one, other: per_step(one) / per_step(other) - 1, walks, walks)
    assert gain == none == 0
    assert with_error(per_step, walks[:1]) == (3.0, None)


def test_what_cannot_be_compared_is_refused(model):
    with pytest.raises(UsageError, match="costs of 3 live rows, k = 3 has 4"):
        compared(model, costs=COSTS[:4])
    with pytest.raises(UsageError, match="--tokens"):
        compared(model, tokens=LONGEST)
