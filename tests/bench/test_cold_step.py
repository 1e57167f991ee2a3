"""Made-up routes, how a step gets them, and the cells of a step with cold experts; a tiny model on the CPU."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_step import tiny_json

from pallas_kernels.experts import reference
from v4flash.bench import cold_cells, cold_routes, cold_step
from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.profile import budget
from v4flash.profile.floor import correlated_experts

ROWS, STEPS = 6, 40


@pytest.fixture(scope="module")
def flash():
    published = ModelConfig.from_file(budget.configuration("v4-flash-0731"))
    return dataclasses.replace(published, num_hidden_layers=6)


@pytest.mark.parametrize("share", [0.012, 0.05])
def test_routes_have_the_wanted_share_and_the_published_correlation(flash, share):
    places = cold_routes.table(flash, 200)
    routes = cold_routes.made_up(flash, places, share, ROWS, STEPS)
    assert routes.ids.shape == (STEPS, 6, ROWS, 6)
    assert all(len(set(row)) == 6 for row in routes.ids[3, 2].tolist())
    assert routes.share == pytest.approx(share, rel=0.15)
    assert routes.distinct == pytest.approx(correlated_experts(256, 6, ROWS), rel=0.05)


def test_redirected_routes_differ_in_cold_experts_only(flash):
    routes = cold_routes.made_up(flash, cold_routes.table(flash, 200), 0.2, ROWS, 4)
    other = routes.redirected()
    assert other.share == 0 and other.distinct == routes.distinct
    layer = np.arange(6)[:, None, None]
    np.testing.assert_array_equal(other.ids != routes.ids, routes.cold[layer, routes.ids])
    repeated = routes.repeating(2).ids
    np.testing.assert_array_equal(repeated[2:], repeated[:2])


def test_guesses_name_cold_experts_as_often_as_asked(flash):
    routes = cold_routes.made_up(flash, cold_routes.table(flash, 200), 0.2, ROWS, STEPS)
    found = routes.guessed(0.7, 0.25)
    cold, right, wrong = 0, 0, 0
    for step, guesses in zip(found.ids, found.guesses, strict=True):
        for rows, named, outside in zip(step, guesses, found.cold, strict=True):
            experts = named[named > 0] - 1
            assert outside[experts].all() and len(set(experts.tolist())) == len(experts)
            used = np.intersect1d(np.unique(rows), np.flatnonzero(outside))
            cold += len(used)
            right += np.isin(experts, used).sum()
            wrong += (~np.isin(experts, used)).sum()
    assert right / cold == pytest.approx(0.7, rel=0.05) and wrong / right == pytest.approx(0.25, rel=0.15)
    assert not routes.guessed(0, 0).guesses.any()
    np.testing.assert_array_equal(found.ids, routes.ids)


def test_a_table_has_every_slot_once(flash):
    places = cold_routes.table(flash, 200)
    for own in places:
        for tier, slots in ((0, 200), (1, 56)):
            assert sorted(own[own[:, 0] == tier, 1].tolist()) == list(range(slots))
    assert (places[0] != places[1]).any()


def test_a_step_reads_the_lists_it_was_given():
    ids = jnp.asarray(
        np.random.default_rng(0).permuted(np.tile(np.arange(9), (2, 5, 1)), axis=2)[..., :3], jnp.int32
    )
    words = cold_step.list_words(ids, 24, jnp.asarray([[7], [9]]))
    assert words[:, -24].tolist() == [7, 9] and not words[:, -23:].any()
    for own, given in zip(words, ids, strict=True):
        live, padded = jnp.arange(8) < 5, jnp.pad(given, ((0, 3), (0, 0)))
        expected = reference.routes(padded, jnp.full((8, 3), 1 / 3), live, 24)
        found = cold_step._routes_of(own, 24, 3)
        for name in ("expert_ids", "count", "slot"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        used = np.asarray(expected.slot) >= 0
        np.testing.assert_array_equal(np.asarray(found.weight)[used], np.asarray(expected.weight)[used])


@pytest.mark.parametrize(
    "wrong",
    [{"hot": 3}, {"hot": 8}, {"draft_length": 8}, {"context": 1 << 30}, {"slots": 0}, {"shares": (1.2,)}],
)
def test_wrong_requests_are_refused(wrong):
    config = ModelConfig.from_dict(tiny_json(drafter=True))
    with pytest.raises(UsageError):
        cold_cells.Request(**{"config": config, "hot": 5, "draft_length": 1, "context": 200} | wrong)


@pytest.fixture
def places(monkeypatch):
    """Of each run of steps: the program's name, its lists, and by step the addresses of the arrays handed on."""
    found, step = {}, cold_step._Bench._step

    def watched(bench, program, lists):
        result = step(bench, program, lists)
        # The lists are kept, so that no others get their address.
        own = found.setdefault(id(lists), (program, lists, []))[2]
        handed_on = bench.kept, bench.stream, bench.position, result
        own.append(tuple(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(handed_on)))
        return result

    monkeypatch.setattr(cold_step._Bench, "_step", watched)
    return found


@pytest.mark.slow  # three programs are compiled
def test_the_command_times_its_cells_in_place_and_compares_bits_first(tmp_path, capsys, places):
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    out = tmp_path / "record.json"
    code = main(
        [
            "bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--experts", "host",
            "--hot-experts", "5", "--cold-share", "20", "--spare-slots", "2", "--k", "1", "--context", "200",
            "--steps", "4", "--repeats", "2", "--device", "cpu", "--quiet", "--out", str(out),
        ]
    )  # fmt: skip
    assert code == 0
    record = json.loads(out.read_text())
    assert record["checks"] == {
        "resident and redirected": True, "missed and kept": True, "kept slots": True, "missed and guessed": True,
        "guessed slots": True,
    }  # fmt: skip
    resident, redirected, cold, repeating, *guessed = record["cells"]
    assert [cell["cell"] for cell in record["cells"]] == [*cold_cells.CELLS, *cold_cells.GUESSES]
    assert resident["missed_per_step"] == redirected["cold_per_step"] == 0 < cold["missed_per_step"]
    assert (
        cold["missed_per_step"] <= cold["cold_per_step"]
        and repeating["missed_per_step"] <= cold["missed_per_step"]
    )
    assert cold["gigabytes_moved"] == pytest.approx(
        cold["missed_per_step"] * record["expert_bytes"] / 1e9, abs=1e-4
    )
    assert all(cell["usable"] and cell["verified"] == 1 for cell in record["cells"])
    nothing, some, every = guessed
    assert nothing["fetched_per_step"] == 0 and nothing["missed_per_step"] == cold["missed_per_step"]
    assert 0 < some["used_per_step"] <= some["fetched_per_step"]
    assert every["missed_per_step"] < some["missed_per_step"] < cold["missed_per_step"]
    assert every["used_per_step"] == every["fetched_per_step"]
    moved = (some["missed_per_step"] + some["fetched_per_step"]) * record["expert_bytes"] / 1e9
    assert some["gigabytes_moved"] == pytest.approx(moved, abs=1e-4)
    assert "20 % cold" in capsys.readouterr().out
    timed = list(places.values())[-len(record["cells"]) :]
    assert [program for program, _, _ in timed] == ["resident", *["tiered"] * 3, *["early"] * 3]
    # Behind these steps a result was read, where it lay because this is no GPU: its memory is not given away.
    assert all(len(set(addresses[: 4 * (1 + 2)])) == 1 for _, _, addresses in timed)


def test_options_of_one_way_are_refused_for_the_other(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    given = ["bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--device", "cpu"]
    for more, word in (
        (["--hot-experts", "5"], "needs --experts host"),
        (["--experts", "host"], "needs --hot-experts"),
        (["--experts", "host", "--hot-experts", "5", "--k", "1,2"], "one draft length"),
    ):
        assert main([*given, *more]) == 2
        assert word in capsys.readouterr().err


@pytest.mark.slow  # two programs are compiled
def test_plain_modules_are_timed_in_the_same_cells(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    code = main(
        [
            "bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--experts", "host",
            "--backend", "xla", "--hot-experts", "5", "--cold-share", "20", "--spare-slots", "2", "--k", "1",
            "--context", "200", "--steps", "4", "--repeats", "2", "--device", "cpu", "--quiet", "--json",
        ]
    )  # fmt: skip
    assert code == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bodies"] == "plain modules"
    assert record["checks"] == {"resident and redirected": True, "missed and kept": True}
    resident, redirected, cold, repeating = record["cells"]
    assert resident["cold_per_step"] == redirected["cold_per_step"] == 0 < cold["missed_per_step"]
    assert cold["missed_per_step"] <= cold["cold_per_step"]
    assert repeating["missed_per_step"] <= repeating["cold_per_step"]
    moved = cold["missed_per_step"] * record["expert_bytes"] / 1e9
    assert cold["gigabytes_moved"] == pytest.approx(moved, abs=1e-4)
    assert all(cell["usable"] and cell["verified"] == 1 for cell in record["cells"])
