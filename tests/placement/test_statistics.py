"""Counts of chosen experts against plain enumeration, and the file that keeps them."""

import dataclasses
import json

import numpy as np
import pytest
from toy_models import toy_json

from v4flash.config import ModelConfig
from v4flash.errors import UsageError, V4FlashError
from v4flash.placement import statistics
from v4flash.placement.statistics import DECIDE, JUDGE, Counts, RoutingStatistics, Text, halves, hottest

LAYERS, EXPERTS, CHOSEN = 4, 8, 2


def routes(rows: int, seed: int = 0) -> np.ndarray:
    """Different experts [L, N, K] for every row, some of them popular."""
    random = np.random.default_rng(seed)
    scores = random.gumbel(size=(LAYERS, rows, EXPERTS)) - np.log(1 + np.arange(EXPERTS))
    return np.argsort(-scores, axis=2)[:, :, :CHOSEN]


@pytest.fixture
def config():
    return ModelConfig.from_dict(toy_json("v4"))


@pytest.fixture
def made(config):
    parts = Counts.of(routes(61), EXPERTS), Counts.of(routes(40, 1), EXPERTS)
    texts = Text("a", "00", 61, DECIDE), Text("b", "01", 40, JUDGE)
    return RoutingStatistics(statistics.identity(config), "ff", texts, *parts)


def test_counts_are_those_of_enumeration():
    found, chosen = Counts.of(routes(23), EXPERTS), routes(23).tolist()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            rows = [expert in row for row in chosen[layer]]
            assert found.routes[layer, expert] == sum(rows)
            for size in (1, 5, statistics.GROUP_ROWS):
                starts = range(0, 23 - size + 1, size)
                assert found.groups[size - 1] == len(starts)
                expected = sum(any(rows[start : start + size]) for start in starts)
                assert found.present[size - 1, layer, expert] == expected


def test_counts_of_stretches_add_up():
    both = Counts.of(routes(23), EXPERTS) + Counts.of(routes(3, 1), EXPERTS)
    assert both.rows == 26 and both.routes.sum() == 26 * LAYERS * CHOSEN
    assert both.groups.tolist() == [26, 12, 8, 5, 4, 3, 3, 2], (
        "no group reaches from one stretch into the next"
    )


def test_shares_and_distinct_experts_are_those_of_enumeration():
    found, chosen = Counts.of(routes(24), EXPERTS), routes(24).tolist()
    hot = hottest(found.routes, 3)
    inside = [hot[layer, expert] for layer in range(LAYERS) for row in chosen[layer] for expert in row]
    assert found.share(hot) == pytest.approx(sum(inside) / len(inside))
    groups = [
        {(layer, expert) for row in chosen[layer][start : start + 6] for expert in row}
        for layer in range(LAYERS)
        for start in range(0, 24, 6)
    ]
    assert found.distinct(6) == pytest.approx(np.mean([len(group) for group in groups]))
    cold = [sum(not hot[pair] for pair in group) for group in groups]
    assert found.distinct(6, ~hot) == pytest.approx(np.mean(cold))


@pytest.mark.parametrize("rows", [0, 9, 5])
def test_distinct_experts_of_groups_that_are_not_there(rows):
    with pytest.raises(ValueError, match=f"no groups of {rows} rows"):
        Counts.of(routes(4), EXPERTS).distinct(rows)


def test_equally_popular_experts_are_hot_in_their_order():
    counts = np.asarray([[3, 5, 3, 3], [0, 0, 0, 9]])
    assert hottest(counts, 2).tolist() == [[True, True, False, False], [True, False, False, True]]
    assert hottest(counts, 0).sum() == 0 and hottest(counts, 4).all()


def test_halves_are_about_equally_long():
    assert halves([10, 4, 4, 4, 1]) == [DECIDE, JUDGE, JUDGE, JUDGE, DECIDE]
    assert halves([7]) == [DECIDE]


def test_hot_experts_come_from_the_deciding_half_only(made):
    assert np.array_equal(made.hot(3), hottest(made.decide.routes, 3))
    assert not np.array_equal(made.hot(3), hottest(made.judge.routes, 3)), "or this test says nothing"
    assert made.judged is made.judge and made.all.rows == 101


def test_what_is_written_is_read(made, tmp_path):
    file = tmp_path / "stats.json"
    made.write(file)
    found = statistics.read(file)
    assert (found.model, found.weights, found.texts) == (made.model, made.weights, made.texts)
    for ours, theirs in ((found.decide, made.decide), (found.judge, made.judge), (found.all, made.all)):
        assert ours.rows == theirs.rows
        for name in ("routes", "groups", "present"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert json.loads(file.read_text())["counts"] == made.all.routes.tolist()
    alone = dataclasses.replace(made, judge=None)
    alone.write(file)
    assert statistics.read(file).judge is None and statistics.read(file).judged.rows == 61
    with pytest.raises(V4FlashError, match="check disk"):
        made.write(tmp_path / "absent" / "stats.json")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.pop("model"),
        lambda found: found.update(schema="v4flash.routing/0"),
        lambda found: found["counts"][0].__setitem__(0, 1000),
        lambda found: found["model"].update(experts=9),
        lambda found: found["decide"]["counts"][0].__setitem__(0, -1),
        lambda found: found["judge"].pop("present"),
        lambda found: found.update(texts=[{"name": "a"}]),
    ],
)
def test_files_that_contradict_themselves_are_refused(made, tmp_path, spoil):
    file = tmp_path / "stats.json"
    content = made.to_json()
    spoil(content)
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="no routing statistics .*; make it again with"):
        statistics.read(file)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        statistics.read(tmp_path / "absent.json")
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        statistics.read(tmp_path / "odd.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match="no routing statistics"):
        statistics.read(tmp_path / "list.json")


def test_another_model_is_refused_by_what_differs(made, config):
    made.require(config, "stats.json")
    made.require(config, "stats.json", "ff")
    other = dataclasses.replace(config, n_routed_experts=16)
    with pytest.raises(
        UsageError, match="stats.json counts another model: it has experts 8, this one experts 16"
    ):
        made.require(other, "stats.json")
    with pytest.raises(UsageError, match="other weights"):
        made.require(config, "stats.json", "fe")
