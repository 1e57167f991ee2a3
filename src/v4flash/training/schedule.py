"""How far a stage of training has come, and the rate that follows from it.

Knows: budgets in wall-clock seconds or in steps, deadlines, learning-rate shapes, and the phases of each stage. Does
not know: what a step does.
"""

import dataclasses
import math
import time

FINAL_RATE_SHARE = 0.02


@dataclasses.dataclass
class Budget:
    """A stage's budget: `steps` if given, else `seconds` of wall clock, of which `spent` are already used."""

    seconds: float
    steps: int | None = None
    spent: float = 0.0
    _started: float | None = None

    def start(self) -> None:
        """Starts the clock (again)."""
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds used, those before a restart included."""
        return self.spent + (time.monotonic() - self._started if self._started is not None else 0.0)

    def progress(self, step: int) -> float:
        """Share of the budget used when `step` steps are made: 0 to 1."""
        share = step / self.steps if self.steps else self.elapsed / self.seconds
        return min(share, 1.0)


def rate_share(progress: float, warm_up: float, final: float = FINAL_RATE_SHARE) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine down to `final`."""
    if progress < warm_up:
        return max(progress / warm_up, 0.01)
    turn = math.pi * (progress - warm_up) / (1 - warm_up)
    return final + (1 - final) * 0.5 * (1 + math.cos(turn))


def seconds_until(deadline: float | None, planned: list[float]) -> float:
    """Seconds for the first of some stages planned one after another, so that the last ends at `deadline`.

    A deadline (as `time.time()` counts) makes all plans longer or shorter by one factor; without one they hold.
    """
    factor = max(deadline - time.time(), 1.0) / sum(planned) if deadline else 1.0
    return planned[0] * factor


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a stage: from which progress on, on which length, and whether selection is open.

    `open_selection`: the indexer keeps every visible entry, so that attention learns what to look for before
    the index has to choose it.
    """

    start: float
    length: int
    open_selection: bool


def target_phases(lengths: tuple[int, int, int]) -> tuple[Phase, ...]:
    """Open selection for 80 % of the budget, the model's own selection after it."""
    return Phase(0.0, lengths[0], True), Phase(0.8, lengths[1], False)


def joint_phases(lengths: tuple[int, int, int]) -> tuple[Phase, ...]:
    """The last 10 % of the budget on long crops."""
    return Phase(0.0, lengths[1], False), Phase(0.9, lengths[2], False)


def phase_at(phases: tuple[Phase, ...], progress: float) -> int:
    """Index of the phase that `progress` lies in."""
    return max(i for i, phase in enumerate(phases) if progress >= phase.start)
