"""One speculative step of the plain modules whose cold experts lie in host memory, beside the same without cold ones.

Knows: how the modules get made-up routes and random weights in two memories, and what is timed. Does not know: how
routes are made up (cold_routes), how hand-fused launches do the same (cold_step), or how a record is shown.

The cells are those of cold_step, in the same order. XLA writes decoded weights out before it uses them, so that the
step itself is slow; what counts here is what fetching adds to it.
"""

import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import tree_bytes
from v4flash.bench import cold_routes, random_weights, real_step
from v4flash.bench.cold_routes import ColdRoutes
from v4flash.bench.cold_step import REPEATED_STEPS, ROWS, SCHEMA, Request, describe, link_bandwidth
from v4flash.checkpoint.inventory import abstract_model
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options
from v4flash.engine.host_way import host_memory, tiered
from v4flash.engine.programs import Shapes
from v4flash.model.experts import Experts
from v4flash.model.host_experts import COLD_STACK, TABLE, HostExperts, changed_state, published_path
from v4flash.placement.table import Placement
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.speculative.step import speculative_step

_NUMERICS = REAL_NUMERICS


def run(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Times every cell; `say` hears one line of progress at a time. Returns the record, JSON-ready."""
    config, device = random_weights.with_small_memory(request.config), jax.devices()[0]
    bench = _Bench(config, request, say)
    rows, cells = request.draft_length + 1, []
    checks = bench.checks(rows)
    say(", ".join(f"{name}: {'same bits' if same else 'OTHER BITS'}" for name, same in checks.items()))
    for share in request.shares:
        cells += bench.cells(
            share, cold_routes.made_up(config, bench.places, share, rows, request.needed_steps)
        )
    return {
        "schema": SCHEMA,
        "device": {"platform": device.platform, "kind": device.device_kind},
        "family": config.family,
        "layers": config.num_hidden_layers,
        "rows": ROWS,
        "experts": config.n_routed_experts,
        "hot_experts": request.hot,
        "spare_slots": request.slots,
        "expert_bytes": bench.expert_bytes,
        "device_gigabytes": round(bench.device_bytes / 1e9, 1),
        "host_gigabytes": round(bench.host_bytes / 1e9, 1),
        "dtype": _NUMERICS.dtype.__name__,
        "mode": "qat",
        "bodies": "plain modules",
        "steps": request.steps,
        "repeats": request.repeats,
        "copy_bandwidth": round(bench.bandwidth),
        "link_bandwidth": round(bench.link),
        "weights": "random, made on the device",
        "checks": checks,
        "cells": cells,
    }


class _Bench:
    """One random model in two memories, and two programs: the step that fetches, and one that knows no cold experts."""

    def __init__(self, config: ModelConfig, request: Request, say: Callable[[str], None]):
        self.config, self.request, self.say = config, request, say
        self.places = cold_routes.table(config, request.hot)
        table = Placement(*(np.ascontiguousarray(self.places[..., column]) for column in (0, 1)))
        routed = functools.partial(HostExperts, hot=request.hot, spare=request.slots)
        self.shapes = Shapes(ROWS, ROWS, request.context + real_step.SLACK)
        started = time.perf_counter()
        graphdef, self.weights = tiered(self._random(routed), config, _NUMERICS, routed, table)
        few = functools.partial(_few, count=request.hot)
        plain, _ = abstract_model(config, _NUMERICS, few)
        self.resident = nnx.from_flat_state(
            [
                (published_path(path), variable)
                for path, variable in nnx.to_flat_state(self.weights.kept)
                if COLD_STACK not in path and TABLE not in path
            ]
        )
        jax.block_until_ready((self.weights.kept, self.weights.changed))
        cold = [
            variable.get_value()
            for path, variable in nnx.to_flat_state(self.weights.kept)
            if COLD_STACK in path
        ]
        self.host_bytes = sum(array.nbytes for array in cold)
        self.device_bytes = tree_bytes((self.weights.kept, self.weights.changed)) - self.host_bytes
        self.expert_bytes = self.host_bytes // (len(self.places) * (config.n_routed_experts - request.hot))
        say(f"{self.device_bytes / 1e9:.1f} GB of weights on the device, {self.host_bytes / 1e9:.1f} GB beside it, in "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip
        self._compile(graphdef, plain)
        self.bandwidth, self.link = real_step.copy_bandwidth(), link_bandwidth()
        say(f"copy bandwidth {self.bandwidth / 1e12:.2f} TB/s, link {self.link / 1e9:.1f} GB/s")

    def _random(self, routed: Callable) -> nnx.State:
        """Random weights, cold experts in host memory, one array after the other; tables and caches are left out."""
        config, memory, made = self.config, host_memory(), []
        rows = self.request.draft_length + 1
        experts = random_weights.popular_experts(config, config.n_routed_experts, rows)
        for number, (path, variable) in enumerate(abstract_model(config, _NUMERICS, routed)[1]):
            if published_path(path) is None:
                continue
            one = random_weights.fill(nnx.from_flat_state([(path, variable)]), config, experts, seed=number)
            ((_, filled),) = nnx.to_flat_state(one)
            if COLD_STACK in path:
                filled = filled.replace(jax.block_until_ready(jax.device_put(filled.get_value(), memory)))
            made.append((path, filled))
        return nnx.from_flat_state(made)

    def _compile(self, graphdef: nnx.GraphDef, plain: nnx.GraphDef) -> None:
        started, config = time.perf_counter(), self.config
        stream = real_step.empty_stream(config, self.shapes)
        control = real_step.control_of(config, self.request.draft_length, ROWS)
        routes = jnp.zeros((self.request.needed_steps, *self._ids(self.places[:, :1, :1]).shape), jnp.int32)
        position = jnp.int32(0)

        def fetching(kept, changed, stream, control, routes, position):
            model = nnx.merge(graphdef, kept, changed)
            _plan(model, routes[position])
            stream, result = speculative_step(model, stream, control, ROWS)
            return result, changed_state(model), stream, (position + 1) % routes.shape[0]

        def resident(kept, changed, stream, control, routes, position):
            model = nnx.merge(plain, kept)
            _plan(model, routes[position])
            stream, result = speculative_step(model, stream, control, ROWS)
            return result, changed, stream, (position + 1) % routes.shape[0]

        lowered = [
            jax.jit(step, donate_argnums=(1, 2, 5)).lower(*weights, stream, control, routes, position)
            for step, weights in (
                (fetching, (self.weights.kept, self.weights.changed)),
                (resident, (self.resident, None)),
            )
        ]
        with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
            options = compiler_options.here()
            compiled = pool.map(lambda program: program.compile(compiler_options=options), lowered)
            self.programs = dict(zip(("tiered", "resident"), compiled, strict=True))
        self.control, self.stream = control, real_step.noisy(stream)
        self.say(f"plain modules: two programs compiled in {time.perf_counter() - started:.0f} s")

    def cells(self, share: float, routes: ColdRoutes) -> list[dict[str, Any]]:
        """The four cells of one cold share."""
        redirected = ColdRoutes(routes.ids[: self.request.steps], routes.cold).redirected()
        repeating, made = routes.repeating(REPEATED_STEPS), []
        for name, program, given in (
            ("resident", "resident", redirected),
            ("redirected", "tiered", redirected),
            ("cold", "tiered", routes),
            ("repeating", "tiered", repeating),
        ):
            cell = {"cell": name, "asked_share": share, "share": round(given.share, 4)}
            cell |= self._timed(program, self._routes(given, slots=program == "resident"), given.distinct)
            baseline = made[0]["milliseconds"] if made else cell["milliseconds"]
            cell["exposed_milliseconds"] = round(cell["milliseconds"] - baseline, 3)
            cell["over_resident"] = round(cell["milliseconds"] / baseline, 4)
            made.append(cell)
            self.say(describe(cell))
        return made

    def checks(self, rows: int) -> dict[str, bool]:
        """Whether a step that fetches leaves the caches of the same step that finds everything there, bit for bit."""
        routes = cold_routes.made_up(self.config, self.places, 0.3, rows, steps=1)
        redirected = routes.redirected()
        missed, hit = self._caches("tiered", routes), self._caches("tiered", routes)
        return {
            "resident and redirected": _same(
                self._caches("resident", redirected), self._caches("tiered", redirected)
            ),
            "missed and kept": _same(missed, hit),
        }

    def _caches(self, program: str, routes: ColdRoutes) -> list[np.ndarray]:
        fresh = real_step.noisy(real_step.empty_stream(self.config, self.shapes))
        self.stream = real_step.at_context(fresh, self.request.context, self.config)
        self._step(program, self._routes(routes, slots=program == "resident"), jnp.int32(0))
        return [np.asarray(window) for window in self.stream.decode.windows]

    def _timed(self, program: str, routes: jax.Array, distinct: float) -> dict[str, Any]:
        request, position = self.request, jnp.int32(0)
        self.stream = real_step.at_context(self.stream, request.context, self.config)

        def loop(steps: int):
            nonlocal position
            for _ in range(steps):
                result, position = self._step(program, routes, position)
            return result

        jax.block_until_ready(loop(request.steps))
        before, taken = self._counts(), []
        for _ in range(request.repeats):
            started = time.perf_counter()
            result = jax.block_until_ready(loop(request.steps))
            taken.append((time.perf_counter() - started) / request.steps)
        asked, fetched = (self._counts() - before) / (request.steps * request.repeats)
        moved = fetched * self.expert_bytes
        cell = {
            "k": request.draft_length,
            "context": request.context,
            "milliseconds": round(1e3 * statistics.median(taken), 3),
            "spread": [round(1e3 * min(taken), 3), round(1e3 * max(taken), 3)],
            "experts_per_layer": {"mean": round(distinct, 1)},
            "cold_per_step": round(float(asked), 2),
            "missed_per_step": round(float(fetched), 2),
            "kept_per_step": round(float(asked - fetched), 2),
            "usable": bool(result.usable),
            "verified": int(result.drafted),
            "gigabytes_moved": round(moved / 1e9, 4),
            "link_milliseconds": round(1e3 * moved / self.link, 3),
        }
        if request.profile:
            cell["profile"], _ = real_step.profiled(
                lambda stream: (stream, loop(real_step.PROFILED_STEPS), None), None
            )
        return cell | real_step.beside_floor(self.config, cell, self.bandwidth)

    def _step(self, program: str, routes: jax.Array, position: jax.Array):
        weights = (
            (self.resident, None) if program == "resident" else (self.weights.kept, self.weights.changed)
        )
        result, changed, self.stream, position = self.programs[program](
            *weights, self.stream, self.control, routes, position
        )
        if changed is not None:
            self.weights.changed = changed
        return result, position

    def _counts(self) -> np.ndarray:
        """Cold experts asked for and fetched so far, by all layers."""
        flat = nnx.to_flat_state(self.weights.changed)
        return np.sum(
            [np.asarray(variable.get_value()) for path, variable in flat if path[-1] == "counts"], axis=0
        )

    def _routes(self, routes: ColdRoutes, slots: bool) -> jax.Array:
        """Ids for as many steps as a program takes; of `slots` of hot experts instead of ids."""
        ids = routes.ids
        if slots:
            ids = self.places[np.arange(ids.shape[1])[:, None, None], ids, 1]
        return jnp.asarray(
            np.resize(self._ids(ids), (self.request.needed_steps, *self._ids(ids[0]).shape)), jnp.int32
        )

    def _ids(self, ids: np.ndarray) -> np.ndarray:
        """Ids [..., L, rows, K] with rows added that are dead."""
        wanted = (*ids.shape[:-2], ROWS, self.config.num_experts_per_tok)
        padded = np.zeros(wanted, np.int32)
        padded[..., : ids.shape[-2], : ids.shape[-1]] = ids
        return padded


def _few(config: ModelConfig, numerics, count_of_all: int, *, count: int) -> Experts:
    """The hot experts alone, by their slots."""
    return Experts(config, numerics, count)


def _plan(model, routes: jax.Array) -> None:
    """Has each layer's router choose routes[layer] int32 [R, K]; it still does its work, for its weights are used."""
    for layer, ids in zip(model.backbone.layers, routes, strict=True):
        layer.ffn.gate = functools.partial(_planned, layer.ffn.gate, ids)


def _planned(gate, ids: jax.Array, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ids, gate(x, tokens)[1]


def _same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(one.tobytes() == other.tobytes() for one, other in zip(first, second, strict=True))
