"""What was measured about speculation with a checkpoint on a device: calibration and costs, as a JSON file.

Knows: the file's form, and when its costs may be used. Does not know: how anything is measured (advice.py), or
how a depth is chosen from it (speculative/depth.py).

`speculation.json` beside the weights is used without being asked for. Calibration and usual acceptance belong to
the weights and to a temperature: greedy drafts are accepted more often than drawn ones, for the same confidence. Costs
belong to a device, a backend, a number type, and a row count, and count only where all four are the same.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.errors import UsageError

SCHEMA = 2
NAME = "speculation.json"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The drafter's confidence made honest, by draft position.

    Attributes:
      temperature: of the texts it was fitted to.
      slope, bias: chance = sigmoid(slope * log-odds of confidence + bias).
      acceptance: share of drafts accepted when those before them were.
      pairs: how many judged drafts each position was fitted from.
    """

    temperature: float
    slope: list[float]
    bias: list[float]
    acceptance: list[float]
    pairs: list[int]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step by its live rows.

    Attributes:
      device, backend, dtype, mode, rows, context: what they were measured with; `rows` of the verifying pass.
      milliseconds: place 0 without drafting, place r with drafting and r live rows.
    """

    device: str
    backend: str
    dtype: str
    mode: str
    rows: int
    context: int
    milliseconds: list[float]


@dataclasses.dataclass(frozen=True)
class SpeculationFile:
    """Calibrations, one for each temperature measured, and costs; either may be absent."""

    calibrations: list[Calibration] = dataclasses.field(default_factory=list)
    costs: StepCosts | None = None

    def calibration_for(self, temperature: float) -> Calibration | None:
        """The calibration of the nearest temperature."""
        return min(self.calibrations, key=lambda found: abs(found.temperature - temperature), default=None)

    def costs_for(self, device: str, backend: str, dtype: str, rows: int) -> list[float] | None:
        """The costs if they were measured with this device kind, backend, number type and row count."""
        costs, wanted = self.costs, (device, backend, dtype, rows)
        same = costs is not None and (costs.device, costs.backend, costs.dtype, costs.rows) == wanted
        return costs.milliseconds if same else None

    def write(self, path: Path) -> None:
        """Writes the file as a whole or not at all."""
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        write_atomically(path, [json.dumps(document, indent=1).encode() + b"\n"])


def read(path: Path) -> SpeculationFile:
    """Reads a file that `SpeculationFile.write` wrote.

    Raises UsageError where it cannot be read, is of another form, or holds numbers that mean nothing.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); make one with `v4flash advise`") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); make it again with `v4flash advise`") from None
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, expected {SCHEMA}")
        calibrations, costs = document["calibrations"], document["costs"]
        found = SpeculationFile(
            [Calibration(**fitted) for fitted in calibrations], costs and StepCosts(**costs)
        )
        _check(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is no speculation file ({error}); make it again with `v4flash advise`"
        ) from None
    return found


def beside(checkpoint: Path) -> SpeculationFile:
    """The file beside a checkpoint's weights; an empty one where there is none."""
    path = checkpoint / NAME
    return read(path) if path.is_file() else SpeculationFile()


def _check(found: SpeculationFile) -> None:
    numbers: list[tuple[str, Any]] = []
    for fitted in found.calibrations:
        numbers += [(name, getattr(fitted, name)) for name in ("slope", "bias", "acceptance")]
        numbers.append(("temperature", [fitted.temperature]))
    if found.costs:
        numbers.append(("milliseconds", found.costs.milliseconds))
    for name, values in numbers:
        if not values or not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name} is {values}, expected numbers")
