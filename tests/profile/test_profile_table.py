"""Adding up events, and reading them from a file of the profiler."""

import jax
import jax.numpy as jnp
import pytest

from v4flash.errors import UsageError
from v4flash.profile import profile_table
from v4flash.profile.profile_table import Event, buckets, covered, step_windows, table, totals

US = 1000.0


def kernel(start: float, duration: float, name: str = "gemm", line: str = "Stream #1") -> Event:
    """An event with times in microseconds."""
    return Event(name, line, start * US, duration * US)


def test_durations_fall_into_buckets_and_edges_go_up():
    found = buckets([kernel(0, d) for d in (0.5, 1.9, 2.0, 4.9, 5.0, 9.0, 10.0, 49.0, 50.0, 700.0)])
    assert {name: count for name, (count, _) in found.items()} == {
        "<2": 2, "2-5": 2, "5-10": 2, "10-50": 2, ">50": 2
    }  # fmt: skip
    assert found["<2"][1] == pytest.approx(2.4) and found[">50"][1] == pytest.approx(750)


def test_overlaps_count_once():
    events = [kernel(0, 10), kernel(5, 10), kernel(6, 2), kernel(20, 5)]
    assert covered(events, 0, 30 * US) == pytest.approx(20 * US)


def test_coverage_is_cut_at_the_window():
    events = [kernel(-5, 10), kernel(25, 10)]
    assert covered(events, 0, 30 * US) == pytest.approx(10 * US)
    assert covered(events, 100 * US, 130 * US) == 0
    assert covered([], 0, US) == 0


def test_totals_are_per_step_and_sorted_by_time():
    events = [kernel(0, 1, "a"), kernel(1, 3, "a"), kernel(4, 10, "b")]
    first, second = totals(events, steps=2)
    assert (first.name, first.per_step, first.microseconds, first.mean) == ("b", 0.5, 5.0, 10.0)
    assert (second.name, second.per_step, second.microseconds, second.mean) == ("a", 1.0, 2.0, 2.0)
    assert first.rate is second.rate is None


def test_rates_follow_from_the_bytes_of_one_event():
    (found,) = totals([kernel(0, 8), kernel(9, 12)], 1, {"gemm": 40e6})
    assert found.rate == pytest.approx(4e12)


def test_windows_choose_the_events_that_start_inside():
    events = [kernel(0, 4), kernel(8, 4), kernel(20, 4), kernel(21, 2, "MemcpyD2D"), kernel(40, 4)]
    found = table(events, [(0, 10 * US), (20 * US, 30 * US)])
    assert found.steps == 2
    assert found.kernels_per_step == 1.5
    assert found.transfers_per_step == 0.5
    assert found.step_microseconds == pytest.approx(10)
    assert found.busy == pytest.approx((4 + 2 + 4) / 20)
    assert found.buckets["2-5"] == (1.5, pytest.approx(6.0))


def test_a_number_of_steps_spans_all_events():
    found = table([kernel(0, 5), kernel(15, 5)], 2)
    assert (found.step_microseconds, found.busy, found.kernels_per_step) == (10.0, 0.5, 1.0)


@pytest.mark.parametrize(("events", "steps"), [([], 1), ([kernel(0, 1)], 0), ([kernel(0, 1)], [])])
def test_nothing_to_count_is_said(events, steps):
    with pytest.raises(UsageError, match="nothing to count"):
        table(events, steps)


def test_marked_steps_become_windows_in_order():
    events = [kernel(20, 5, "step", "python"), kernel(3, 2, "step", "python"), kernel(4, 1)]
    assert step_windows(events) == [(3 * US, 5 * US), (20 * US, 25 * US)]


def test_table_reads_well():
    text = str(table([kernel(0, 8), kernel(10, 1, "norm")], 1, {"gemm": 32e6}))
    lines = text.splitlines()
    assert lines[0] == "1 steps of 11 us, 2 kernels and 0 transfers per step, busy 81.8 %"
    assert any(line.split() == ["5-10", "1.0", "8.0"] for line in lines)
    assert any(line.split() == ["8.0", "1.0", "8.00", "4.00", "gemm"] for line in lines)


def test_json_has_every_figure():
    document = table([kernel(0, 8)], 1).to_json()
    assert document["kernels_per_step"] == 1 and document["names"][0]["name"] == "gemm"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A profile of three small steps on the CPU."""
    folder = tmp_path_factory.mktemp("trace")
    x = jnp.ones((64, 64))
    step = jax.jit(lambda x: x @ x)
    step(x).block_until_ready()
    with jax.profiler.trace(str(folder)):
        for number in range(3):
            with jax.profiler.StepTraceAnnotation(profile_table.STEP_EVENT, step_num=number):
                step(x).block_until_ready()
    return folder


def test_marks_are_read_from_a_real_profile(trace):
    events = profile_table.read_events(trace, planes="/host:CPU", lines="")
    windows = step_windows(events)
    assert len(windows) == 3
    assert [event.start for event in events] == sorted(event.start for event in events)
    assert all(start < end for start, end in windows)


def test_a_profile_without_gpu_has_no_streams(trace):
    (file,) = trace.rglob("*.xplane.pb")
    assert profile_table.read_events(file) == []


def test_absent_profile_is_named(tmp_path):
    with pytest.raises(UsageError, match="expected an .xplane.pb file"):
        profile_table.read_events(tmp_path)
    with pytest.raises(UsageError, match="no profile at"):
        profile_table.read_events(tmp_path / "none.xplane.pb")
