"""Experts in the host's memory: how their weights get there, and how two of them change places.

Knows: the stacks that `model/host_experts.py` reads. Does not know: what a step does with them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.inventory import abstract_model
from v4flash.checkpoint.loading import LoadedModel, load, whole
from v4flash.checkpoint.names import ModulePath, is_stacked
from v4flash.engine import programs
from v4flash.engine.backends import ChangingWeights
from v4flash.errors import CapacityError, first_line
from v4flash.model.host_experts import CACHE, COLD_STACK, HOT_STACK, TABLE, HostExperts, stack_path
from v4flash.placement.cache import SPARE, Held
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import COLD, HOT, Placement

if TYPE_CHECKING:
    from v4flash.engine.ways import Opening


def open_host(opening: "Opening") -> tuple[LoadedModel, programs.Programs]:
    """The checkpoint with its cold experts in the host's memory, and its programs.

    `params` is ChangingWeights: the slots that cold experts are fetched into are what changes.
    """
    config, placement = opening.config, opening.placement
    memory = host_memory()
    spare = min(SPARE, placement.experts - placement.hot)
    routed = functools.partial(HostExperts, hot=placement.hot, spare=spare)
    opening.say(f"loading {opening.path}")
    loaded = load(
        opening.path, opening.numerics, drafter=opening.drafter, put=functools.partial(put, placement, memory)
    )
    graphdef, params = tiered(loaded.params, config, opening.numerics, routed, placement)
    loaded = dataclasses.replace(loaded, graphdef=graphdef, params=params)
    opening.say("compiling")
    pinned = programs.build(
        graphdef, params, config, opening.numerics, opening.shapes, opening.cache, exchange=exchange
    )
    return loaded, pinned


def put(
    placement: Placement, memory: jax.sharding.Sharding, path: ModulePath, value: np.ndarray | jax.Array
) -> dict[ModulePath, jax.Array]:
    """A parameter where it belongs: routed experts of the backbone cut into hot and cold ones, all else whole.

    Raises CapacityError where the host's memory does not take the cold ones.
    """
    if path[0] != "backbone" or not is_stacked(path):
        return whole(path, value)
    layer = path[2]
    hot, cold = (value[placement.held(layer, tier)] for tier in (HOT, COLD))
    try:
        outside = jax.block_until_ready(jax.device_put(cold, memory))
    except (ValueError, RuntimeError) as error:
        said = first_line(error)
        raise CapacityError(
            f"{memory.memory_kind} memory refused {cold.nbytes / 1e9:.2f} GB of layer {layer}'s cold experts ({said}); "
            "raise --hot-experts, or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, how much JAX pins (64 unless set)"
        ) from error
    return {stack_path(path, HOT_STACK): jax.device_put(hot), stack_path(path, COLD_STACK): outside}


def tiered(
    params: nnx.State, config, numerics, routed: functools.partial, placement: Placement
) -> tuple[nnx.GraphDef, ChangingWeights]:
    """The model's graph, and cut parameters completed by tables and empty caches."""
    graphdef, variables = abstract_model(config, numerics, routed)
    loaded = dict(nnx.to_flat_state(params))
    kept, changed = [], []
    for path, variable in variables:
        if path in loaded:
            kept.append((path, loaded[path]))
            continue
        shape, (group, name) = variable.get_value(), path[-2:]
        if TABLE in path:
            kept.append((path, variable.replace(jnp.asarray(getattr(placement, name)[path[2]]))))
            continue
        value = jnp.zeros(shape.shape, shape.dtype)
        if group == CACHE and name in Held._fields:
            value = getattr(Held.empty(shape.shape[0]), name)
        changed.append((path, variable.replace(value)))
    return graphdef, ChangingWeights(nnx.from_flat_state(kept), nnx.from_flat_state(changed))


def exchange(
    params: ChangingWeights, placement: Placement, layer: int, pairs: list[tuple[int, int]]
) -> Placement:
    """Lets hot and cold experts of a layer change places, pair by pair (hot, cold); returns the new placement.

    The weights keep their shapes, so that programs go on as they are. The cold stack is written anew by the host, for
    it is the host's own memory; that takes a copy of one layer's cold experts, and is no part of a step.
    """
    experts = params.kept["backbone"]["layers"][layer]["ffn"]["experts"]
    stacks = {name: jax.tree.flatten(experts[name]) for name in (HOT_STACK, COLD_STACK)}
    places = []
    for leaving, coming in pairs:
        places.append((np.int32(placement.slot[layer, leaving]), int(placement.slot[layer, coming])))
        placement = placement.swapped(layer, leaving, coming)
    hot, cold = list(stacks[HOT_STACK][0]), list(stacks[COLD_STACK][0])
    for number, (stack, outside) in enumerate(zip(hot, cold, strict=True)):
        written = np.array(outside)
        for inner, outer in places:
            gone = np.array(taken(stack, inner))
            stack, written[outer] = replaced(stack, written[outer], inner), gone
        hot[number], cold[number] = stack, jax.device_put(written, outside.sharding)
    for name, leaves in ((HOT_STACK, hot), (COLD_STACK, cold)):
        experts[name] = jax.tree.unflatten(stacks[name][1], leaves)
    rewrite_table(experts, placement, layer)
    return placement


def rewrite_table(
    experts: nnx.State, placement: Placement, layer: int, put: Callable[[np.ndarray], jax.Array] = jnp.asarray
) -> None:
    """Brings the table among a layer's routed experts up to date."""
    for name in ("tier", "slot"):
        variable = experts[TABLE][name]
        experts[TABLE][name] = variable.replace(put(getattr(placement, name)[layer]))


@jax.jit
def taken(stack: jax.Array, place: jax.Array) -> jax.Array:
    """One expert of a stack."""
    return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)


@functools.partial(jax.jit, donate_argnums=0)
def replaced(stack: jax.Array, expert: jax.Array, place: jax.Array) -> jax.Array:
    """A stack with another expert in one place; its memory is taken over."""
    return jax.lax.dynamic_update_index_in_dim(stack, expert, place, 0)
