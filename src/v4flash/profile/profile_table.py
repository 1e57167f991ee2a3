"""Kernels of a profiled step by name and duration.

Knows: the files of `jax.profiler`, which of their events are kernels, and how to add events up. Does not know: how
a profile was taken. The functions below `read_events` are pure, over lists of events.

XLA runs kernels one by one while it is profiled, unless told to keep its command buffers
(xla_enable_command_buffers_during_profiling): gaps and busy share are those of the real step only with that flag.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jax.profiler import ProfileData

from v4flash.errors import UsageError

GPU_PLANES, STREAM_LINES = "/device:GPU:", "Stream"
BUCKET_EDGES = (2.0, 5.0, 10.0, 50.0)  # us
_TRANSFERS = ("memcpy", "memset")
STEP_EVENT = "step"  # name that jax.profiler.StepTraceAnnotation(STEP_EVENT) gives


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ran: name, the line (stream or thread) it ran on, start and duration in nanoseconds."""

    name: str
    line: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def is_transfer(self) -> bool:
        """Whether it is a copy or a fill by the driver instead of a kernel."""
        return self.name.lower().startswith(_TRANSFERS)


@dataclasses.dataclass(frozen=True)
class NameTotal:
    """All events of one name: how many per step, microseconds per step, mean microseconds of one.

    `rate` is bytes/s, where the bytes of one event are known.
    """

    name: str
    per_step: float
    microseconds: float
    mean: float
    rate: float | None = None


@dataclasses.dataclass(frozen=True)
class ProfileTable:
    """A profile in figures per step.

    Attributes:
      steps: how many were profiled.
      kernels_per_step, transfers_per_step: events.
      buckets: per step, by duration: {'<2': (kernels, microseconds), '2-5': ..., '>50': ...}, edges in us.
      step_microseconds: mean length of a step.
      busy: share of the steps' time in which at least one kernel or transfer ran.
      names: totals, the longest first.
    """

    steps: int
    kernels_per_step: float
    transfers_per_step: float
    buckets: dict[str, tuple[float, float]]
    step_microseconds: float
    busy: float
    names: tuple[NameTotal, ...]

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {self.step_microseconds:,.0f} us, {self.kernels_per_step:,.0f} kernels and "
            f"{self.transfers_per_step:,.0f} transfers per step, busy {100 * self.busy:.1f} %",
            "",
            f"{'duration us':>12} {'kernels':>9} {'us/step':>10}",
            *(f"{name:>12} {count:9.1f} {time:10.1f}" for name, (count, time) in self.buckets.items()),
            "",
            f"{'us/step':>10} {'per step':>9} {'mean us':>8} {'TB/s':>6}  kernel",
        ]
        for total in self.names:
            rate = "" if total.rate is None else f"{total.rate / 1e12:.2f}"
            lines.append(
                f"{total.microseconds:10.1f} {total.per_step:9.1f} {total.mean:8.2f} {rate:>6}  {total.name}"
            )
        return "\n".join(lines)


def read_events(path: str | Path, planes: str = GPU_PLANES, lines: str = STREAM_LINES) -> list[Event]:
    """The events of an `.xplane.pb` file (or of the newest one below a folder), in order of their start.

    Args: planes, lines, how the names of the wanted planes and lines begin; by default the GPUs' streams.
    """
    path = Path(path)
    files = (
        sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime) if path.is_dir() else [path]
    )
    if not files or not files[-1].is_file():
        raise UsageError(f"no profile at {path}: expected an .xplane.pb file, or a folder that holds one")
    profile = ProfileData.from_file(str(files[-1]))
    events = [
        Event(event.name, line.name, event.start_ns, event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith(planes)
        for line in plane.lines
        if line.name.startswith(lines)
        for event in line.events
    ]
    return sorted(events, key=lambda event: event.start)


def bucket_names(edges: Sequence[float] = BUCKET_EDGES) -> list[str]:
    """'<2', '2-5', ..., '>50'; a duration on an edge belongs to the upper bucket."""
    shown = [f"{edge:g}" for edge in edges]
    return [f"<{shown[0]}", *(f"{a}-{b}" for a, b in itertools.pairwise(shown)), f">{shown[-1]}"]


def buckets(kernels: Iterable[Event], edges: Sequence[float] = BUCKET_EDGES) -> dict[str, tuple[int, float]]:
    """(count, microseconds) of kernels by duration."""
    counts, times = [0] * (len(edges) + 1), [0.0] * (len(edges) + 1)
    for kernel in kernels:
        place = bisect.bisect_right(edges, kernel.duration / 1e3)
        counts[place] += 1
        times[place] += kernel.duration / 1e3
    return dict(zip(bucket_names(edges), zip(counts, times, strict=True), strict=True))


def covered(events: Iterable[Event], start: float, end: float) -> float:
    """Nanoseconds between start and end in which at least one event runs: overlaps count once."""
    total, reached = 0.0, start
    for event in sorted(events, key=lambda event: event.start):
        begin, stop = max(event.start, reached), min(event.end, end)
        if stop > begin:
            total += stop - begin
            reached = stop
    return total


def totals(
    kernels: Iterable[Event], steps: int, bytes_by_name: Mapping[str, float] | None = None
) -> tuple[NameTotal, ...]:
    """Totals by name, the longest first. `bytes_by_name` gives the bytes that one event of a name moves."""
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration)
    found = []
    for name, spent in durations.items():
        mean, size = sum(spent) / len(spent), (bytes_by_name or {}).get(name)
        rate = size / (mean * 1e-9) if size is not None and mean else None
        found.append(NameTotal(name, len(spent) / steps, sum(spent) / 1e3 / steps, mean / 1e3, rate))
    return tuple(sorted(found, key=lambda total: -total.microseconds))


def table(
    events: Sequence[Event],
    steps: Sequence[tuple[float, float]] | int,
    bytes_by_name: Mapping[str, float] | None = None,
) -> ProfileTable:
    """Adds up the events of some steps.

    Args:
      events: of the streams of one device.
      steps: windows (start, end) in nanoseconds, of which only events that start inside count; or a number of
        steps that all events belong to, from the first start to the last end.
      bytes_by_name: bytes that one event of a name moves, for rates.
    """
    if isinstance(steps, int):
        if not events or steps < 1:
            raise UsageError(f"{len(events)} events over {steps} steps: nothing to count")
        count, windows = steps, [(min(e.start for e in events), max(e.end for e in events))]
    else:
        count, windows = len(steps), sorted(steps)
        if not windows:
            raise UsageError("no step was marked: nothing to count")
    inside = [event for event in events if _within(event.start, windows)]
    kernels = [event for event in inside if not event.is_transfer]
    length = sum(end - start for start, end in windows)
    return ProfileTable(
        steps=count,
        kernels_per_step=len(kernels) / count,
        transfers_per_step=(len(inside) - len(kernels)) / count,
        buckets={name: (n / count, time / count) for name, (n, time) in buckets(kernels).items()},
        step_microseconds=length / 1e3 / count,
        busy=sum(covered(inside, *window) for window in windows) / length,
        names=totals(kernels, count, bytes_by_name),
    )


def step_windows(events: Iterable[Event], name: str = STEP_EVENT) -> list[tuple[float, float]]:
    """Start and end of the events that mark a step (jax.profiler.StepTraceAnnotation), in order.

    They are moments of the host: they frame a step's kernels only where the host waits for every step.
    """
    return sorted((event.start, event.end) for event in events if event.name == name)


def _within(moment: float, windows: Sequence[tuple[float, float]]) -> bool:
    place = bisect.bisect_right(windows, (moment, float("inf"))) - 1
    return place >= 0 and moment < windows[place][1]
