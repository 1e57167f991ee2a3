"""One speculative step at a configuration's real shapes, on random weights, timed on the device that is there.

Knows: how the step is compiled, repeated and profiled, and how its time stands beside the bytes it must read. Does
not know: how a record is shown (cli/bench). Nothing is learnt of acceptance: random weights accept next to nothing,
so a step commits about one token whatever is drafted, and its time is the figure.

A loop dispatches ahead: the host queues steps and waits once behind the last one. Its time over its steps is what a
stream pays; the profile, which launches kernels one by one, says where it goes.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.bench import random_weights
from v4flash.bench.streams import rates, stream_bytes
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options, peer_way
from v4flash.engine.programs import Shapes, make_control, new_state, new_stream
from v4flash.engine.steady_step import step_in_place
from v4flash.errors import UsageError
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.model import FusedModel
from v4flash.profile import profile_table
from v4flash.profile.deviceless import BACKENDS, REAL_NUMERICS, abstract_weights, tree_bytes
from v4flash.profile.floor import CORRELATED, MEASURED, Routing, floor, modelled_routing
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.step import draft_limit, speculative_step
from v4flash.speculative.stream import Control, StepResult, Stream

SCHEMA = "v4flash.real_step/1"
# Every step chooses other experts, so that a few profiled ones would say little of those that were timed.
WARM_STEPS, PROFILED_STEPS = 3, 10
_COPIED, _COPIES = 1 << 30, 16  # bytes of the array whose copies give the bandwidth, and their number
SLACK = 1024  # positions behind the longest context, for the steps of the loops


@dataclasses.dataclass(frozen=True)
class Request:
    """What to time.

    Attributes:
      config: configuration of the model.
      backends: of BACKENDS, one after the other.
      draft_lengths, contexts: each with each; committed positions before the first step.
      resident: routed experts a layer that are there; routes go to these only.
      peer: one program for two devices that have half of these experts each, timed also without the sum over both.
      rows: of the verifying pass.
      temperatures: of target and drafts, each with each context and draft length; 0 is greedy.
      top_p: of target and drafts, where they are drawn; 1 is off.
      depths: verified drafts where steps choose their depth, each with each draft length that is as long; None times
        steps that verify all.
      steps, repeats: a loop dispatches `steps` steps, `repeats` times.
      profile: whether to take a profile of every cell.
    """

    config: ModelConfig
    backends: Sequence[str] = ("fused",)
    draft_lengths: Sequence[int] = (0, 3, 5, 7)
    contexts: Sequence[int] = (2048, 65536)
    resident: int | None = None
    peer: bool = False
    rows: int = 8
    temperatures: Sequence[float] = (0.0,)
    top_p: float = 1.0
    depths: Sequence[int] | None = None
    steps: int = 20
    repeats: int = 5
    profile: bool = True

    def __post_init__(self):
        limit = draft_limit(self.rows) if self.config.draft else 0
        for backend in self.backends:
            if backend not in BACKENDS:
                raise UsageError(f"no backend {backend}; expected one of {', '.join(BACKENDS)}")
        if self.peer and tuple(self.backends) != ("fused",):
            raise UsageError("two devices are timed with backend fused only")
        if not self.draft_lengths or not self.contexts:
            raise UsageError("nothing to time: give at least one draft length and one context")
        if max(self.draft_lengths) > limit:
            raise UsageError(f"k is {max(self.draft_lengths)}, this program takes 0 to {limit}")
        if self.depths is not None and (not self.depths or max(self.depths) > min(self.draft_lengths)):
            raise UsageError(
                f"depths are {list(self.depths)}, k = {min(self.draft_lengths)} has 0 to as many"
            )
        SamplingParams.make(top_p=self.top_p)
        if max(self.contexts) + SLACK > self.config.max_position_embeddings:
            raise UsageError(
                f"context is {max(self.contexts)}, the model ends at {self.config.max_position_embeddings}"
            )
        most = self.config.n_routed_experts
        if self.resident is not None and not self.config.num_experts_per_tok <= self.resident <= most:
            raise UsageError(
                f"{self.resident} experts resident, expected {self.config.num_experts_per_tok} to {most}"
            )


def run(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Times every cell; `say` hears one line of progress at a time. Returns the record, JSON-ready."""
    request = dataclasses.replace(request, config=random_weights.with_small_memory(request.config))
    config = request.config
    resident = request.resident or config.n_routed_experts
    experts = random_weights.popular_experts(config, resident, max(request.draft_lengths) + 1)
    cells, bandwidths = [], []
    for backend in request.backends:
        found, bandwidth = _backend_cells(request, backend, experts, say)
        cells += found
        bandwidths.append(bandwidth)
        gc.collect()
    return {
        "schema": SCHEMA,
        **subject(config, request.rows),
        "experts_resident": resident,
        "devices": 2 if request.peer else 1,
        "memory_rows": list(config.engram.num_embeddings) if config.engram else [],
        "dtype": REAL_NUMERICS.dtype.__name__,
        "mode": "qat",
        "top_p": request.top_p,
        "steps": request.steps,
        "repeats": request.repeats,
        "copy_bandwidth": round(statistics.median(bandwidths)),
        "weights": "random, made on the device",
        "cells": cells,
    }


def subject(config: ModelConfig, rows: int) -> dict[str, Any]:
    """What a record is about: the device, the model, and the rows of a pass."""
    device = jax.devices()[0]
    return {
        "device": {"platform": device.platform, "kind": device.device_kind},
        "family": config.family,
        "layers": config.num_hidden_layers,
        "rows": rows,
        "experts": config.n_routed_experts,
    }


def copy_bandwidth() -> float:
    """Bytes/s read and written by copies of a large array on the device, the median of a few chains of them."""
    source = jnp.zeros((_COPIED // 4 if jax.default_backend() != "cpu" else 1 << 22,), jnp.int32)

    def chain(x: jax.Array) -> jax.Array:
        # One graph without barriers would be a single addition.
        for _ in range(_COPIES):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    lowered = jax.jit(chain).lower(source)
    copies = lowered.compile(compiler_options=compiler_options.here(lowered))
    copies(source).block_until_ready()
    return 2 * source.nbytes * _COPIES / median_seconds(lambda: copies(source), 7)


def median_seconds(make: Callable[[], Any], calls: int) -> float:
    """Seconds until what is made is there, the median of so many calls."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        jax.block_until_ready(make())
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _backend_cells(
    request: Request, backend: str, experts: random_weights.Experts, say
) -> tuple[list[dict[str, Any]], float]:
    """The cells of one backend, and the copy bandwidth measured in front of them."""
    config = request.config
    shapes = Shapes(request.rows, request.rows, max(request.contexts) + SLACK)
    started = time.perf_counter()
    program = (PeerProgram if request.peer else StepProgram)(config, backend, shapes, experts)
    say(f"{backend}: compiled in {time.perf_counter() - started:.0f} s")
    bandwidth = copy_bandwidth()
    say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    started = time.perf_counter()
    params = jax.block_until_ready(program.weights())
    size = tree_bytes(params) / 1e9
    say(f"{backend}: {size:.1f} GB of weights in {time.perf_counter() - started:.0f} s")
    stream, cells = program.stream(), []
    for setting in itertools.starmap(
        Setting,
        itertools.product(
            request.contexts, request.temperatures, request.draft_lengths, request.depths or (None,)
        ),
    ):
        cell, stream = _cell(request, program, params, stream, setting)
        cell = {"backend": backend, "weights_gigabytes": round(size, 1)} | cell
        distinct = cell.pop("distinct")
        cell |= beside_floor(config, cell, bandwidth)
        if request.peer:
            alone = dataclasses.replace(request, profile=False)
            other, stream = _cell(alone, program.without_sum, params, stream, setting)
            exposed = (cell["milliseconds"] - other["milliseconds"]) / config.num_hidden_layers
            cell["without_sum_milliseconds"] = other["milliseconds"]
            cell["exposed_microseconds_per_layer"] = round(1e3 * exposed, 2)
        elif backend == "fused" and cell.get("profile"):
            drafted = modelled_routing(config, setting.k, CORRELATED).draft
            read = stream_bytes(program.params, distinct, drafted, setting.k > 0)
            cell["streams"] = rates(cell["profile"], read, bandwidth)
        cells.append(cell)
        say(describe(cells[-1]))
    return cells, bandwidth


class Made(NamedTuple):
    """What a step leaves beside the stream: its result, and the experts [L, R, K] of each row."""

    result: StepResult
    routes: jax.Array

    @classmethod
    def blank(cls, config: ModelConfig, rows: int) -> "Made":
        """What a step of passes of so many rows leaves, in the host's memory and without meaning."""
        limit = draft_limit(rows) if config.draft else 0
        routes = np.zeros((config.num_hidden_layers, rows, config.num_experts_per_tok), np.int32)
        return cls(StepResult.blank(limit), routes)


class StepProgram:
    """The compiled step of one backend, which writes what it makes where the step before did, as decoding does."""

    def __init__(self, config: ModelConfig, backend: str, shapes: Shapes, experts: random_weights.Experts):
        self.config, self.shapes, self.experts = config, shapes, experts
        params, build = abstract_weights(config, REAL_NUMERICS, backend)
        self.params = random_weights.with_resident(params, config, experts.resident)
        control = jax.eval_shape(lambda: control_of(config, 0, shapes.rows))
        stream = jax.eval_shape(lambda: empty_stream(config, shapes))

        step = step_with_routes(build, shapes.rows)
        made = Made.blank(config, shapes.rows)
        lowered = jax.jit(step_in_place(step), donate_argnums=(1, 3), keep_unused=True).lower(
            self.params, stream, control, made
        )
        self._compiled = lowered.compile(compiler_options=compiler_options.here(lowered))
        self._spent = self.place(jax.device_put(made))

    def run(self, params: Any, stream: Stream, control: Control) -> tuple[Stream, Made]:
        """One step; what it made is readable until the next one."""
        stream, self._spent = self._compiled(params, stream, control, self._spent)
        return stream, self._spent

    def weights(self) -> Any:
        """Random ones."""
        return random_weights.fill(self.params, self.config, self.experts)

    def stream(self) -> Stream:
        """A stream whose caches hold random rows."""
        return noisy(empty_stream(self.config, self.shapes))

    def place(self, tree: Any) -> Any:
        """Arrays where the program takes them."""
        return tree


class PeerProgram(StepProgram):
    """The same for two devices that have half of the resident experts each, packed.

    Args: alone, leave the sum over devices out: each goes on with the part of its own experts, which is wrong, and
    says by its time what the sum costs.
    """

    bodies: type[ReferenceBodies] = FusedBodies

    def __init__(
        self,
        config: ModelConfig,
        backend: str,
        shapes: Shapes,
        experts: random_weights.Experts,
        alone: bool = False,
    ):
        self.config, self.shapes, self.experts = config, shapes, experts
        self.mesh = peer_way.mesh_of(jax.devices())
        params, _ = abstract_weights(config, REAL_NUMERICS, backend, -(-experts.resident // 2))
        self.params = peer_way.of_both(params)
        runner = peer_way.runner(self.mesh)
        self.place = runner.place
        control = jax.eval_shape(lambda: control_of(config, 0, shapes.rows))
        stream = jax.eval_shape(lambda: empty_stream(config, shapes))

        class Alone(self.bodies):
            def over_devices(self, partial: jax.Array) -> jax.Array:
                return partial

        bodies = Alone if alone else self.bodies
        step = step_with_routes(lambda packed: FusedModel(config, REAL_NUMERICS, packed, bodies), shapes.rows)
        made = Made.blank(config, shapes.rows)
        # Outputs matter to programs that are kept on disk, and this one is not.
        arguments = self.params, stream, control, made
        self._compiled, _ = runner.pin("bench", step_in_place(step), arguments, None, (1, 3), (), None)
        self._spent = self.place(jax.device_put(made))

    def weights(self) -> Any:
        """Random ones, each made on the devices that it is for."""
        return random_weights.fill(self.params, self.config, self.experts, self.mesh)

    @functools.cached_property
    def without_sum(self) -> "PeerProgram":
        """The program without the sum."""
        return type(self)(self.config, "fused", self.shapes, self.experts, alone=True)


def step_with_routes(build: Callable, rows: int) -> Callable:
    """A step (params, stream, control) -> (stream, Made) of the models that `build` makes."""

    def step(params, stream, control):
        model, routes = build(params), []
        trunk = model.backbone.trunk

        def recorded(*arguments):
            made = trunk(*arguments)
            routes.extend(made[0].routes)
            return made

        model.backbone.trunk = recorded
        stream, result = speculative_step(model, stream, control, rows)
        return stream, Made(result, jnp.stack(routes))

    return step


def control_of(
    config: ModelConfig,
    k: int,
    rows: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    depth: int | None = None,
) -> Control:
    """Decoding with k drafts, of which a chosen `depth` is verified; None: all, without choosing."""
    block = max(k, min(config.draft.block_size, draft_limit(rows))) if config.draft else 0
    sampling = SamplingParams.make(temperature=temperature, top_p=top_p)
    policy = None if depth is None else DepthPolicy.stopping_at(depth)
    return make_control(k, block, sampling, jnp.zeros((2,), jnp.uint32), (), depth=policy)


def empty_stream(config: ModelConfig, shapes: Shapes) -> Stream:
    """A stream of no tokens."""
    return new_stream(
        new_state(config, REAL_NUMERICS, shapes), (), 0, control_of(config, 0, shapes.rows), shapes
    )


def noisy(stream: Stream) -> Stream:
    """The stream with random numbers in its caches, so that no choice by score meets equal scores."""
    numbers = iter(range(1, 1 << 20))

    def filled(leaf):
        if leaf.ndim < 2:
            return leaf
        return jax.random.normal(jax.random.key(next(numbers)), leaf.shape, jnp.float32).astype(leaf.dtype)

    return dataclasses.replace(stream, decode=jax.tree.map(filled, stream.decode))


def at_context(stream: Stream, context: int, config: ModelConfig) -> Stream:
    """The stream with `context` committed positions and much left to emit."""
    tokens = np.random.default_rng(context).integers(0, config.vocab_size, stream.history.shape[0])
    return dataclasses.replace(
        stream,
        decode=stream.decode.replace(length=jnp.int32(context)),
        anchor=jnp.int32(tokens[context]),
        remaining=jnp.int32(1 << 20),
        finish=jnp.int32(0),
        repeats=jnp.int32(1),
        history=jnp.asarray(tokens, jnp.int32),
    )


class Setting(NamedTuple):
    """What one cell times: committed positions, temperature, drafts, and the depth that steps choose (None: all)."""

    context: int
    temperature: float
    k: int
    depth: int | None


def _cell(request: Request, program: StepProgram, params, stream: Stream, setting: Setting):
    """Times one setting: the figures, and the stream to go on with."""
    context, temperature, k, depth = setting
    control = control_of(request.config, k, request.rows, temperature, request.top_p, depth)
    control = program.place(control)
    stream = program.place(at_context(stream, context, request.config))

    def loop(stream: Stream, steps: int) -> tuple[Stream, Made]:
        for _ in range(steps):
            stream, made = program.run(params, stream, control)
        return stream, made

    stream, _ = loop(stream, WARM_STEPS)
    taken, queued = [], []
    for _ in range(request.repeats):
        started = time.perf_counter()
        stream, made = loop(stream, request.steps)
        queued.append((time.perf_counter() - started) / request.steps)
        jax.block_until_ready(made)
        taken.append((time.perf_counter() - started) / request.steps)
    # Steps differ in what they choose, and each writes over the one before: as many again are waited for one by one.
    chosen = []
    for _ in range(request.steps):
        stream, made = loop(stream, 1)
        chosen.append(_distinct(made.routes, 1 + (k if depth is None else depth)))
    distinct = np.mean(chosen, axis=0).tolist()
    cell = {
        "context": context,
        "temperature": temperature,
        "k": k,
        "depth": depth,
        "milliseconds": round(1e3 * statistics.median(taken), 3),
        "spread": [round(1e3 * min(taken), 3), round(1e3 * max(taken), 3)],
        "queued_milliseconds": round(1e3 * statistics.median(queued), 3),
        "distinct": distinct,
        "experts_per_layer": {
            "mean": round(float(np.mean(distinct)), 1),
            "least": round(min(distinct), 1),
            "most": round(max(distinct), 1),
        },
        "usable": bool(made.result.usable),
        "verified": int(made.result.drafted),
    }
    if request.profile:
        table, stream = profiled(lambda stream: loop(stream, PROFILED_STEPS), stream)
        cell["profile"] = table
        if table:
            busy = table["kernel_microseconds"] / 1e3
            cell["idle"] = round(max(0.0, 1 - busy / cell["milliseconds"]), 4)
    return cell, stream


def _distinct(routes: jax.Array, live: int) -> list[int]:
    """Different experts of each layer among routes [L, R, K], of which the first `live` rows count."""
    return [len(np.unique(layer[:live])) for layer in np.asarray(routes)]


def profiled(loop: Callable, stream: Stream) -> tuple[dict[str, Any] | None, Stream]:
    """Kernels of a few steps by name and duration, or None where the device shows none."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            stream, made = loop(stream)
            jax.block_until_ready(made)
        events = profile_table.read_events(Path(folder)) if list(Path(folder).rglob("*.xplane.pb")) else []
    if not events:
        return None, stream
    table = profile_table.table(events, PROFILED_STEPS)
    return {
        "kernels_per_step": round(table.kernels_per_step, 1),
        "transfers_per_step": round(table.transfers_per_step, 1),
        "kernel_microseconds": round(sum(total.microseconds for total in table.names), 1),
        "buckets": {name: [round(n, 1), round(us, 1)] for name, (n, us) in table.buckets.items()},
        "kernels": [
            {
                "name": total.name[:80],
                "per_step": round(total.per_step, 1),
                "microseconds": round(total.microseconds, 1),
                "mean": round(total.mean, 2),
            }
            for total in table.names[:60]
        ],
    }, stream


def beside_floor(config: ModelConfig, cell: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """The cell with the bytes the step had to read with the experts it chose, and its time over theirs."""
    drafter = modelled_routing(config, cell["k"], CORRELATED).draft
    routing = Routing(cell["experts_per_layer"]["mean"], drafter, MEASURED, "counted; the drafter's modelled")
    least = floor(config, cell["k"], cell["context"], routing)
    ideal = least.milliseconds(bandwidth)
    return cell | {
        "floor_bytes": round(least.bytes),
        "floor_milliseconds": round(ideal, 3),
        "over_floor": round(cell["milliseconds"] / ideal, 3),
    }


def describe(cell: dict[str, Any]) -> str:
    """One cell in one line."""
    profile = cell.get("profile")
    launches = (
        f", {profile['kernels_per_step']:,.0f} kernels, idle {100 * cell['idle']:.1f} %" if profile else ""
    )
    exposed = cell.get("exposed_microseconds_per_layer")
    if exposed is not None:
        launches += f", {exposed:.1f} us a layer for the sum over devices"
    depth = "" if cell["depth"] is None else f" depth={cell['depth']}"
    return (
        f"{cell['backend']} k={cell['k']}{depth} T={cell['temperature']:g} at {cell['context']:,}: "
        f"{cell['milliseconds']:.2f} ms, floor {cell['floor_milliseconds']:.2f} ms (x{cell['over_floor']:.2f}), "
        f"{cell['experts_per_layer']['mean']:.1f} experts a layer{launches}"
        f"{'' if cell['usable'] else '; LOGITS NOT FINITE'}"
    )
