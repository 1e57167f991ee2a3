"""One speculative step whose cold experts a second device computes, beside the same step without cold experts.

Knows: how a model is cut down to a few layers, how its random weights come to two devices, and what is timed: the step
of `--experts sidecar` as decoding runs it, one exchange of a layer, and the second device by itself. Does not know: how
routes are made up (cold_routes), what a cell records (cold_cells), or how a cold expert is computed.

Every piece of every layer is a program of its own, and one layer adds what another adds: a few layers say enough.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import tree_bytes
from v4flash.bench import cold_alone, cold_cells, cold_routes, plain_cold_step, random_weights, real_step
from v4flash.bench.cold_cells import ROWS, Request, Weights
from v4flash.bench.cold_routes import ColdRoutes
from v4flash.checkpoint.inventory import abstract_model
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options
from v4flash.engine.peer_way import with_tables
from v4flash.engine.programs import Shapes
from v4flash.engine.sidecar_way import Sidecar, device_beside
from v4flash.model.experts import own_contributions
from v4flash.model.host_experts import HELD_STACK
from v4flash.model.paired_experts import SidecarExperts
from v4flash.placement.table import Placement
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.speculative.step import speculative_step

CELLS = (
    "resident",
    "redirected",
    "cold",
)  # nothing is kept, so that a text that repeats itself gains nothing
_CALLS = 20
_ALIKE = (
    0.05  # relative difference of rounded sums in another order, and of FP8 roundings that fall otherwise
)


def run(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Times every cell; `say` hears one line of progress at a time. Returns the record, JSON-ready.

    `request.slots` means nothing here: nothing is kept. Raises CapacityError where there is no second device.
    """
    config, first = random_weights.with_small_memory(request.config), jax.devices()[0]
    device, rows = device_beside(first), request.draft_length + 1
    say(f"{config.num_hidden_layers} layers on {first}, their cold experts on {device}")
    alone = cold_alone.run(config, device, ROWS, rows)
    for times in alone:
        say(f"{device} alone, {times['rows_decoded']} rows decoded at a time: " + ", ".join(
            f"{count} experts {taken:.2f} ms" for count, taken in times["milliseconds"].items()
        ))  # fmt: skip
    bench = _Bench(config, request, first, device, say)
    exchanges = bench.exchanges(rows)
    say(", ".join(f"{name} {taken:.0f} us" for name, taken in exchanges.items()))
    checks = bench.checks(rows)
    say(", ".join(f"{name}: {'right' if right else 'WRONG'}" for name, right in checks.items()))
    cells = []
    for share in request.shares:
        routes = cold_routes.made_up(config, bench.places, share, rows, request.needed_steps)
        cells += cold_cells.of_share(request, share, routes, bench.timed, say, CELLS)
    for cell in cells:
        cell["exposed_microseconds_per_layer"] = round(
            1e3 * cell["exposed_milliseconds"] / config.num_hidden_layers, 1
        )
    bench.close()
    return cold_cells.record(request, config, "plain modules", bench.sizes, checks, cells) | {
        "spare_slots": 0,
        "ratios": [layer.ratio for layer in config.layers],
        "second_device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "cores": os.cpu_count() if device.platform == "cpu" else None,
        },
        "exchange_microseconds": exchanges,
        "second_device_alone": alone,
    }


class _Bench:
    """One random model on two devices, and two programs: the step that is cut, and one that knows no cold experts."""

    def __init__(self, config: ModelConfig, request: Request, first: jax.Device, device: jax.Device, say):
        self.config, self.request, self.say = config, request, say
        self.first, self.device = first, device
        self.places = cold_routes.table(config, request.hot)
        placement = Placement(*(np.ascontiguousarray(self.places[..., column]) for column in (0, 1)))
        self.side = Sidecar(config, REAL_NUMERICS, placement, first, device)
        self.shapes = Shapes(ROWS, ROWS, request.context + real_step.SLACK)
        started = time.perf_counter()
        routed = functools.partial(SidecarExperts, slots=request.hot)
        graphdef, self.params = with_tables(
            self._random(), config, REAL_NUMERICS, routed, placement, self.side.put
        )
        self.resident = plain_cold_step.hot_state(self.params)
        jax.block_until_ready(self.params)
        on_device = tree_bytes(self.params)
        held = sum(
            variable.get_value().nbytes
            for path, variable in nnx.to_flat_state(self.params)
            if HELD_STACK in path
        )
        one = held // (config.num_hidden_layers * request.hot)
        beside = one * config.num_hidden_layers * (config.n_routed_experts - request.hot)
        say(f"{on_device / 1e9:.1f} GB of weights on {first}, {beside / 1e9:.1f} GB on {device}, in "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip
        bandwidths = real_step.copy_bandwidth(), self._link()
        self.sizes = Weights(one, on_device, beside, *bandwidths)
        self._compile(graphdef)

    def _random(self) -> nnx.State:
        """Random weights, one array after the other, cold experts on the second device."""
        config, made = self.config, []
        experts = random_weights.popular_experts(
            config, config.n_routed_experts, self.request.draft_length + 1
        )
        variables = abstract_model(config, REAL_NUMERICS)[1]
        for path, filled in random_weights.one_by_one(variables, config, experts):
            placed = self.side.put(path, filled.get_value())
            made += [(own, filled.replace(array)) for own, array in placed.items()]
        return nnx.from_flat_state(made)

    def _link(self) -> float:
        """Bytes/s of a large array from the first device to the second."""
        array = jnp.zeros((1 << (26 if self.first.platform != "cpu" else 18),), jnp.int32)
        return array.nbytes / _seconds(lambda: jax.device_put(array, self.device))

    def _compile(self, graphdef: nnx.GraphDef) -> None:
        started, config = time.perf_counter(), self.config
        few = functools.partial(plain_cold_step.hot_only, count=self.request.hot)
        plain, _ = abstract_model(config, REAL_NUMERICS, few)
        stream = real_step.empty_stream(config, self.shapes)
        self.control = real_step.control_of(config, self.request.draft_length, ROWS)
        routes = jnp.zeros(
            (self.request.needed_steps, config.num_hidden_layers, ROWS, config.num_experts_per_tok), jnp.int32
        )
        arguments = stream, self.control, routes, jnp.int32(0)

        def step_of(graph: nnx.GraphDef) -> Callable:
            def step(params, stream, control, routes, position):
                model = nnx.merge(graph, params)
                plain_cold_step.choose(model, routes[position])
                stream, result = speculative_step(model, stream, control, ROWS)
                return stream, result, (position + 1) % routes.shape[0]

            return step

        cut, _ = self.side.runner().pin(
            "bench", step_of(graphdef), (self.params, *arguments), None, (1,), (), None
        )
        whole = jax.jit(step_of(plain), donate_argnums=1).lower(self.resident, *arguments)
        self.programs = {
            "tiered": (cut, self.params),
            "resident": (whole.compile(compiler_options=compiler_options.here(whole)), self.resident),
        }
        self.kinds = next(
            tuple((var.aval.shape, var.aval.dtype) for var in piece.exchange.sent)
            for piece in cut.cut.pieces
            if piece.exchange is not None and piece.exchange.sent is not None
        )
        self.stream = real_step.noisy(stream)
        self.say(f"plain modules: {len(cut.cut.pieces)} pieces, and the step without cold experts, compiled in "
                 f"{time.perf_counter() - started:.0f} s")  # fmt: skip

    def exchanges(self, live: int) -> dict[str, float]:
        """Microseconds of transfers and of whole exchanges of one layer, each waited for by itself."""
        (x, choices, weights) = (jnp.ones(*kind) for kind in self.kinds)
        answer = self.side.compute(0, jax.device_put((x, choices, weights), self.device))
        found = {
            "there": _seconds(lambda: jax.device_put((x, choices, weights), self.device)),
            "back": _seconds(lambda: jax.device_put(answer, self.first)),
        }
        for count in cold_alone.CHOSEN:
            sent = x, jnp.asarray(self._few_cold(count, choices.shape, live)), weights
            found[f"exchange, {count} experts"] = _seconds(
                lambda sent=sent: self.side.second.receive(self.side.second.send(0, sent))
            )
        return {name: round(1e6 * taken, 1) for name, taken in found.items()}

    def _few_cold(self, count: int, shape: tuple[int, int], live: int) -> np.ndarray:
        """Places of `count` different cold experts, or of all if there are fewer."""
        return cold_alone.places(count, 0, shape, live, self.config.n_routed_experts - self.request.hot)

    def checks(self, live: int) -> dict[str, bool]:
        """Whether the second device's answers are the contributions that the first one computes of the same experts.

        As far as rounded sums in another order agree. Of whole steps in bfloat16 random weights leave nothing to
        compare: each layer rounds the last bits of the one before anew. In float32 tests compare them to the bit.
        """
        layers = range(self.config.num_hidden_layers)
        return {
            "cold experts on both devices alike": all(self._alike_on_both(layer, live) for layer in layers)
        }

    def _alike_on_both(self, layer: int, live: int) -> bool:
        x, choices, weights = (jnp.ones(*kind) for kind in self.kinds)
        x = jax.random.normal(jax.random.key(layer), x.shape, jnp.float32).astype(x.dtype)
        sent = x, jnp.asarray(self._few_cold(max(cold_alone.CHOSEN), choices.shape, live)), weights
        graph, state = nnx.split(self.side.experts(layer))

        @jax.jit
        def on_first(state, *sent):
            return own_contributions(nnx.merge(graph, state), *sent, every=False)

        near = np.asarray(on_first(jax.device_put(state, self.first), *sent))
        far = np.asarray(self.side.second.receive(self.side.second.send(layer, sent)))
        return bool(near.any() and np.square(near - far).mean() <= _ALIKE**2 * np.square(near).mean())

    def timed(self, program: str, routes: ColdRoutes) -> dict[str, Any]:
        """The figures of one cell."""
        position, ids = jnp.int32(0), self._routes(program, routes)
        asked = [
            sum(len(np.unique(rows[cold[rows]])) for rows, cold in zip(step, routes.cold, strict=True))
            for step in routes.ids
        ]
        self.stream = real_step.at_context(self.stream, self.request.context, self.config)
        done = 0

        def loop(steps: int):
            nonlocal position, done
            for _ in range(steps):
                result, position = self._step(program, ids, position)
            done += steps
            return result

        def counted() -> np.ndarray:
            return np.array([np.resize(asked, done).sum(), 0, 0])

        return cold_cells.timed_cell(self.request, self.config, self.sizes, routes.distinct, loop, counted)

    def _step(self, program: str, routes: jax.Array, position: jax.Array):
        run, params = self.programs[program]
        self.stream, result, position = run(params, self.stream, self.control, routes, position)
        return result, position

    def _routes(self, program: str, routes: ColdRoutes) -> jax.Array:
        """Ids for as many steps as a program takes; slots of hot experts for the one that knows no others."""
        ids = routes.slots(self.places) if program == "resident" else routes.ids
        return plain_cold_step.planned(ids, self.request.needed_steps)

    def close(self) -> None:
        """Ends the second device's threads."""
        self.side.second.close()


def _seconds(make: Callable[[], Any]) -> float:
    return real_step.median_seconds(make, _CALLS)
