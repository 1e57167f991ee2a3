"""Ways of speculating along given texts: exact against the rules' own laws, and what follows from them."""

import math
from pathlib import Path

import numpy as np
import pytest
from mini_sessions import compiled, prompt
from scripted_model import FIRST, scripted_model
from toy_laws import EXACT, K, V, emitted, emitted_blockwise, golden_laws, joint
from toy_models import toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine.advice import AUTO
from v4flash.engine.comparison import ALL, TOKENWISE, Walk, compare, per_step, rate, stays, walked, with_error
from v4flash.engine.language_model import LanguageModel, Prompt
from v4flash.errors import UsageError

# Rows past the first are so dear that verifying few drafts pays.
COSTS = [5.0, 5.5, 7.5, 11.0, 15.0]
LONGEST, TOKENS = 3, 12
SAMPLING = {"temperature": 1.0, "top_p": 0.95}
CLASSES = {"short": [Prompt(prompt(5), ""), Prompt(prompt(9), "")], "long": [Prompt(prompt(30), "")]}


@pytest.mark.parametrize("depth", [1, 3, "in order"])
@pytest.mark.parametrize("blockwise", [False, True], ids=["token", "block"])
def test_what_stays_is_what_the_rules_keep(blockwise, depth):
    """For every text: the chance that a step keeps its first i tokens as drafts, over the chance of the text."""
    _, p, q = golden_laws()
    paths = np.array(list(np.ndindex((V,) * K)))
    # Drafts past the first are verified behind even tokens only.
    live = np.full(len(paths), depth) if depth != "in order" else np.where(paths[:, 0] % 2 == 0, K, 1)
    rows = [np.ravel_multi_index(paths[:, :i].T, (V,) * i) if i else 0 * paths[:, 0] for i in range(K)]
    own, target = (np.stack([law[i][rows[i], paths[:, i]] for i in range(K)], axis=1) for law in (q, p))
    # No text holds what the target never says; whatever is found there is multiplied by nothing.
    found = stays(own, np.where(target > 0, target, 1), live, blockwise)
    verified = dict(zip(map(tuple, paths.tolist()), live.tolist(), strict=True))
    if blockwise:
        laws = emitted_blockwise(p, q, lambda path: verified[tuple(path.tolist())])
    else:
        full = {prefix[:i]: count for prefix, count in verified.items() for i in range(K + 1)}
        laws = emitted(p, q, lambda i, prefix: i < (1 if not len(prefix) else full[tuple(map(int, prefix))]))
    for i in range(K + 1):
        kept = sum(law.reshape(V**i, -1).sum(axis=1) for law in laws[i:])
        of_text = np.zeros(V**i)
        of_text[np.ravel_multi_index(paths[:, :i].T, (V,) * i) if i else 0 * paths[:, 0]] = found[:, i]
        np.testing.assert_allclose(of_text * joint(p, i), kept, atol=EXACT, rtol=0)


def test_steps_follow_one_another():
    costs = np.array([5.0, 6.0, 7.0, 8.0])
    always = stays(np.ones((12, 2)), np.ones((12, 2)), np.full(12, 2), True)
    found = walked(always, np.full(12, 2), costs)
    assert (found.steps, found.tokens, found.milliseconds) == (4, 12, 32) and found.depths.tolist() == [
        0,
        0,
        4,
    ]
    never = stays(np.zeros((12, 2)), np.ones((12, 2)), np.full(12, 1), False)
    found = walked(never, np.full(12, 1), costs)
    assert (found.steps, found.tokens, found.milliseconds) == (12, 12, 84)
    # One draft, kept half of the time: 1, 1/2, 3/4, 5/8, ... is the chance that a step starts.
    half = stays(np.full((4, 1), 0.5), np.ones((4, 1)), np.full(4, 1), False)
    found = walked(half, np.full(4, 1), costs)
    assert found.steps == pytest.approx(1 + 0.5 + 0.75 + 0.625)
    assert found.tokens == pytest.approx(1.5 * found.steps)
    plain = walked(np.ones((3, 1)), np.full(3, -1), costs)
    assert (plain.steps, plain.milliseconds) == (3, 15)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    tiny = toy("mini")
    loaded = LoadedModel(tiny.config, tiny.numerics, tiny.graphdef, tiny.params, Path("no-files"))
    return LanguageModel(loaded, compiled())


def compared(model, sampling=SAMPLING, costs=COSTS, tokens=TOKENS, classes=CLASSES, longest=LONGEST):
    return compare(
        model, classes, costs, sampling=sampling, tokens=tokens, longest=longest, say=lambda sentence: None
    )


@pytest.mark.slow  # compiles two programs more
def test_every_way_is_timed_by_the_table(model):
    document = compared(model)
    assert list(document["classes"]) == ["short", "long", ALL]
    for found in document["classes"].values():
        ways = found["ways"]
        assert list(ways) == ["0", "1", "2", "3", AUTO, TOKENWISE]
        assert ways["0"]["tokens_per_second"] == pytest.approx(200)
        for name, figures in ways.items():
            # A drafter of random weights is hardly ever right, but always possible.
            assert 1 <= figures["tokens_per_step"] < 2
            if name in "123":
                steps = sum(figures["depths"])
                assert figures["depths"][int(name)] == pytest.approx(steps, abs=0.02) and steps > 1
                assert figures["milliseconds_per_step"] == pytest.approx(COSTS[int(name) + 1])
            assert figures["tokens_per_second"] == pytest.approx(
                1000 * figures["tokens_per_step"] / figures["milliseconds_per_step"]
            )
    whole = document["classes"][ALL]
    assert whole["comparisons"]["auto_over_best_k"]["best_k"] == 0
    assert set(whole["comparisons"]) == {"auto_over_best_k", "auto_over_block", "block_rule_over_token_rule"}
    # Depths were chosen by the costs given: nothing dear is verified for drafts that are hardly ever accepted.
    assert whole["ways"][AUTO]["milliseconds_per_step"] < 7
    assert whole["comparisons"]["auto_over_block"]["gain"] > 0.3
    assert document["calibration"]["temperature"] == 1.0 and document["block"] == LONGEST


def test_what_is_expected_along_a_greedy_text_is_what_its_decoding_did():
    """Nothing is drawn: every step starts where it started, for the trained block and wider ones, in three passes."""
    model = scripted_model(list("ab" * 40), {at: 0 for at in range(4, 80, 9)})
    classes = {"some": [Prompt([FIRST, FIRST + 1], ""), Prompt([FIRST + 7], "")]}
    document = compared(model, {"temperature": 0.0, "top_p": 1.0}, [5.0] * 9, 100, classes, 7)
    found = document["classes"][ALL]
    assert TOKENWISE not in found["ways"] and "block_rule_over_token_rule" not in found["comparisons"]
    for k in (1, 3, 5, 6, 7):
        emitted, steps = 0, 0
        for one in classes["some"]:
            records = list(model.generate(one, k=k, max_tokens=100))
            end = len(one.ids) + sum(len(record.tokens) for record in records)
            # A step counts while as many drafts as the widest way has stand behind its start.
            for record in records[1:]:
                if record.position - 1 < end - 7:
                    emitted, steps = emitted + len(record.tokens), steps + 1
        assert found["ways"][str(k)]["tokens_per_step"] == pytest.approx(emitted / steps), k
    assert found["ways"]["7"]["tokens_per_step"] > found["ways"]["3"]["tokens_per_step"] > 2.5


def test_errors_are_those_of_leaving_out_a_prompt():
    tokens = [30.0, 20.0, 27.0, 35.0]
    walks = [Walk(10.0, count, 20.0, np.zeros(1)) for count in tokens]
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
