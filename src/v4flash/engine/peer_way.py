"""Experts on two devices of one mesh: how their weights get there, and how functions of them become one program.

Knows: the mesh, which arrays each device has of its own, and how two experts change places. Does not know: what a step
does with them (`model/paired_experts.py`).

Every array but the routed experts of the backbone is whole on both devices. The experts of a layer are one stack of
[2 S, ...] cut in the middle: the first S places lie on the device of tier 0, the others on that of tier 1. Both parts
have to be of one size, that of the larger tier; places beyond a tier's own experts repeat some of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.nnx as nnx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from v4flash.checkpoint.inventory import abstract_model
from v4flash.checkpoint.loading import LoadedModel, Put, load
from v4flash.checkpoint.names import ModulePath, is_stacked
from v4flash.config import ModelConfig
from v4flash.engine import backends, programs
from v4flash.engine.host_way import rewrite_table
from v4flash.errors import CapacityError, first_line
from v4flash.model.experts import RoutedExperts
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.packing import PackedModel
from v4flash.model.host_experts import HELD_STACK, TABLE, stack_path
from v4flash.model.numerics import Numerics
from v4flash.model.paired_experts import ROLE, PeerExperts
from v4flash.placement.second_device import Waiting
from v4flash.placement.table import COLD, HOT, Placement

if TYPE_CHECKING:
    from v4flash.engine.ways import Opening

WHOLE, DIVIDED = PartitionSpec(), PartitionSpec(ROLE)


def mesh_of(devices: list[jax.Device]) -> Mesh:
    """The first two of the devices as a mesh. Raises CapacityError where there are not two of one kind."""
    if len(devices) < 2 or devices[0].platform != devices[1].platform:
        raise CapacityError(
            f"--experts peer needs two devices in one mesh, found {', '.join(map(str, devices))}; use --experts host "
            "or sidecar"
        )
    return Mesh(np.array(devices[:2]), (ROLE,))


def slots_of(placement: Placement) -> int:
    """S: places for experts of a layer on each device."""
    return max(placement.hot, placement.experts - placement.hot)


def open_peer(opening: "Opening") -> tuple[LoadedModel, programs.Programs]:
    """The checkpoint with its experts on two devices, and its programs, each one executable for both."""
    mesh = mesh_of(jax.devices())
    loaded = _loaded(opening, mesh, opening.numerics)
    opening.say("compiling")
    return loaded, _programs(opening, mesh, loaded.graphdef, loaded.params, opening.numerics)


def open_peer_packed(
    opening: "Opening", bodies: type[ReferenceBodies] = FusedBodies
) -> tuple[LoadedModel, programs.Programs]:
    """The same with packed weights, and programs on `bodies`; made first, as they may refuse the checkpoint."""
    mesh, numerics = mesh_of(jax.devices()), dataclasses.replace(opening.numerics, packed=True)
    opening.say("compiling")
    routed = functools.partial(PeerExperts, slots=slots_of(opening.placement))
    abstract = of_both(backends.packed_shapes(opening.config, numerics, routed))
    pinned = _programs(opening, mesh, None, abstract, numerics, bodies=bodies)
    loaded = _loaded(opening, mesh, numerics)
    model = loaded.model
    loaded = dataclasses.replace(loaded, graphdef=None, params=None)
    opening.say("packing")
    packed = backends.packed_weights(model)
    return dataclasses.replace(loaded, params=jax.device_put(packed, _shardings(mesh, packed))), pinned


def _loaded(opening: "Opening", mesh: Mesh, numerics: Numerics) -> LoadedModel:
    opening.say(f"loading {opening.path}")
    bring = functools.partial(put, opening.placement, mesh)
    loaded = load(opening.path, numerics, drafter=opening.drafter, put=bring)
    routed = functools.partial(PeerExperts, slots=slots_of(opening.placement))
    graphdef, params = with_tables(loaded.params, opening.config, numerics, routed, opening.placement, bring)
    return dataclasses.replace(loaded, graphdef=graphdef, params=params)


def _programs(opening: "Opening", mesh: Mesh, graphdef, params, numerics, **options) -> programs.Programs:
    return programs.build(
        graphdef,
        params,
        opening.config,
        numerics,
        opening.shapes,
        opening.cache,
        runner=runner(mesh),
        exchange=functools.partial(exchange, mesh),
        **options,
    )


def put(
    placement: Placement, mesh: Mesh, path: ModulePath, value: np.ndarray | jax.Array
) -> dict[ModulePath, jax.Array]:
    """A parameter where it belongs: routed experts of the backbone divided, all else whole on both devices.

    Raises CapacityError where a device has no room for its part.
    """
    try:
        if path[0] != "backbone" or not is_stacked(path) or TABLE in path:
            return {path: jax.block_until_ready(jax.device_put(value, NamedSharding(mesh, WHOLE)))}
        return {
            stack_path(path, HELD_STACK): jax.block_until_ready(_divided(placement, mesh, path[2], value))
        }
    except (ValueError, RuntimeError) as error:
        said = first_line(error)
        raise CapacityError(
            f"a device refused {'.'.join(map(str, path))} ({said}); see which experts fit with `v4flash plan`"
        ) from error


def _divided(placement: Placement, mesh: Mesh, layer: int, value: np.ndarray | jax.Array) -> jax.Array:
    slots = slots_of(placement)
    order = np.concatenate([np.resize(placement.held(layer, tier), slots) for tier in (HOT, COLD)])

    def part(index: tuple[slice, ...]) -> np.ndarray | jax.Array:
        return value[order[index[0]]]

    return jax.make_array_from_callback(
        (2 * slots, *value.shape[1:]), NamedSharding(mesh, DIVIDED), part, dtype=value.dtype
    )


def with_tables(
    params: nnx.State,
    config: ModelConfig,
    numerics: Numerics,
    routed: RoutedExperts,
    placement: Placement,
    bring: Put,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The graph of a model with such experts, and its parameters completed by the tables of places."""
    graphdef, variables = abstract_model(config, numerics, routed)
    loaded = dict(nnx.to_flat_state(params))
    flat = []
    for path, variable in variables:
        if path in loaded:
            flat.append((path, loaded[path]))
        else:
            row = getattr(placement, path[-1])[path[2]]
            flat += [(own, variable.replace(array)) for own, array in bring(path, row).items()]
    return graphdef, nnx.from_flat_state(flat)


def specs_of(params: Any) -> Any:
    """How weights, plain or packed, lie on the mesh: a PartitionSpec for each array."""

    def spec(path: tuple, _: Any) -> PartitionSpec:
        return (
            DIVIDED
            if any(getattr(key, "key", getattr(key, "name", None)) == HELD_STACK for key in path)
            else WHOLE
        )

    return jax.tree_util.tree_map_with_path(spec, params)


def of_both(params: Any) -> Any:
    """Shapes of one device's weights as those that both devices have together."""

    def whole(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        first, *rest = leaf.shape or (None,)
        return jax.ShapeDtypeStruct((2 * first, *rest), leaf.dtype) if spec == DIVIDED else leaf

    return jax.tree.map(whole, params, specs_of(params))


def _shardings(mesh: Mesh, params: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(params))


def mapped(function: Callable, mesh: Mesh, places: tuple) -> Callable:
    """A function of one device's (params, *arguments) as one of what both have; its results are whole on both.

    Args: places, a pytree of PartitionSpecs, or one, for each argument.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=places, out_specs=WHOLE, check_vma=False)


def runner(mesh: Mesh) -> programs.Runner:
    """What makes one program for both devices of a function (params, *arguments).

    Arguments and results are whole on both; of the params each device sees its own part of what is divided.
    """
    everywhere = NamedSharding(mesh, WHOLE)
    waiting = Waiting(f"one of the devices {', '.join(map(str, mesh.devices.flat))}")

    def spread(function: Callable, params: Any, others: int) -> Callable:
        return mapped(function, mesh, (specs_of(params), *[WHOLE] * others))

    def pin(name, function, arguments, outputs, donated, facts, cache):
        params, *others = arguments
        places = _shardings(mesh, params), *jax.tree.map(lambda _: everywhere, others)
        abstract = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (params, *others), places
        )
        both = spread(function, params, len(others))
        facts = *facts, ROLE
        return waiting.compiled(programs.executable, name, both, abstract, outputs, donated, facts, cache)

    def jit(function):
        made: list[Callable] = []

        def run(params, *arguments):
            if not made:
                made.append(jax.jit(spread(function, params, len(arguments))))
            return made[0](params, *arguments)

        return run

    return programs.Runner(pin, jit, lambda tree: jax.device_put(tree, everywhere), waiting.read)


def exchange(
    mesh: Mesh,
    params: nnx.State | PackedModel,
    placement: Placement,
    layer: int,
    pairs: list[tuple[int, int]],
) -> Placement:
    """Lets experts of a layer change places, pair by pair (hot, cold); returns the new placement.

    Each device sends the other one expert and writes the one it gets into the same slot: arrays keep their shapes, and
    programs go on as they are.
    """
    packed = isinstance(params, PackedModel)
    experts = (
        params.layers[layer].experts if packed else params["backbone"]["layers"][layer]["ffn"]["experts"]
    )
    held = experts.held if packed else experts[HELD_STACK]
    for leaving, coming in pairs:
        slots = np.array([placement.slot[layer, leaving], placement.slot[layer, coming]], np.int32)
        held = _swap(mesh)(held, slots)
        placement = placement.swapped(layer, leaving, coming)
    everywhere = NamedSharding(mesh, WHOLE)
    if packed:
        places = np.stack([placement.tier[layer], placement.slot[layer]])
        experts.held, experts.places = held, jax.device_put(places, everywhere)
    else:
        experts[HELD_STACK] = held
        rewrite_table(experts, placement, layer, lambda row: jax.device_put(row, everywhere))
    return placement


@functools.cache
def _swap(mesh: Mesh) -> Callable:
    """(stacks, slots int32 [2] by tier) -> stacks with the experts in these slots exchanged."""

    def swap(stacks: Any, slots: jax.Array) -> Any:
        own = slots[jax.lax.axis_index(ROLE)]

        def one(stack: jax.Array) -> jax.Array:
            leaving = jax.lax.dynamic_index_in_dim(stack, own, keepdims=False)
            coming = jax.lax.ppermute(leaving, ROLE, [(0, 1), (1, 0)])
            return jax.lax.dynamic_update_index_in_dim(stack, coming, own, 0)

        return jax.tree.map(one, stacks)

    spread = jax.shard_map(swap, mesh=mesh, in_specs=(DIVIDED, WHOLE), out_specs=DIVIDED, check_vma=False)
    return jax.jit(spread, donate_argnums=0)
