"""Experts on a second device that shares no mesh with the first: how weights get there, and how functions are cut.

Knows: which device stands beside the first one, what it keeps and computes, and how the pieces of a function are
compiled. Does not know: where a function is cut (`model/paired_experts.py`), or how values travel (`placement/`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import flax.nnx as nnx
import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from v4flash.checkpoint.loading import LoadedModel, load, whole
from v4flash.checkpoint.names import ModulePath, is_stacked
from v4flash.config import ModelConfig
from v4flash.engine import programs
from v4flash.engine.host_way import replaced, rewrite_table, taken
from v4flash.engine.peer_way import with_tables
from v4flash.errors import CapacityError, first_line
from v4flash.model.experts import Experts
from v4flash.model.experts_in_turn import PROCESSOR_ROWS, contributions_in_turn
from v4flash.model.host_experts import HELD_STACK, TABLE, stack_path
from v4flash.model.numerics import Numerics
from v4flash.model.paired_experts import SidecarExperts
from v4flash.placement.cutting import Cut, cut
from v4flash.placement.second_device import SecondDevice
from v4flash.placement.staged import Staged
from v4flash.placement.table import COLD, HOT, Placement

if TYPE_CHECKING:
    from v4flash.engine.ways import Opening


def device_beside(first: jax.Device) -> jax.Device:
    """Another device of the same kind, or else the processor. Raises CapacityError where there is neither."""
    same = [device for device in jax.devices() if device != first]
    if same:
        return same[0]
    try:
        processors = jax.devices("cpu") if first.platform != "cpu" else []
    except RuntimeError:
        processors = []
    if not processors:
        raise CapacityError(
            f"--experts sidecar needs a device beside {first}, found none; use --experts host"
        )
    return processors[0]


def open_sidecar(opening: "Opening") -> tuple[LoadedModel, programs.Programs]:
    """The checkpoint with its cold experts on a second device, and its programs, cut where that one computes."""
    first = jax.devices()[0]
    side = Sidecar(opening.config, opening.numerics, opening.placement, first, device_beside(first))
    opening.say(f"loading {opening.path}")
    loaded = load(opening.path, opening.numerics, drafter=opening.drafter, put=side.put)
    routed = functools.partial(SidecarExperts, slots=opening.placement.hot)
    graphdef, params = with_tables(
        loaded.params, opening.config, opening.numerics, routed, opening.placement, side.put
    )
    opening.say("compiling")
    pinned = programs.build(
        graphdef,
        params,
        opening.config,
        opening.numerics,
        opening.shapes,
        opening.cache,
        runner=side.runner(),
        exchange=side.exchange,
    )
    return dataclasses.replace(loaded, graphdef=graphdef, params=params), pinned


class Sidecar:
    """The second device with the cold experts of every layer.

    Attributes:
      second: what asks it.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        placement: Placement,
        first: jax.Device,
        device: jax.Device,
    ):
        self._placement, self._first, self._device = placement, first, device
        self._count = placement.experts
        self._facts = (repr(config), repr(numerics), str(device))
        cold = placement.experts - placement.hot
        self._graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, numerics, cold)))
        self._variables = nnx.to_flat_state(state)
        self._stacks: list[dict[ModulePath, jax.Array]] = [{} for _ in range(placement.layers)]
        self._programs: dict[tuple, Callable] = {}
        self.second = SecondDevice(device, first, self.compute)

    def put(self, path: ModulePath, value: np.ndarray | jax.Array) -> dict[ModulePath, jax.Array]:
        """A parameter where it belongs; the cold experts stay here and are none of the model's parameters.

        Raises CapacityError where the second device has no room for them.
        """
        if path[0] != "backbone" or not is_stacked(path) or TABLE in path:
            return whole(path, value)
        layer = path[2]
        hot, cold = (value[self._placement.held(layer, tier)] for tier in (HOT, COLD))
        try:
            inside = jax.block_until_ready(jax.device_put(cold, self._device))
        except (ValueError, RuntimeError) as error:
            said = first_line(error)
            raise CapacityError(
                f"{self._device} refused {cold.nbytes / 1e9:.2f} GB of layer {layer}'s cold experts ({said}); raise "
                "--hot-experts"
            ) from error
        self._stacks[layer][path[path.index("experts") + 1 :]] = inside
        return {stack_path(path, HELD_STACK): jax.device_put(hot, self._first)}

    def runner(self) -> programs.Runner:
        """What cuts a function (params, *arguments) and compiles its pieces."""

        def pin(name, function, arguments, outputs, donated, facts, cache):
            found = cut(function, arguments, donated)
            pieces = [
                programs.executable(
                    f"{name}-{number}", piece.function, piece.abstract, [0] * len(piece.outputs), piece.donated,
                    facts, cache,
                )
                if piece.outputs else (None, True)
                for number, piece in enumerate(found.pieces)
            ]  # fmt: skip
            known = self._prepare(found, cache) and all(cached for _, cached in pieces)
            return Staged(found, tuple(program for program, _ in pieces), self.second), known

        def jit(function):
            made: list[Staged] = []

            def run(*arguments):
                if not made:
                    made.append(pin("", function, arguments, None, (), (), None)[0])
                return made[0](*arguments)

            return run

        return programs.Runner(pin, jit, read=self.second.waiting.read)

    def exchange(
        self, params: nnx.State, placement: Placement, layer: int, pairs: list[tuple[int, int]]
    ) -> Placement:
        """Lets experts of a layer change places, pair by pair (hot, cold); returns the new placement.

        Between two steps nothing is waiting to be sent, so that whoever is asked next finds the new stacks.
        """
        experts = params["backbone"]["layers"][layer]["ffn"]["experts"]
        hot, cold = dict(nnx.to_flat_state(experts[HELD_STACK])), self._stacks[layer]
        for leaving, coming in pairs:
            inner, outer = (np.int32(placement.slot[layer, expert]) for expert in (leaving, coming))
            for path, variable in hot.items():
                gone, came = taken(variable.get_value(), inner), taken(cold[path], outer)
                hot[path] = variable.replace(
                    replaced(variable.get_value(), jax.device_put(came, self._first), inner)
                )
                cold[path] = replaced(cold[path], jax.device_put(gone, self._device), outer)
            placement = placement.swapped(layer, leaving, coming)
        experts[HELD_STACK] = nnx.from_flat_state(list(hot.items()))
        rewrite_table(experts, placement, layer)
        return placement

    def _prepare(self, found: Cut, cache) -> bool:
        """Compiles what the second device computes between these pieces; True if all of it was cached."""
        known = True
        for piece in found.pieces:
            if piece.exchange is None or piece.exchange.sent is None:
                continue
            kinds = tuple((var.aval.shape, var.aval.dtype) for var in piece.exchange.sent)
            if kinds not in self._programs:
                self._programs[kinds], cached = self._program(kinds, cache)
                known = known and cached
        return known

    def _program(self, kinds: tuple, cache) -> tuple[Callable, bool]:
        rows = PROCESSOR_ROWS if self._device.platform == "cpu" else None

        def cold(stacks, x, places, weights):
            held = self._held(stacks)
            every = self._count <= places.size
            return contributions_in_turn(held, x, places, weights, every=every, rows=rows)

        here = SingleDeviceSharding(self._device)
        stacks = [variable.get_value() for _, variable in self._variables]
        arguments = stacks, *[jax.ShapeDtypeStruct(*kind) for kind in kinds]
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
        return self.second.waiting.compiled(
            programs.executable, "cold", cold, arguments, 0, (), self._facts, cache
        )

    def compute(self, layer: int, values: tuple[jax.Array, ...]) -> jax.Array:
        """Contributions of a layer's cold experts, for rows, places and weights on the second device."""
        program = self._programs[tuple((value.shape, value.dtype) for value in values)]
        return program(self._in_order(layer), *values)

    def experts(self, layer: int) -> Experts:
        """The cold experts of a layer, on the second device."""
        return self._held(self._in_order(layer))

    def _in_order(self, layer: int) -> list[jax.Array]:
        return [self._stacks[layer][path] for path, _ in self._variables]

    def _held(self, stacks: list[jax.Array]) -> Experts:
        named = zip(self._variables, stacks, strict=True)
        flat = [(path, variable.replace(stack)) for (path, variable), stack in named]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))
