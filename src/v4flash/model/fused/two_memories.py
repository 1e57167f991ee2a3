"""A packed model whose cold experts lie in pinned host memory.

Knows: how a layer's experts are divided by a table of places. Does not know: which experts should be hot, or what a
pass does with cold ones (`pallas_kernels.experts.tiers`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.experts import early, tiers
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.tiers import COLD, HOT, Kept, TieredExperts
from v4flash.errors import CapacityError, UsageError, first_line
from v4flash.model.fused.packing import PackedLayer, PackedModel
from v4flash.placement.host_memory import host_memory

_records = jax.jit(tiers.to_records)


def moved_to_host(experts: PackedExperts, memory: jax.sharding.Sharding | None = None) -> jax.Array:
    """Packed experts [n, ...] as records int32 [n, P] in the host's memory, or in `memory`.

    Raises CapacityError where that is refused.
    """
    records = _records(experts)
    try:
        return jax.block_until_ready(jax.device_put(records, memory or host_memory()))
    except (RuntimeError, ValueError) as error:
        said = first_line(error)
        raise CapacityError(
            f"{records.nbytes / 1e9:.1f} GB of pinned host memory were refused ({said}); keep more experts on the "
            "device, or raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, how much JAX pins (64 unless set)"
        ) from error


def divided(experts: PackedExperts, places: np.ndarray) -> TieredExperts:
    """One layer's experts in two memories, by int32 [E, 2] of (tier, slot) places; every slot of a tier is somebody's.

    Raises UsageError for a table that does not fill both tiers.
    """
    members = []
    for tier in (HOT, COLD):
        owners = np.flatnonzero(places[:, 0] == tier)
        slots = places[owners, 1]
        if not len(owners) or sorted(slots.tolist()) != list(range(len(owners))):
            raise UsageError(
                f"tier {tier} of a layer has slots {sorted(slots.tolist())}, expected 0, 1, ... of some experts"
            )
        members.append(jnp.asarray(owners[np.argsort(slots)]))
    hot, cold = (jax.tree.map(lambda array, chosen=chosen: array[chosen], experts) for chosen in members)
    return TieredExperts(hot, moved_to_host(cold))


def in_two_memories(packed: PackedModel, table: np.ndarray) -> PackedModel:
    """The model with the backbone's experts divided by a table int32 [L, E, 2]; one layer at a time exists twice."""
    layers = tuple(
        dataclasses.replace(pack, experts=divided(pack.experts, places))
        for pack, places in zip(packed.layers, table, strict=True)
    )
    return dataclasses.replace(packed, layers=layers, placement=jnp.asarray(table, jnp.int32))


def shapes(params: PackedModel, hot: int, memory: jax.sharding.Sharding | None = None) -> PackedModel:
    """A packed model's shapes with `hot` routed experts of each backbone layer on the device, the rest beside it."""
    memory = memory or host_memory()

    def layer(pack: PackedLayer) -> PackedLayer:
        experts = pack.experts
        of_hot = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((hot, *leaf.shape[1:]), leaf.dtype), experts)
        shape = (stacked(experts) - hot, tiers.record_words(experts))
        cold = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=memory)
        return dataclasses.replace(pack, experts=TieredExperts(of_hot, cold))

    table = jax.ShapeDtypeStruct((len(params.layers), stacked(params.layers[0].experts), 2), jnp.int32)
    return dataclasses.replace(params, layers=tuple(map(layer, params.layers)), placement=table)


def stacked(experts: PackedExperts) -> int:
    """How many experts a stack holds."""
    return experts.down.words.shape[0]


def nothing_kept(packed: PackedModel, slots: int) -> Kept:
    """The state of `slots` spare device slots a layer, all empty, for a model in two memories (arrays or shapes)."""
    return tiers.empty(len(packed.layers), slots, tiers.record_words(packed.layers[0].experts.hot))


def nothing_fetched(packed: PackedModel, slots: int, chosen: int) -> Kept:
    """`nothing_kept` for passes of `chosen` experts a row that also fetch on a guess; nothing has been seen yet."""
    seen = early.nothing_seen(packed.embed.shape[0], len(packed.layers), tiles.ROWS, chosen)
    return early.empty(nothing_kept(packed, slots), seen)
