"""Acceptance figures on scripted texts: which steps count, the trigram baseline, ranking, bars, tables."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_model import TOY

from v4flash.config import ModelConfig
from v4flash.speculative.rejection import verify_blockwise, verify_tokenwise
from v4flash.training import acceptance
from v4flash.training.acceptance_figures import (
    STANDARD_ERRORS,
    Decoded,
    Step,
    counted_until,
    figures,
    first_acceptance,
    gates,
    loop_end,
    markdown,
)  # fmt: skip
from v4flash.training.model_card import model_card
from v4flash.training.trigram import Trigram, replay

K = 3
# 5 follows (3, 4) twice and 6 once; 9 follows a lone 4 never, 8 is the commonest token.
STREAM = np.array([3, 4, 5, 3, 4, 5, 3, 4, 6, 8, 8, 8, 8, 8], np.uint16)


@pytest.fixture(scope="module")
def trigram() -> Trigram:
    return Trigram([STREAM], 10)


def test_trigram_takes_the_most_frequent_token_and_backs_off(trigram):
    assert trigram.next(3, 4) == 5
    assert trigram.next(9, 4) == 5  # the pair is unknown: behind a lone 4 comes 5, twice against once
    assert trigram.next(0, 9) == 8  # neither pair nor token is known
    assert trigram.draft(3, 4, 4) == [5, 3, 4, 5]


def test_trigram_prefers_the_lowest_of_equally_frequent_tokens():
    assert Trigram([np.array([1, 2, 7, 1, 2, 5])], 8).next(1, 2) == 5


def test_counts_do_not_run_from_one_stream_into_the_next():
    # In one stream 5 would follow 2; apart, nothing is known of 2, and 3 is the commonest token.
    assert Trigram([np.array([1, 2]), np.array([5, 3, 3])], 8).next(1, 2) == 3


def test_replay_walks_the_text_as_a_trigram_drafter_would(trigram):
    # Behind 3 | 4 it drafts 5 3 4: all kept, and 7 comes on top. Behind 4 7 it drafts 8 8 8: none kept, 0.
    # Behind 7 0 again 8 8 8: two kept, and 1 on top.
    ids = [4, 5, 3, 4, 7, 0, 8, 8, 1]
    assert replay(trigram, [2, 3], ids, K, until=len(ids)) == [4, 1, 3]
    assert replay(trigram, [2, 3], ids, K, until=6) == [4, 1]
    assert replay(trigram, [2, 3], ids, K, until=1) == []


def test_replay_does_not_count_past_the_end_of_the_text(trigram):
    assert replay(trigram, [2, 3], [4, 5, 3], K, until=3) == [2]


@pytest.mark.parametrize(
    ("ids", "end"),
    [
        (list(range(20)), 20),
        (list(range(8)) + [50] + list(range(8)) + [51], 17),
        ([7] * 12, 9),
        ([7] * 8, 8),
        ([1, 2] * 8, 10),
    ],
)
def test_loop_ends_behind_the_second_occurrence(ids, end):
    assert loop_end(ids) == end


def test_steps_count_until_the_loop_or_the_last_full_step():
    assert counted_until(Decoded([], list(range(40)), [], 40), K) == 37
    assert counted_until(Decoded([], [7] * 40, [], 40), K) == 9
    assert counted_until(Decoded([], [1, 2, 3], [], 40), K) == 3


def text_of(steps: list[Step], ids: list[int] | None = None, budget: int = 100) -> Decoded:
    return Decoded([2, 3], ids or list(range(1 + sum(step.emitted for step in steps))), steps, budget)


def test_figures_of_scripted_steps(trigram):
    steps = [
        Step(1, 4, 3, 3, (0.9, 0.8, 0.7)),
        Step(5, 2, 1, 3, (0.6, 0.2, 0.9)),
        Step(7, 1, 0, 3, (0.1, 0.9, 0.9)),
        Step(8, 3, 2, 3, (0.95, 0.85, 0.3)),
    ]
    found = figures([text_of(steps)], K, trigram)
    assert found["tokens"] == 10 and found["steps"] == 4 and found["tokens_per_step"] == 2.5
    assert found["drafts_verified"] == 12 and found["loop_excluded"] == 0
    assert found["survival"] == [0.75, 0.5, 0.25]
    assert found["conditional"] == [0.75, 0.6667, 0.5]
    # Accepted: .9 .8 .7 .6 .95 .85; refused behind an accepted prefix: .2 .1 .3. The rest was never judged.
    assert found["auc"] == 1.0
    assert "first_acceptance" not in found


def test_ranking_counts_misordered_pairs(trigram):
    steps = [Step(1, 2, 1, 3, (0.4, 0.6, 0.0)), Step(3, 1, 0, 3, (0.2, 0.0, 0.0))]
    assert figures([text_of(steps)], K, trigram)["auc"] == 0.5
    only_refused = [Step(1, 1, 0, 3, (0.4, 0.6, 0.0))]
    assert figures([text_of(only_refused)], K, trigram)["auc"] is None


def test_text_that_repeats_itself_is_left_out(trigram):
    ids = list(range(8)) + [50] + list(range(8)) + [51] * 23
    steps = [Step(1, 4, 3, 3), Step(5, 4, 3, 3), Step(9, 4, 3, 3), Step(13, 4, 3, 3), *[
        Step(start, 1, 0, 3) for start in range(17, 40)
    ]]  # fmt: skip
    steps = [Step(s.start, s.emitted, s.accepted, s.drafted, (0.5,) * 3) for s in steps]
    found = figures([Decoded([2, 3], ids, steps, 40)], K, trigram)
    assert found["steps"] == 4 and found["tokens_per_step"] == 4.0
    assert found["loop_excluded"] == 40 - 17


def test_steps_short_of_drafts_at_the_limit_do_not_count(trigram):
    steps = [Step(1, 4, 3, 3, (0.5,) * 3), Step(5, 3, 2, 2, (0.5,) * 2)]
    assert figures([text_of(steps, budget=8)], K, trigram)["steps"] == 1


def test_drafts_behind_the_end_mark_are_not_judged():
    assert Step(1, 2, 2, 3, (0.5,) * 3).judged == 2
    assert Step(1, 2, 1, 3, (0.5,) * 3).judged == 2
    assert Step(1, 4, 3, 3, (0.5,) * 3).judged == 3


def test_no_steps_give_no_figures(trigram):
    found = figures([text_of([])], K, trigram)
    assert found["tokens_per_step"] is None and found["conditional"] == [None] * K
    assert found["trigram_tokens_per_step"] is None


def test_first_acceptance_against_its_expectation():
    steps = [Step(1, 2, 1, 3, (), (0.5,)), Step(3, 1, 0, 3, (), (0.5,)), Step(4, 2, 1, 3, (), (1.0,))]
    assert first_acceptance(steps) == {"measured": 0.66667, "expected": 0.66667, "standard_error": 0.2357}


def test_perfect_knowledge_is_ranked_over_the_same_drafts(trigram):
    steps = [
        Step(1, 2, 1, 3, (0.1, 0.9, 0.9), (0.8, 0.4, 0.9)),
        Step(3, 1, 0, 3, (0.2, 0.9, 0.9), (0.6, 0.9, 0.9)),
    ]
    found = figures([text_of(steps)], K, trigram)
    assert found["auc_of_chance"] == 1.0 and found["auc"] == 0.0
    assert found["first_acceptance"]["expected"] == 0.7


@pytest.mark.parametrize("blockwise", [False, True])
def test_chances_are_those_of_the_rule(blockwise):
    """Against the rule's own coins: among drafts that were reached, the share that stays is the mean chance."""
    rng = np.random.default_rng(0)
    laws, targets = jnp.asarray(rng.dirichlet(np.ones(4), (2, K)), jnp.float32)
    rounds = 4000
    drawn = np.stack(
        [rng.choice(4, rounds, p=law / law.sum()) for law in np.asarray(laws, np.float64)], axis=1
    )
    coins = rng.random((rounds, K)).astype(np.float32)
    redraws = jnp.zeros((K + 1, 2), jnp.float32)
    behind = jnp.concatenate([targets, targets[:1]])
    rule = verify_blockwise if blockwise else verify_tokenwise

    @jax.jit
    @jax.vmap
    def one(ids, coins):
        chances = acceptance.chances_of(ids, laws, targets, jnp.int32(K), jnp.asarray(blockwise))
        return chances, rule(ids, laws, behind, jnp.int32(K), coins, redraws).accepted

    chances, accepted = map(np.asarray, one(drawn, coins))
    for place in range(K):
        reached = accepted >= place
        stayed = (accepted[reached] > place).mean()
        expected = chances[reached, place].mean()
        assert abs(stayed - expected) < STANDARD_ERRORS * np.sqrt(0.25 / reached.sum())


def row(kind: str, temperature: float = 1.0, **changes) -> dict:
    found = {
        "class": kind, "temperature": temperature, "texts": 2, "tokens": 30, "steps": 10, "loop_excluded": 4,
        "drafts_verified": 30, "tokens_per_step": 3.0, "survival": [0.9, 0.7, None], "conditional": [0.9, 0.8, None],
        "auc": 0.8, "auc_of_chance": 0.91, "trigram_tokens_per_step": 2.5,
        "first_acceptance": {"measured": 0.8, "expected": 0.75, "standard_error": 0.02},
    }  # fmt: skip
    return found | changes


def test_bars():
    cleared = gates([row("code"), row("all")])
    assert cleared == {
        "beats_trigram_on_every_class": True,
        "confidence_ranks": True,
        "first_acceptance_as_expected": True,
    }
    assert not gates([row("code", tokens_per_step=2.7), row("all")])["beats_trigram_on_every_class"]
    assert not gates([row("code", steps=0), row("all")])["beats_trigram_on_every_class"]
    assert not gates([row("all", auc=0.75)])["confidence_ranks"]
    assert not gates([row("all", auc=None)])["confidence_ranks"]
    off = {"measured": 0.8, "expected": 0.75, "standard_error": 0.016}
    assert not gates([row("all", first_acceptance=off)])["first_acceptance_as_expected"]
    assert not gates([row("code")])["first_acceptance_as_expected"]


def document() -> dict:
    rows = [row("code"), row("all")]
    return {
        "checkpoint": "ab" * 32, "device": "a device", "versions": {"jax": "1.2"}, "mode": "qat", "dtype": "float32",
        "k": K, "rule": "block", "prompts_per_class": 2, "tokens": 40, "figures": rows, "gates": gates(rows),
    }  # fmt: skip


def test_table_shows_every_figure():
    lines = markdown(json.loads(json.dumps(document()))).splitlines()
    assert "| code | 1 | 30 | 10 | 3.00 | 2.50 | 0.90 0.70 n/a | 0.90 0.80 n/a | 0.800 | 0.910 | 4 |" in lines
    assert any("0.8000 of the steps" in line and "0.7500 (standard error 0.0200)" in line for line in lines)
    assert "| confidence ranks | yes |" in lines


def test_card_carries_the_measured_figures():
    estimate = {"accepted": [0.9, 0.8], "tau": 2.5, "greedy_tau": 2.6, "auc": 0.9}
    records = {"draft": [dict.fromkeys(("code", "docs", "prose", "chat", "own"), estimate)]}
    corpus = {"sources": [{"package": "somewhere", "version": "1", "licence": "MIT"}]}
    config = ModelConfig.from_dict(TOY)
    card = model_card(config, corpus, records, document())
    assert markdown(document()) in card and "ab" * 32 in card
    assert "partly memorised" in card and "| somewhere | 1 |  | MIT |  |" in card
    assert "measured with the decoder" not in model_card(config, corpus, records)
    assert "## Remarks" not in card
    assert "## Remarks\n\nIt is young.\n" in model_card(config, corpus, records, document(), "It is young.\n")


def test_documents_and_prompts():
    stream = np.array([0, 5, 6, 1, 0, 7, 1], np.uint16)
    assert acceptance.documents(stream, 0) == [[0, 5, 6, 1], [0, 7, 1]]
    texts = [[0, *range(2, 2 + length)] for length in (10, 200, 300, 159, 400)]
    prompts = acceptance.prompts_of(texts, 2)
    assert [len(prompt) for prompt in prompts] == [48, 96]
    assert prompts[0] == texts[1][:48] and prompts[1] == texts[4][:96]
    assert len(acceptance.prompts_of(texts, 9)) == 4


def test_chat_prompts_end_behind_the_assistant_header():
    texts = [[0, 8, 5, 9, 4, 6, 1], [0, 8, 5, 5, 1], [0, 8, 9, 3, 7, 7, 9, 4, 1]]
    assert acceptance.chat_prompts_of(texts, 9, 2) == [[0, 8, 5, 9, 4], [0, 8, 9, 3]]
