"""The experts of a layer on two devices, on packed weights.

Knows: which entries of a list of experts this device has, and which partial outputs are its own. Does not know: how
experts are computed or outputs added over devices, or which expert lives where: that is a table beside the packed
experts. What is said in `model/paired_experts.py` of `PeerExperts` holds here.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import EMPTY, Routes
from v4flash.model.paired_experts import ROLE


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HeldExperts:
    """A device's own experts of a layer, and where all of them are. Both change when experts change places.

    Attributes:
      held: packed, S of them.
      places: int32 [2, E], tier and slot of every expert.
    """

    held: PackedExperts
    places: jax.Array


def own_routes(experts: HeldExperts, routes: Routes) -> Routes:
    """The list with this device's experts by their slots, and without the others."""
    tier, slot = experts.places[:, jnp.maximum(routes.expert_ids, 0)]
    own = (routes.expert_ids >= 0) & (tier == jax.lax.axis_index(ROLE))
    return routes._replace(expert_ids=jnp.where(own, slot, EMPTY))


def own_part(experts: HeldExperts, partial: jax.Array, ids: jax.Array, count: jax.Array) -> jax.Array:
    """Partial outputs [R, K + 1, D] with zeros where the other device's count, which nobody wrote here.

    The shared expert is computed by both and counted once. Args: ids int32 [R, K]; count int32 [], live rows.
    """
    role = jax.lax.axis_index(ROLE)
    live = (jnp.arange(ids.shape[0]) < count)[:, None]
    chosen = live & (experts.places[0, ids] == role)
    here = jnp.concatenate([chosen, jnp.broadcast_to(role == 0, live.shape)], axis=1)
    return jnp.where(here[..., None], partial, 0)
