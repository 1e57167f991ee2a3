"""Device descriptions as targets."""

import pytest

from v4flash.errors import UsageError
from v4flash.profile import targets


@pytest.mark.parametrize(("name", "capability", "cores"), [("h200", 90, 132), ("gb300", 103, 152)])
def test_described_gpus_are_read(name, capability, cores):
    found = targets.target(name)
    assert (found.capability, found.cores) == (capability, cores)
    assert name.upper() in found.product
    assert found.shared_memory == 232448
    assert 4e12 < found.bandwidth < 9e12 and 1e11 < found.memory < 1e12
    assert found.measured_bandwidth is None or found.measured_bandwidth < found.bandwidth


def test_every_description_makes_a_target():
    assert {"h200", "gb300"} <= set(targets.names())
    assert all(targets.target(name).text for name in targets.names())


def test_unknown_target_names_the_known_ones():
    with pytest.raises(UsageError, match="no device description .*b300x.*gb300, h200"):
        targets.target("b300x")


def test_description_with_a_gap_names_the_field(tmp_path, monkeypatch):
    (tmp_path / "odd.txtpb").write_text(
        "gpu_device_info {\n  cuda_compute_capability {\n    major: 9\n  }\n  core_count: many\n}"
    )
    monkeypatch.setattr(targets, "folder", lambda: tmp_path)
    with pytest.raises(UsageError, match="gpu_device_info.core_count is 'many', expected a whole number"):
        targets.target("odd")


def test_fields_are_read_by_path():
    text = 'a {\n  b: 12\n  c { d: "x y" e: 1.5 }\n  f: ON\n}\ng: 3'
    assert targets.read_fields(text) == {"a.b": 12, "a.c.d": "x y", "a.c.e": 1.5, "a.f": "ON", "g": 3}


def test_memory_can_be_raised_without_touching_the_rest():
    found = targets.target("h200")
    larger = found.with_memory(10**12)
    before, after = targets.read_fields(found.text), targets.read_fields(larger.text)
    assert after.pop("gpu_device_info.device_memory_size") == larger.memory == 10**12
    assert before.pop("gpu_device_info.device_memory_size") == found.memory
    assert before == after
