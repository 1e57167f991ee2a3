"""Places of tokens in their laws: uniform where the law is right, and found out where it is not."""

import numpy as np
import pytest
from scipy import stats

from v4flash.fidelity.sampled_law import LEVEL, judge, places, uniform_chance

V, TEXTS, LENGTH = 50, 8, 150


def drawn(seed=3, bend=None):
    """Texts of random laws [LENGTH, V], their tokens drawn from `bend(laws, previous token)` or from the laws."""
    random, texts = np.random.default_rng(seed), []
    for _ in range(TEXTS):
        laws = random.dirichlet(np.full(V, 0.3), LENGTH)
        tokens = np.zeros(LENGTH, int)
        for at in range(LENGTH):
            law = laws[at] if bend is None else bend(laws[at], tokens[at - 1], laws[at - 1])
            tokens[at] = random.choice(V, p=law / law.sum())
        texts.append((laws, tokens))
    return texts


def test_places_by_hand():
    laws = np.array([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]])
    found = places(laws, np.array([2, 2, 0]), np.array([0.5, 0.0, 1.0]))
    assert found == pytest.approx([0.5 + 0.15, 0.75, 0.75])


def test_chance_is_that_of_chi_square():
    counts = np.array([30, 12, 25, 33])
    assert uniform_chance(counts) == pytest.approx(stats.chisquare(counts).pvalue, rel=1e-4)


def test_right_laws_pass_and_their_chances_are_spread_out():
    found = [judge(drawn(seed)) for seed in range(12)]
    assert all(verdict.sound and verdict.tokens == TEXTS * LENGTH for verdict in found)
    assert min(verdict.chance for verdict in found) < 0.5 < max(verdict.chance for verdict in found)


def test_favouring_likely_tokens_is_found():
    assert judge(drawn(bend=lambda law, *before: law**1.3)).chance < LEVEL
    assert judge(drawn(bend=lambda law, *before: law**0.8)).chance < LEVEL


def test_what_one_token_does_to_the_next_is_found():
    def bend(law, previous, before):
        # After a likely token the law is sharper, after an unlikely one flatter: places alone hardly show it.
        return law**1.5 if before[previous] > np.median(before[before > 1e-3]) * 3 else law**0.6

    assert judge(drawn(bend=bend)).chance < LEVEL


def test_tokens_without_a_chance_are_counted():
    texts = drawn()
    laws, tokens = texts[0]
    laws[7, tokens[7]] = 0.0
    verdict = judge(texts)
    assert verdict.impossible == 1 and not verdict.sound


def test_too_few_tokens_say_nothing():
    laws, tokens = drawn()[0]
    with pytest.raises(ValueError, match="say nothing"):
        judge([(laws[:15], tokens[:15])])
