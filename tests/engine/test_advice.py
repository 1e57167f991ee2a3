"""The adviser's arithmetic on made-up tallies: rates, break-even times, the best k, and when speculation loses."""

import pytest

from v4flash.engine.advice import (
    AUTO,
    Tally,
    advice,
    expected_tokens,
    step_milliseconds,
    total,
)
from v4flash.errors import UsageError

SURVIVAL = (0.8, 0.6, 0.3)
STEPS = 100


def tally(k: int, milliseconds: float, survival=SURVIVAL) -> Tally:
    """What k drafts a step do when everything happens as often as expected."""
    accepted = [round(STEPS * share) for share in survival[:k]]
    return Tally(
        tokens=STEPS + sum(accepted),
        steps=STEPS,
        seconds=STEPS * milliseconds / 1000,
        step_seconds=[milliseconds / 1000] * (STEPS - 1),
        accepted=accepted,
        drafted=[STEPS] * k,
        pairs=[[(0.5, place < kept) for place in range(STEPS)] for kept in accepted],
    )


def found(costs, survival=SURVIVAL):
    """Tallies of two classes of prompts; the second accepts half as much."""
    poor = tuple(share / 2 for share in survival)
    return {
        k: {"code": tally(k, ms, survival), "prose": tally(k, ms, poor)} for k, ms in enumerate(costs)
    } | {AUTO: {"code": tally(2, costs[2], survival), "prose": tally(2, costs[2], poor)}}


def test_rates_and_break_even_times():
    document = advice(found([10.0, 12.0, 13.0, 20.0]), block=3)
    rows = {row["k"]: row for row in document["draft_lengths"]}
    # Both classes together survive .6, .45, .225.
    assert rows[0]["tokens_per_second"] == pytest.approx(100.0)
    assert rows[1]["tokens_per_second"] == pytest.approx(1.6 / 0.012)
    for k, tokens in enumerate((1.0, 1.6, 2.05, 2.275)):
        assert rows[k]["tokens_per_step"] == pytest.approx(tokens)
        assert rows[k]["predicted_tokens_per_second"] == pytest.approx(rows[k]["tokens_per_second"])
    assert rows[0]["break_even_ms"] is None and rows[AUTO]["predicted_tokens_per_second"] is None
    assert rows[1]["break_even_ms"] == pytest.approx(16.0)
    assert rows[3]["break_even_ms"] == pytest.approx(13.0 * 2.275 / 2.05)
    assert document["best_k"] == 2 and not document["loses"]
    assert "best: k = 2" in document["verdict"] and "k = 3 pays below 14.4 ms" in document["verdict"]


def test_each_class_has_its_own_best():
    document = advice(found([10.0, 13.5, 15.0, 16.5]), block=3)
    assert document["classes"]["code"]["best_k"] == 3
    assert document["classes"]["prose"]["best_k"] in (1, 2)
    assert document["classes"]["code"]["survival"] == list(SURVIVAL)
    assert document["classes"]["prose"]["survival"] == [0.4, 0.3, 0.15]


def test_a_loss_is_said_plainly():
    document = advice(found([10.0, 17.0, 25.0, 40.0]), block=3)
    assert document["best_k"] == 0 and document["loses"]
    assert "speculation loses here" in document["verdict"]
    assert "k = 1 takes 17.0 ms and would have to take less than 16.0" in document["verdict"]


def test_predictions_take_the_trained_block_and_deeper_positions_from_the_deepest():
    tallies = found([10.0, 12.0, 13.0, 14.0])
    # The deepest decoding accepts less in front than the trained block of 2 does.
    tallies[3] = {name: tally(3, 14.0, (0.4, 0.3, 0.2)) for name in tallies[3]}
    rows = {row["k"]: row for row in advice(tallies, block=2)["draft_lengths"]}
    assert rows[2]["predicted_tokens_per_step"] == pytest.approx(2.05)
    assert rows[3]["predicted_tokens_per_step"] == pytest.approx(2.25)


def test_tallies_add_up():
    both = total({"one": tally(1, 10.0), "three": tally(3, 20.0)})
    assert both.drafted == [200, 100, 100] and both.accepted == [160, 60, 30]
    assert both.tokens == 180 + 270 and both.steps == 200
    assert both.seconds == pytest.approx(3.0) and len(both.step_seconds) == 198
    assert [len(pairs) for pairs in both.pairs] == [200, 100, 100]
    assert total({}).rate == total({}).tokens_per_step == 0.0


def test_positions_never_drafted_have_no_survival():
    assert Tally(accepted=[2, 0], drafted=[4, 0]).survival() == [0.5]


def test_too_few_steps_to_time_are_refused():
    with pytest.raises(UsageError, match="--tokens"):
        step_milliseconds(Tally(step_seconds=[]))


def test_expected_tokens():
    assert [expected_tokens(SURVIVAL, k) for k in range(4)] == pytest.approx([1.0, 1.8, 2.4, 2.7])
