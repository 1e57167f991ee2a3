"""The ways in which a step reaches routed experts that do not fit the first device.

Knows: the ways' names, what each is told when a checkpoint is opened, which function opens it, and how experts change
places. Does not know: how a way works inside a step.

A way is registered in OPENERS under its name and backend: a function of an Opening that returns the loaded weights and
the programs that take them. Whatever the way, the programs are called alike and write the same text.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from v4flash.checkpoint.loading import LoadedModel, with_drafter
from v4flash.config import ModelConfig
from v4flash.engine import backends, fused_host_way, host_way, peer_way, sidecar_way
from v4flash.engine.programs import Programs, Shapes
from v4flash.errors import UsageError
from v4flash.model.numerics import Numerics
from v4flash.placement import statistics
from v4flash.placement.table import Placement

RESIDENT, PEER, HOST, SIDECAR = backends.RESIDENT, "peer", "host", "sidecar"
NAMES = (RESIDENT, PEER, HOST, SIDECAR)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Where routed experts are to live: a way, how many of each layer are hot, and a file that says which.

    Attributes:
      way: one of NAMES.
      hot: hot experts of each layer; None with 'resident', and only there.
      statistics: file of `v4flash experts profile --out`; None takes the first experts of each layer.
    """

    way: str = RESIDENT
    hot: int | None = None
    statistics: str | Path | None = None

    def __post_init__(self):
        if self.way not in NAMES:
            raise UsageError(f"experts is {self.way!r}, expected {', '.join(NAMES)}")
        if self.way == RESIDENT and (self.hot is not None or self.statistics is not None):
            given = "a number of hot experts" if self.hot is not None else "routing statistics"
            raise UsageError(f"{given} with --experts resident, where all are hot; leave one of them out")
        if self.way != RESIDENT and self.hot is None:
            raise UsageError(
                f"--experts {self.way} needs --hot-experts, how many of each layer stay on the device"
            )

    def placement(self, config: ModelConfig) -> Placement | None:
        """The table for a checkpoint; None where all experts are resident.

        Raises UsageError for a number of hot experts that the model has not, or statistics of another model.
        """
        if self.way == RESIDENT:
            return None
        chosen = config.num_experts_per_tok
        if self.statistics is None:
            return Placement.in_order(
                config.num_hidden_layers, config.n_routed_experts, self.hot, chosen=chosen
            )
        counted = statistics.read(Path(self.statistics))
        counted.require(config, str(self.statistics))
        return Placement.from_counts(counted.all.routes, self.hot, chosen=chosen)


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a way is told.

    Attributes:
      path: the checkpoint's folder.
      numerics, shapes: of the programs.
      placement: where each routed expert of the backbone shall live; a drafter's are always resident.
      drafter: False leaves the drafter out.
      cache: folder of compiled programs, or None.
      say: hears a sentence at the start of each phase.
    """

    path: Path
    numerics: Numerics
    shapes: Shapes
    placement: Placement
    drafter: bool
    cache: Path | None
    say: Callable[[str], Any]

    @property
    def config(self) -> ModelConfig:
        return with_drafter(ModelConfig.from_file(self.path), self.drafter)


Opener = Callable[[Opening], tuple[LoadedModel, Programs]]
OPENERS: dict[tuple[str, str], Opener] = {
    (HOST, backends.XLA): host_way.open_host,
    (HOST, backends.FUSED): fused_host_way.open_host,
    (PEER, backends.XLA): peer_way.open_peer,
    (PEER, backends.FUSED): peer_way.open_peer_packed,
    (SIDECAR, backends.XLA): sidecar_way.open_sidecar,
}


def opener(way: str, backend: str) -> Opener:
    """The function that opens checkpoints this way. Raises UsageError where there is none."""
    found = OPENERS.get((way, backend))
    if found is None:
        there = [RESIDENT, *sorted(name for name, own in OPENERS if own == backend)]
        raise UsageError(
            f"backend {backend} has no --experts {way}, only {', '.join(there)}; choose another way"
        )
    return found


def suited(chosen: backends.Backend, wanted: str, way: str) -> backends.Backend:
    """The chosen backend, with experts reached this way; where `auto` chose one that cannot, xla.

    Raises UsageError where neither can.
    """
    if way == RESIDENT:
        return chosen
    if wanted == backends.AUTO and chosen.name != backends.XLA and (way, chosen.name) not in OPENERS:
        chosen = backends.Backend(backends.XLA, f"{chosen.name} has no --experts {way}")
    opener(way, chosen.name)
    return dataclasses.replace(chosen, experts=way)
