"""One speculative step of the plain modules whose cold experts lie in host memory, beside the same without cold ones.

Knows: how the modules get made-up routes and random weights in two memories. Does not know: how routes are made up
(cold_routes), what is timed and recorded of them (cold_cells), or how hand-fused launches do the same (cold_step).

XLA writes decoded weights out before it uses them, so that the step itself is slow; what counts here is what fetching
adds to it.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import tree_bytes
from v4flash.bench import cold_routes, random_weights, real_step
from v4flash.bench.cold_cells import (
    CHECKED_SHARE,
    ROWS,
    Request,
    Weights,
    measured_bandwidths,
    of_share,
    record,
    same_bits,
    timed_cell,
)
from v4flash.bench.cold_routes import ColdRoutes
from v4flash.checkpoint.inventory import abstract_model
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options
from v4flash.engine.host_way import tiered
from v4flash.engine.programs import Shapes
from v4flash.model.experts import Experts
from v4flash.model.host_experts import COLD_STACK, TABLE, HostExperts, changed_state, published_path
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import Placement
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.speculative.step import speculative_step

_NUMERICS = REAL_NUMERICS


def run(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Times every cell; `say` hears one line of progress at a time. Returns the record, JSON-ready."""
    config = random_weights.with_small_memory(request.config)
    bench = _Bench(config, request, say)
    rows, cells = request.draft_length + 1, []
    checks = bench.checks(rows)
    say(", ".join(f"{name}: {'same bits' if same else 'OTHER BITS'}" for name, same in checks.items()))
    for share in request.shares:
        cells += bench.cells(
            share, cold_routes.made_up(config, bench.places, share, rows, request.needed_steps)
        )
    return record(request, config, "plain modules", bench.sizes, checks, cells)


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
        few = functools.partial(hot_only, count=request.hot)
        plain, _ = abstract_model(config, _NUMERICS, few)
        self.resident = hot_state(self.weights.kept)
        jax.block_until_ready((self.weights.kept, self.weights.changed))
        cold = [
            variable.get_value()
            for path, variable in nnx.to_flat_state(self.weights.kept)
            if COLD_STACK in path
        ]
        on_host = sum(array.nbytes for array in cold)
        on_device = tree_bytes((self.weights.kept, self.weights.changed)) - on_host
        say(f"{on_device / 1e9:.1f} GB of weights on the device, {on_host / 1e9:.1f} GB beside it, in "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip
        self._compile(graphdef, plain)
        one = on_host // (len(self.places) * (config.n_routed_experts - request.hot))
        self.sizes = Weights(one, on_device, on_host, *measured_bandwidths(say))

    def _random(self, routed: Callable) -> nnx.State:
        """Random weights, cold experts in host memory, one array after the other; tables and caches are left out."""
        config, memory, made = self.config, host_memory(), []
        rows = self.request.draft_length + 1
        experts = random_weights.popular_experts(config, config.n_routed_experts, rows)
        variables = abstract_model(config, _NUMERICS, routed)[1]
        for path, filled in random_weights.one_by_one(variables, config, experts, published_path):
            if COLD_STACK in path:
                filled = filled.replace(jax.block_until_ready(jax.device_put(filled.get_value(), memory)))
            made.append((path, filled))
        return nnx.from_flat_state(made)

    def _compile(self, graphdef: nnx.GraphDef, plain: nnx.GraphDef) -> None:
        started, config = time.perf_counter(), self.config
        stream = real_step.empty_stream(config, self.shapes)
        control = real_step.control_of(config, self.request.draft_length, ROWS)
        routes = jnp.zeros(
            (self.request.needed_steps, config.num_hidden_layers, ROWS, config.num_experts_per_tok), jnp.int32
        )
        position = jnp.int32(0)

        def fetching(kept, changed, stream, control, routes, position):
            model = nnx.merge(graphdef, kept, changed)
            choose(model, routes[position])
            stream, result = speculative_step(model, stream, control, ROWS)
            return result, changed_state(model), stream, (position + 1) % routes.shape[0]

        def resident(kept, changed, stream, control, routes, position):
            model = nnx.merge(plain, kept)
            choose(model, routes[position])
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
            compiled = pool.map(
                lambda program: program.compile(compiler_options=compiler_options.here(program)), lowered
            )
            self.programs = dict(zip(("tiered", "resident"), compiled, strict=True))
        self.control, self.stream = control, real_step.noisy(stream)
        self.say(f"plain modules: two programs compiled in {time.perf_counter() - started:.0f} s")

    def cells(self, share: float, routes: ColdRoutes) -> list[dict[str, Any]]:
        """The four cells of one cold share."""
        return of_share(self.request, share, routes, self._timed, self.say)

    def checks(self, rows: int) -> dict[str, bool]:
        """Whether a step that fetches leaves the caches of the same step that finds everything there, bit for bit."""
        routes = cold_routes.made_up(self.config, self.places, CHECKED_SHARE, rows, steps=1)
        redirected = routes.redirected()
        missed, hit = self._caches("tiered", routes), self._caches("tiered", routes)
        return {
            "resident and redirected": same_bits(
                self._caches("resident", redirected), self._caches("tiered", redirected)
            ),
            "missed and kept": same_bits(missed, hit),
        }

    def _caches(self, program: str, routes: ColdRoutes) -> list[np.ndarray]:
        fresh = real_step.noisy(real_step.empty_stream(self.config, self.shapes))
        self.stream = real_step.at_context(fresh, self.request.context, self.config)
        self._step(program, self._routes(routes, slots=program == "resident"), jnp.int32(0))
        return [np.asarray(window) for window in self.stream.decode.windows]

    def _timed(self, program: str, routes: ColdRoutes) -> dict[str, Any]:
        request, position = self.request, jnp.int32(0)
        ids = self._routes(routes, slots=program == "resident")
        self.stream = real_step.at_context(self.stream, request.context, self.config)

        def loop(steps: int):
            nonlocal position
            for _ in range(steps):
                result, position = self._step(program, ids, position)
            return result

        return timed_cell(request, self.config, self.sizes, routes.distinct, loop, self._counts)

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
        """Cold experts asked for, fetched, and found there so far, by all layers."""
        flat = nnx.to_flat_state(self.weights.changed)
        asked, fetched = np.sum(
            [np.asarray(variable.get_value()) for path, variable in flat if path[-1] == "counts"], axis=0
        )
        return np.array([asked, fetched, asked - fetched])

    def _routes(self, routes: ColdRoutes, slots: bool) -> jax.Array:
        """Ids for as many steps as a program takes; of `slots` of hot experts instead of ids."""
        return planned(routes.slots(self.places) if slots else routes.ids, self.request.needed_steps)


def planned(ids: np.ndarray, steps: int) -> jax.Array:
    """Ids [n, L, rows, K] of consecutive steps as int32 [steps, L, ROWS, K]: again and again, dead rows added."""
    padded = np.zeros((*ids.shape[:2], ROWS, ids.shape[-1]), np.int32)
    padded[:, :, : ids.shape[2]] = ids
    return jnp.asarray(np.resize(padded, (steps, *padded.shape[1:])))


def hot_state(params: nnx.State) -> nnx.State:
    """What a model that knows hot experts alone takes of one with cold ones: no table, and no stack of those."""
    return nnx.from_flat_state(
        [
            (published_path(path), variable)
            for path, variable in nnx.to_flat_state(params)
            if COLD_STACK not in path and TABLE not in path
        ]
    )


def hot_only(config: ModelConfig, numerics, count_of_all: int, *, count: int) -> Experts:
    """The hot experts alone, by their slots."""
    return Experts(config, numerics, count)


def choose(model, routes: jax.Array) -> None:
    """Has each layer's router choose routes[layer] int32 [R, K]; it still does its work, for its weights are used."""
    for layer, ids in zip(model.backbone.layers, routes, strict=True):
        layer.ffn.gate = functools.partial(_planned, layer.ffn.gate, ids)


def _planned(gate, ids: jax.Array, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ids, gate(x, tokens)[1]
