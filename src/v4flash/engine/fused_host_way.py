"""Experts in the host's memory for hand-fused launches, which fetch guessed ones early, and read a missed one there.

Knows: how a checkpoint cut into hot and cold experts is packed, and how two packed experts change places. Does not
know: what a pass does with them (`pallas_kernels.experts.tiers`), or how they are cut (host_way).
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts import tiers
from pallas_kernels.experts.packing import PackedExperts, pack_routed
from pallas_kernels.experts.tiers import TieredExperts
from v4flash.checkpoint.inventory import abstract_model
from v4flash.checkpoint.loading import LoadedModel, load
from v4flash.engine import backends, host_way, programs
from v4flash.engine.backends import ChangingWeights
from v4flash.model.fused import two_memories
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.packing import PackedModel
from v4flash.model.host_experts import COLD_STACK, published_path
from v4flash.placement.cache import SPARE
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import Placement

if TYPE_CHECKING:
    from v4flash.engine.ways import Opening


def open_host(
    opening: "Opening", bodies: type[ReferenceBodies] = FusedBodies
) -> tuple[LoadedModel, programs.Programs]:
    """The checkpoint packed, with its cold experts in the host's memory, and its programs on `bodies`.

    `params` is ChangingWeights of a PackedModel and of what is kept of cold experts; `graphdef` is None. The programs
    are made first, from shapes alone. Raises NoFusedBody where bodies or packing do not take the checkpoint.
    """
    config, placement = opening.config, opening.placement
    numerics = dataclasses.replace(opening.numerics, packed=True)
    memory = host_memory()
    opening.say("compiling")
    shapes = two_memories.shapes(backends.packed_shapes(config, numerics), placement.hot, memory)
    spare = min(SPARE, placement.experts - placement.hot)
    empty = jax.eval_shape(lambda: two_memories.nothing_fetched(shapes, spare, config.num_experts_per_tok))
    # What is fetched on a guess is to come while other launches run.
    pin = functools.partial(programs.executable, beside_each_other=True)
    pinned = programs.build(
        None,
        ChangingWeights(shapes, empty),
        config,
        numerics,
        opening.shapes,
        opening.cache,
        bodies=bodies,
        runner=programs.Runner(pin),
    )
    opening.say(f"loading {opening.path}")
    put = functools.partial(host_way.put, placement, memory)
    loaded = load(opening.path, numerics, drafter=opening.drafter, put=put)
    parts = separated(loaded.params)
    loaded = dataclasses.replace(loaded, graphdef=None, params=None)
    opening.say("packing")
    weights = ChangingWeights(packed(config, numerics, parts, placement, memory), None)
    weights.changed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
    return dataclasses.replace(loaded, params=weights), dataclasses.replace(pinned, exchange=exchange)


@dataclasses.dataclass
class Parts:
    """Cut parameters: (path without tiers, variable) of what is on the device, and cold experts by layer and name."""

    hot: list[tuple[tuple, Any]]
    cold: dict[int, dict[tuple, jax.Array]]


def separated(params: nnx.State) -> Parts:
    """The parameters that loading cut into hot and cold ones."""
    parts = Parts([], {})
    for path, variable in nnx.to_flat_state(params):
        if COLD_STACK in path:
            parts.cold.setdefault(path[2], {})[path[-2:]] = variable.get_value()
        else:
            parts.hot.append((published_path(path), variable))
    return parts


def packed(
    config, numerics, parts: Parts, placement: Placement, memory: jax.sharding.Sharding
) -> PackedModel:
    """Cut parameters packed. Cold experts pass through the device layer by layer.

    The parts are emptied on the way, and nothing else must hold them: no more than one layer of either exists twice.
    Raises NoFusedBody for scales that packed tiles cannot hold.
    """
    graphdef, _ = abstract_model(config, numerics)
    whole = nnx.merge(graphdef, nnx.from_flat_state(parts.hot))
    parts.hot.clear()
    model = backends.packed_weights(whole)
    layers = []
    for number, layer in enumerate(model.layers):
        found, device = parts.cold.pop(number), jax.sharding.SingleDeviceSharding(backends.current_device())
        moved = {name: jax.device_put(array, device) for name, array in found.items()}
        names = ((part, kind) for part in ("w1", "w3", "w2") for kind in ("weight", "scale"))
        try:
            outside = pack_routed(*(moved[name] for name in names), f"layer {number} expert")
        except ValueError as error:
            raise backends.no_fused_body(error) from error
        experts = TieredExperts(layer.experts, two_memories.moved_to_host(outside, memory))
        layers.append(dataclasses.replace(layer, experts=experts))
    return dataclasses.replace(model, layers=tuple(layers), placement=table(placement))


def table(placement: Placement) -> jax.Array:
    """The placement as int32 [L, E, 2]."""
    return jnp.asarray(np.stack([placement.tier, placement.slot], axis=-1), jnp.int32)


def exchange(
    params: ChangingWeights, placement: Placement, layer: int, pairs: list[tuple[int, int]]
) -> Placement:
    """Lets hot and cold experts of a layer change places, as `host_way.exchange` does.

    What is kept stays: a slot holds an expert by its number, wherever its home is.
    """
    model: Any = params.kept
    experts = model.layers[layer].experts
    hot, outside = experts.hot, np.array(experts.cold)
    for leaving, coming in pairs:
        inner, outer = np.int32(placement.slot[layer, leaving]), int(placement.slot[layer, coming])
        gone = np.array(_record(hot, inner))
        hot, outside[outer] = _replaced(hot, outside[outer], inner), gone
        placement = placement.swapped(layer, leaving, coming)
    layers = list(model.layers)
    experts = TieredExperts(hot, jax.device_put(outside, experts.cold.sharding))
    layers[layer] = dataclasses.replace(layers[layer], experts=experts)
    params.kept = dataclasses.replace(model, layers=tuple(layers), placement=table(placement))
    return placement


@jax.jit
def _record(experts: PackedExperts, slot: jax.Array) -> jax.Array:
    one = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1), experts)
    return tiers.to_records(one)[0]


@functools.partial(jax.jit, donate_argnums=0)
def _replaced(experts: PackedExperts, record: jax.Array, slot: jax.Array) -> PackedExperts:
    one = tiers.from_records(record[None], experts)
    return jax.tree.map(
        lambda array, own: jax.lax.dynamic_update_slice_in_dim(array, own, slot, 0), experts, one
    )
