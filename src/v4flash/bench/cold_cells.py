"""Cells of a step whose experts lie in two memories, whichever bodies run it.

Knows: what is asked for, which routes each cell is given, what is counted while it is timed, and the record of it all.
Does not know: how routes are made up (cold_routes), how programs get them (cold_step, plain_cold_step), or how a record
is shown.

Cells of one cold share, all with the same number of different experts a layer:

    resident      cold experts redirected to hot ones, in a program that knows no cold experts: the baseline
    redirected    the same routes in the program for two memories: nothing is missed
    cold          the routes as they are, never the same step twice: what was used lately is kept, the rest is missed
    repeating     a few steps again and again, as a text that repeats itself: after the first round all is kept
    early ...     the cold routes, some of whose cold experts are guessed and fetched before their layer's turn
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.experts import early, tiers
from v4flash.bench import real_step
from v4flash.bench.cold_routes import ColdRoutes
from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.placement.cache import SPARE
from v4flash.placement.host_memory import host_memory
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.speculative.step import draft_limit

SCHEMA = "v4flash.cold_step/1"
CELLS = ("resident", "redirected", "cold", "repeating")
# Chances that a cold expert is guessed, and that a right guess comes with a wrong one.
GUESSES = {"early 0 %": (0.0, 0.0), "early 70 %": (0.7, 0.25), "early 100 %": (1.0, 0.0)}
ROWS = tiles.ROWS
REPEATED_STEPS = 4
CHECKED_SHARE = 0.3  # every layer misses experts, some of them more than there are slots
_LINK_BYTES, _LINK_COPIES = 1 << 28, 5


@dataclasses.dataclass(frozen=True)
class Request:
    """What to time.

    Attributes:
      config: configuration of the model.
      hot: routed experts a layer on the device.
      shares: cold shares of the routes, each with its four cells.
      slots: spare device slots a layer.
      draft_length, context: drafts of a step, and committed positions before the first one.
      steps, repeats: a loop dispatches `steps` steps, `repeats` times.
      profile: whether to take a profile of each cell.
    """

    config: ModelConfig
    hot: int
    shares: Sequence[float] = (0.012, 0.05)
    slots: int = SPARE
    draft_length: int = 5
    context: int = 2048
    steps: int = 20
    repeats: int = 5
    profile: bool = True

    @property
    def needed_steps(self) -> int:
        """Steps that are all different: a loop to fill the slots, and those that are timed."""
        return self.steps * (1 + self.repeats)

    def __post_init__(self):
        config, rows = self.config, self.draft_length + 1
        least = config.num_experts_per_tok * rows
        if not least <= self.hot < config.n_routed_experts:
            raise UsageError(
                f"{self.hot} hot experts, expected {least} (what {rows} rows may need) to {config.n_routed_experts - 1}"
            )
        limit = draft_limit(ROWS) if config.draft else 0
        if self.draft_length > limit:
            raise UsageError(f"k is {self.draft_length}, this program takes 0 to {limit}")
        if self.context + real_step.SLACK > config.max_position_embeddings:
            raise UsageError(f"context is {self.context}, the model ends at {config.max_position_embeddings}")
        if self.slots < 1 or not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UsageError("expected at least one spare slot, and cold shares between 0 and 100 %")


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a model in two memories takes, and how fast they are read.

    Attributes:
      expert_bytes: of one routed expert. device_bytes, host_bytes: of all weights in each memory.
      bandwidth, link: bytes/s of copies on the device, and from the host's memory to it.
    """

    expert_bytes: int
    device_bytes: int
    host_bytes: int
    bandwidth: float
    link: float


def record(
    request: Request,
    config: ModelConfig,
    bodies: str,
    weights: Weights,
    checks: dict[str, bool],
    cells: list[dict[str, Any]],
) -> dict[str, Any]:
    """The record, JSON-ready."""
    return {
        "schema": SCHEMA,
        **real_step.subject(config, ROWS),
        "hot_experts": request.hot,
        "spare_slots": request.slots,
        "expert_bytes": weights.expert_bytes,
        "device_gigabytes": round(weights.device_bytes / 1e9, 1),
        "host_gigabytes": round(weights.host_bytes / 1e9, 1),
        "dtype": REAL_NUMERICS.dtype.__name__,
        "mode": "qat",
        "bodies": bodies,
        "steps": request.steps,
        "repeats": request.repeats,
        "copy_bandwidth": round(weights.bandwidth),
        "link_bandwidth": round(weights.link),
        "weights": "random, made on the device",
        "checks": checks,
        "cells": cells,
    }


def of_share(
    request: Request,
    share: float,
    routes: ColdRoutes,
    timed: Callable[[str, ColdRoutes], dict[str, Any]],
    say: Callable[[str], None],
    names: Sequence[str] = CELLS,
) -> list[dict[str, Any]]:
    """The cells of one cold share, the baseline first.

    `timed(program, routes)` times 'resident', 'tiered' or 'early'.
    """
    redirected = ColdRoutes(routes.ids[: request.steps], routes.cold).redirected()
    routes_of = {
        "resident": redirected,
        "redirected": redirected,
        "cold": routes,
        "repeating": routes.repeating(REPEATED_STEPS),
        **{name: routes.guessed(*chances) for name, chances in GUESSES.items() if name in names},
    }
    made: list[dict[str, Any]] = []
    for name in names:
        given = routes_of[name]
        program = "early" if name in GUESSES else "resident" if name == "resident" else "tiered"
        cell = {"cell": name, "asked_share": share, "share": round(given.share, 4)}
        cell |= timed(program, given)
        baseline = made[0]["milliseconds"] if made else cell["milliseconds"]
        cell["exposed_milliseconds"] = round(cell["milliseconds"] - baseline, 3)
        cell["over_resident"] = round(cell["milliseconds"] / baseline, 4)
        made.append(cell)
        say(describe(cell))
    return made


def timed_cell(
    request: Request,
    config: ModelConfig,
    weights: Weights,
    distinct: float,
    loop: Callable[[int], Any],
    counted: Callable[[], np.ndarray],
) -> dict[str, Any]:
    """Figures of one cell.

    Args:
      distinct: different experts a layer.
      loop: (steps) -> the last step's result.
      counted: () -> sums so far over layers and steps, of what `tiers.COUNTED` names, then of what `early.COUNTED`
        does if anything is fetched early.
    """
    jax.block_until_ready(loop(request.steps))
    before, taken = counted(), []
    for _ in range(request.repeats):
        started = time.perf_counter()
        result = jax.block_until_ready(loop(request.steps))
        taken.append((time.perf_counter() - started) / request.steps)
    counts = (counted() - before) / (request.steps * request.repeats)
    cell = {
        "k": request.draft_length,
        "context": request.context,
        "milliseconds": round(1e3 * statistics.median(taken), 3),
        "spread": [round(1e3 * min(taken), 3), round(1e3 * max(taken), 3)],
        "experts_per_layer": {"mean": round(distinct, 1)},
        **{
            f"{name}_per_step": round(float(count), 2)
            for name, count in zip((*tiers.COUNTED, *early.COUNTED)[: len(counts)], counts, strict=True)
        },
        "usable": bool(result.usable),
        "verified": int(result.drafted),
    }
    moved = (cell["missed_per_step"] + cell.get("fetched_per_step", 0)) * weights.expert_bytes
    cell["gigabytes_moved"] = round(moved / 1e9, 4)
    cell["link_milliseconds"] = round(1e3 * moved / weights.link, 3)
    if request.profile:
        cell["profile"], _ = real_step.profiled(lambda stream: (stream, loop(real_step.PROFILED_STEPS)), None)
    return cell | real_step.beside_floor(config, cell, weights.bandwidth)


def measured_bandwidths(say: Callable[[str], None]) -> tuple[float, float]:
    """Bytes/s of copies on the device, and from the host's memory to it."""
    bandwidth, link = real_step.copy_bandwidth(), link_bandwidth()
    say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, link {link / 1e9:.1f} GB/s")
    return bandwidth, link


def link_bandwidth() -> float:
    """Bytes/s of a copy from pinned host memory to the device, the median of a few."""
    size = _LINK_BYTES if jax.default_backend() != "cpu" else 1 << 20
    on_host = jax.device_put(jnp.zeros((size // 4,), jnp.int32), host_memory())
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return size / real_step.median_seconds(lambda: jax.device_put(on_host, device), _LINK_COPIES)


def same_bits(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Whether two rows of arrays are alike to the last bit."""
    return all(one.tobytes() == other.tobytes() for one, other in zip(first, second, strict=True))


def describe(cell: dict[str, Any]) -> str:
    """One cell in one line."""
    return (
        f"{100 * cell['asked_share']:g} % {cell['cell']}: {cell['milliseconds']:.2f} ms ({cell['over_resident']:.3f} "
        f"of resident, {cell['exposed_milliseconds']:+.2f} ms), floor {cell['floor_milliseconds']:.2f} ms, "
        f"{cell['cold_per_step']:.1f} cold experts a step, {cell['missed_per_step']:.1f} missed, {_early(cell)}"
        f"{cell['gigabytes_moved']:.3f} GB moved in at least {cell['link_milliseconds']:.2f} ms"
        f"{'' if cell['usable'] else '; LOGITS NOT FINITE'}"
    )


def _early(cell: dict[str, Any]) -> str:
    if "fetched_per_step" not in cell:
        return ""
    return f"{cell['fetched_per_step']:.1f} fetched early, of these {cell['used_per_step']:.1f} used, "
