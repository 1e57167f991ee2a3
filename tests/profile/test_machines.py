"""Machine files and sizes given by hand; what is wrong with either is said."""

import json

import pytest

from v4flash.errors import UsageError
from v4flash.profile import machines, targets
from v4flash.profile.machines import GIB, machine

H200 = {
    "schema": machines.SCHEMA,
    "about": "one",
    "memories": [
        {
            "name": "GPU",
            "bytes": {"value": 8, "label": "given", "source": "a test"},
            "bandwidth": {"value": 9, "label": "measured", "source": "a test"},
        }
    ],
}


def test_every_wanted_machine_has_a_file_and_every_figure_a_label_and_a_source():
    assert {"h200", "h200-x2", "gb300", "gb300-rtx-pro-6000", "cpu"} <= set(machines.names())
    for name in machines.names():
        made = machine(name)
        figures = [made.fetch, made.exchange, *(memory.bytes for memory in made.memories)]
        figures += [memory.bandwidth for memory in made.memories]
        for figure in filter(None, figures):
            assert figure.label in machines.LABELS and len(figure.source) > 5 and figure.value > 0


def test_a_figure_stands_in_one_place():
    """Memories of other machines are named, not said again; the rate of a target comes from the machine's file."""
    pair, alone = machine("h200-x2"), machine("h200")
    assert pair.memories[0] == pair.memories[1] == alone.memories[0]
    assert machine("gb300-rtx-pro-6000").memories[::2] == machine("gb300").memories
    said = [json.loads((targets.folder() / f"{name}.json").read_text()) for name in machines.names()]
    named = [memory for found in said for memory in found["memories"] if not memory.get("host")]
    own = [memory["name"] for memory in named if "of" not in memory]
    assert len(own) == len(set(own))
    assert targets.target("h200").measured_bandwidth == alone.memories[0].bandwidth.value
    assert targets.target("gb300").measured_bandwidth is None, "what is published is no measurement"


def test_sizes_are_read_with_the_rates_of_an_h200():
    made = machine("139,128h")
    assert [(memory.size, memory.host) for memory in made.memories] == [(139 * GIB, False), (128 * GIB, True)]
    usual = machine("h200")
    assert made.memories[0].bandwidth == usual.memories[0].bandwidth and made.fetch == usual.fetch
    assert made.exchange == machine("h200-x2").exchange
    assert {memory.bytes.label for memory in made.memories} == {"given"}
    assert machine("80.5").memories[0].size == 80.5 * GIB
    assert [memory.host for memory in machine("139,96,256h").memories] == [False, False, True]


@pytest.mark.parametrize(
    "text", ["", "139,", "128h", "1,2,3", "1,2h,3", "1,2h,3h", "1,2,3,4h", "-5", "0", "many", "139 GB", "h200,128h"]
)  # fmt: skip
def test_other_devices_are_refused(text):
    with pytest.raises(UsageError, match="devices are"):
        machine(text)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="h100.*one of cpu, gb300, gb300-rtx-pro-6000, h200, h200-x2"):
        machine("h100")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("about"), "lacks 'about'"),
        (lambda found: found.update(schema="other"), "schema other"),
        (lambda found: found["memories"][0].pop("bytes"), "lacks 'bytes'"),
        (lambda found: found["memories"][0].pop("bandwidth"), "no bandwidth"),
        (lambda found: found["memories"][0]["bytes"].update(label="guessed"), "guessed"),
        (lambda found: found["memories"][0]["bytes"].update(value=0), "value above 0"),
        (lambda found: found["memories"][0]["bytes"].pop("source"), "lacks 'source'"),
        (
            lambda found: found["memories"].append(found["memories"][0] | {"host": True}),
            "how fast experts are fetched",
        ),
        (lambda found: found["memories"].append(found["memories"][0]), "time of an exchange"),
        (lambda found: found["memories"].extend(2 * [found["memories"][0]]), "then a host's"),
    ],
)
def test_files_that_lack_something_are_refused_by_name(tmp_path, monkeypatch, change, words):
    found = json.loads(json.dumps(H200))
    change(found)
    (tmp_path / "odd.json").write_text(json.dumps(found))
    monkeypatch.setattr(targets, "folder", lambda: tmp_path)
    with pytest.raises(UsageError, match=r"odd\.json") as problem:
        machine("odd")
    assert words in str(problem.value)


def test_a_file_that_is_no_json_is_refused(tmp_path, monkeypatch):
    (tmp_path / "odd.json").write_text("{")
    monkeypatch.setattr(targets, "folder", lambda: tmp_path)
    with pytest.raises(UsageError, match="no machine file"):
        machine("odd")
