"""The file of measured costs and calibration: what is written is read, and what means nothing is refused."""

import dataclasses
import json

import pytest

from v4flash.engine.speculation_file import (
    NAME,
    SCHEMA,
    Calibration,
    SpeculationFile,
    StepCosts,
    beside,
    read,
)
from v4flash.errors import UsageError

CALIBRATION = Calibration(1.0, [0.9, 0.8], [0.1, -0.2], [0.6, 0.5], [200, 120])
GREEDY = dataclasses.replace(CALIBRATION, temperature=0.0, bias=[0.3, 0.2])
COSTS = StepCosts("a device", "xla", "float32", "exact", 8, 512, [10.0, 11.0, 11.5])
WHOLE = SpeculationFile([GREEDY, CALIBRATION], COSTS)


@pytest.mark.parametrize("found", [WHOLE, SpeculationFile([CALIBRATION]), SpeculationFile(costs=COSTS)])
def test_what_is_written_is_read(tmp_path, found):
    found.write(tmp_path / NAME)
    assert read(tmp_path / NAME) == beside(tmp_path) == found


def test_no_file_means_nothing_is_known(tmp_path):
    assert beside(tmp_path) == SpeculationFile()
    assert beside(tmp_path).costs_for("a device", "xla", "float32", 8) is None


def test_costs_hold_for_what_they_were_measured_with():
    assert WHOLE.costs_for("a device", "xla", "float32", 8) == [10.0, 11.0, 11.5]
    for other in (
        ("another", "xla", "float32", 8),
        ("a device", "fused", "float32", 8),
        ("a device", "xla", "bfloat16", 8),
        ("a device", "xla", "float32", 16),
    ):
        assert WHOLE.costs_for(*other) is None


def test_calibration_is_that_of_the_nearest_temperature():
    found = [WHOLE.calibration_for(temperature) for temperature in (0.0, 0.2, 0.7, 1.0, 2.0)]
    assert found == [GREEDY, GREEDY, CALIBRATION, CALIBRATION, CALIBRATION]
    assert SpeculationFile(costs=COSTS).calibration_for(1.0) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": SCHEMA + 1}, "schema"),
        ({"costs": {"device": "x"}}, "missing"),
        ({"calibrations": [{"slope": []}]}, "missing"),
        ({"costs": json.loads(json.dumps(COSTS.__dict__)) | {"milliseconds": []}}, "milliseconds"),
        ({"calibrations": [CALIBRATION.__dict__ | {"bias": [float("nan")]}]}, "bias"),
        ({"calibrations": [CALIBRATION.__dict__ | {"slope": ["steep"]}]}, "number"),
        ({"calibrations": [CALIBRATION.__dict__ | {"temperature": float("inf")}]}, "temperature"),
    ],
)
def test_files_that_mean_nothing_are_refused(tmp_path, change, words):
    WHOLE.write(tmp_path / NAME)
    document = json.loads((tmp_path / NAME).read_text()) | change
    (tmp_path / NAME).write_text(json.dumps(document))
    with pytest.raises(UsageError, match="v4flash advise") as refusal:
        read(tmp_path / NAME)
    assert words in str(refusal.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "absent.json")
    (tmp_path / NAME).write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read(tmp_path / NAME)
