"""Tuning of tile choices: what is tried, what wins, what is written, and that launches take what is recorded."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import launch, registry, tuning
from pallas_kernels.bench_case import OperationCase
from v4flash.bench import kernel_cases, kernel_tuning
from v4flash.errors import CapacityError
from v4flash.profile.profile_table import Event

SLOW, FAST = {"warps": 4}, {"warps": 8}


def scaling(name: str, wrong: int | None = None) -> OperationCase:
    """A case that multiplies by two with a number of warps that it looks up; with `wrong` of them by three."""

    def fused(shared, own):
        warps = tuning.choice("experts", "a shape", {"warps": 1})["warps"]
        factor = 3.0 if warps == wrong else 2.0
        return {"double": factor * own, "warps": jnp.float32(0 * warps)}, shared + warps

    return OperationCase(
        "experts", name, ("double",), 64, 2, lambda calls: (jnp.zeros(()), [jnp.arange(16.0)] * calls),
        fused, lambda shared, own: {"double": 2 * own, "warps": jnp.float32(0)}, {"double": 1e-6, "warps": 0},
        choices={"a shape": (SLOW, FAST)},
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A device on which a call takes 16 us over its warps, a little more in every round; hears what was run."""
    ran = []

    def profiled(runs, rounds):
        events, at = [], 0.0
        for turn in range(rounds):
            for run in runs:
                warps = float(run()[1]) / 2
                ran.append(warps)
                for _ in range(2):
                    events.append(Event("double_kernel", "Stream", at, 16_000 / warps + 10 * turn))
                    events.append(Event("loop_add_fusion", "Stream", at + 500, 100))
                    at += 20_000
        return events

    monkeypatch.setattr(kernel_cases, "timeable", lambda cases: cases)
    monkeypatch.setattr(kernel_tuning, "profiled", profiled)
    return ran


def test_the_fastest_right_choice_wins_and_is_written(clock, tmp_path):
    said, kept = [], []
    record = kernel_tuning.tune([scaling("demo one"), scaling("demo other")], said.append, kept.append)
    assert kept == [record]
    (trial,) = record["trials"]
    assert trial["cases"] == ["demo one", "demo other"] and trial["winner"] == FAST
    assert [one["choice"] for one in trial["candidates"]] == [{}, SLOW, FAST]
    assert [one["microseconds"] for one in trial["candidates"]] == [32.04, 8.04, 4.04]  # two cases together
    assert {one["spread"] for one in trial["candidates"]} == {0.04}
    assert set(clock) == {1.0, 4.0, 8.0}  # each choice was compiled for itself
    assert said == [
        "experts a shape takes warps 8: as recorded 32.0 +- 0.0 us, warps 4 8.0 +- 0.0 us, warps 8 4.0 +- 0.0 us"
    ]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    (file,) = kernel_tuning.write_choices(record, tmp_path)
    assert file == tmp_path / "experts" / "tuning" / "h200.json"
    assert json.loads(file.read_text()) == tuning.recorded("experts", "h200") | {"a shape": FAST}


def test_a_wrong_choice_never_wins(clock):
    (trial,) = kernel_tuning.tune([scaling("demo wrong", wrong=8)], print)["trials"]
    assert trial["candidates"][2] == {"choice": FAST, "problem": "wrong outputs in demo wrong"}
    assert trial["winner"] == SLOW and 8.0 not in clock


def test_a_choice_that_is_wrong_in_one_case_of_several_never_wins(clock):
    (trial,) = kernel_tuning.tune([scaling("demo right"), scaling("demo wrong", wrong=8)], print)["trials"]
    assert "problem" in trial["candidates"][2] and trial["winner"] == SLOW


def figures(*times: tuple[float, float]) -> list[dict]:
    return [
        {"choice": {"warps": place}, "microseconds": time, "spread": spread}
        for place, (time, spread) in enumerate(times)
    ]


def test_a_gain_within_noise_is_none():
    assert kernel_tuning.winner(figures((10.0, 0.1), (9.8, 0.05))) == {"warps": 1}
    assert kernel_tuning.winner(figures((10.0, 0.1), (9.8, 0.15))) is None  # within both spreads
    assert kernel_tuning.winner(figures((10.0, 0.0), (9.95, 0.0))) is None  # half a per cent
    assert kernel_tuning.winner(figures((10.0, 0.0), (11.0, 0.0))) is None
    broken = [{"choice": {}, "problem": "no such tile"}, *figures((9.0, 0.1))]
    assert kernel_tuning.winner(broken) == {"warps": 0}
    assert kernel_tuning.winner(broken[:1]) is None


def test_chains_that_launch_a_kernel_unevenly_are_refused():
    events = [Event("double", "Stream", 10.0 * i, 5) for i in range(7)]
    with pytest.raises(ValueError, match="7 launches of double in 2 equal chains"):
        kernel_tuning.by_round(events, ("double",), 1, 2)


def test_no_winner_writes_nothing(tmp_path):
    row = {"operation": "experts", "name": "a shape", "winner": None}
    assert kernel_tuning.write_choices({"gpu": "h200", "trials": [row]}, tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_cpu_is_refused():
    with pytest.raises(CapacityError, match="nothing to time without one"):
        kernel_tuning.tune([scaling("demo one")], print)


@pytest.mark.parametrize("operation", sorted({case.operation for case in registry.cases() if case.choices}))
def test_launches_look_up_what_is_tuned_and_take_it(operation, monkeypatch):
    """Each name with candidates is asked for by a launch of its case, and every candidate can be traced."""
    asked = set()
    real = tuning.tiles

    def tiles(wanted):
        class Asked(dict):
            def get(self, name, *rest):
                asked.add((wanted, name))
                return super().get(name, *rest)

            def __getitem__(self, name):
                asked.add((wanted, name))
                return super().__getitem__(name)

        return Asked(real(wanted))

    monkeypatch.setattr(tuning, "tiles", tiles)
    with launch.compiling_for(90):
        for trial in kernel_tuning.trials([case for case in registry.cases() if case.operation == operation]):
            for case in trial.cases:
                assert case.choices[trial.name] == trial.candidates[1:], "cases that share a name must agree"
                shared, (own,) = case.shapes()
                for candidate in trial.candidates:
                    asked.clear()
                    with tuning.trying(operation, trial.name, candidate):
                        jax.eval_shape(lambda shared, own, case=case: case.fused(shared, own), shared, own)
                    assert (operation, trial.name) in asked, case.name


def test_a_name_is_judged_by_all_cases_that_have_it():
    chosen = registry.tuned_with(registry.chosen("512 chosen entries of 4"))
    assert {case.model for case in chosen} == {"v4-flash", "v4.1-flash"}
    assert {name for case in chosen for name in case.choices} == {"chosen"}
    assert registry.tuned_with(registry.chosen("engram")) == ()


def test_which_choice_is_taken(monkeypatch):
    files = {
        ("some", "h200"): {"a": {"warps": 4, "stages": 2}, "b": {"warps": 8}},
        ("some", "gb300"): {"b": {"warps": 16}},
    }
    monkeypatch.setattr(tuning, "recorded", lambda operation, gpu: files.get((operation, gpu), {}))
    untuned = {"warps": 1, "fenced": 0}
    assert tuning.choice("some", "a", untuned) == {"warps": 4, "stages": 2, "fenced": 0}
    assert tuning.choice("some", "c", untuned) == untuned
    assert tuning.choice("other", "a", untuned) == untuned
    with launch.compiling_for(103):
        assert tuning.choice("some", "a", untuned)["warps"] == 4  # the H200's
        assert tuning.choice("some", "b", untuned)["warps"] == 16
    with launch.compiling_for(90):
        assert tuning.choice("some", "b", untuned)["warps"] == 8
    with tuning.trying("some", "a", {"warps": 2}):
        assert tuning.choice("some", "a", untuned) == {"warps": 2, "stages": 2, "fenced": 0}
        assert tuning.choice("some", "b", untuned)["warps"] == 8
    assert tuning.choice("some", "a", untuned)["warps"] == 4
