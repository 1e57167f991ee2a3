"""Routed experts divided between two devices that compute at the same time.

Knows: which of a row's chosen experts this device has, and how the contributions of both devices come together: by a
sum over the role axis of one program (`PeerExperts`), or by asking the other device (`SidecarExperts`). Does not know:
which expert lives where: that is a table among the parameters.

Either way a device yields the contribution of each choice by itself, [T, K, D], exact zeros where the other one
computes it. Adding zeros changes no bit, and only then are the choices of a row added up, in the order in which one
device alone adds them.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import ModelConfig
from v4flash.model.experts import NOWHERE, Experts, own_contributions, summed
from v4flash.model.host_experts import ExpertTable
from v4flash.model.numerics import Numerics
from v4flash.placement import cutting
from v4flash.placement.table import COLD, HOT

ROLE = "role"  # mesh axis of the two devices; a device's place on it is its tier


class _PairedExperts(nnx.Module):
    """`slots` experts on this device, and the table of where all `count` are."""

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, *, slots: int):
        self.count = count
        self.table = ExpertTable(count)
        self.held = Experts(config, numerics, slots)

    def places(self, ids: jax.Array, tier: int | jax.Array) -> jax.Array:
        """Slots int32 [T, K] of the chosen experts in a tier; NOWHERE for the others."""
        return jnp.where(self.table.tier[...][ids] == tier, self.table.slot[...][ids], NOWHERE)


class PeerExperts(_PairedExperts):
    """Experts of one of two devices in a mesh; must run inside a `shard_map` over the axis ROLE.

    Both devices run everything else too, so that rows and routes are where they are needed without being sent, and one
    sum a layer is all that passes between the devices. In the other division, where the second device keeps the cold
    experts and nothing else, rows go over and results come back: two waits a layer instead of one, the second device
    idle during attention, and the cold experts begun later than the hot ones. It would save the second device a copy
    of what is not an expert, a tenth of its memory.

    There is no branch on the role. Both devices have a stack of as many slots and find their own experts in it by the
    table, so that both run one body; under `lax.cond` each role would have a body of its own with the same operations,
    and every layer's graph one more node that waits for its predicate.
    """

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """As `Experts`: [T, D], the same on both devices."""
        places = self.places(ids, jax.lax.axis_index(ROLE))
        mine = own_contributions(self.held, x, places, weights, every=self.count <= ids.size)
        return summed(jax.lax.psum(mine, ROLE))


class SidecarExperts(_PairedExperts):
    """The hot experts on this device; another one is asked for the cold ones. Must run in a function that is cut."""

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """As `Experts`: [T, D]."""
        ticket = cutting.send(x, self.places(ids, COLD), weights)
        near = own_contributions(self.held, x, self.places(ids, HOT), weights, every=self.count <= ids.size)
        return summed(near + cutting.receive(ticket, near))
