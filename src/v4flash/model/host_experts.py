"""Routed experts of which some lie in the host's memory and are fetched when a row chooses them.

Knows: which stack an expert is in, and how a pass brings in what it misses. Does not know: why an expert is hot, or
how arrays reached their memory. It takes the place of `experts.Experts` in a layer and gives the same bits.

    hot     [H]      on the device, read only
    cache   [C]      on the device: cold experts used lately; a pass changes it, and hands it on
    cold    [E - H]  in the host's memory

A pass whose rows choose hot experts only looks at one condition and does nothing else. Otherwise a loop fetches what
is chosen and not there, an explicit `device_put` of one expert's slice after the other, then runs the experts that
are there, until every choice is done; usually that is one turn. What a rejected draft fetched stays: the cache decides
nothing but time.

On a CPU both memories are the same, and the put is none. What it costs on a GPU is measured with `v4flash bench
--experts host --backend xla`; compiling for a GPU on a machine without one drops the host memory, so nothing is
counted there. Computing cold experts on the processor inside the step (`compute_on`) was tried and left out: its code
for one V4-Flash expert and 8 rows took 68 ms on two busy cores, while the link brings the expert in 0.3 ms. By itself,
as `--experts sidecar` has it, a processor of 16 cores takes 7 to 15 ms.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import ModelConfig
from v4flash.model.experts import NOWHERE, Experts, own_contributions, summed
from v4flash.model.numerics import Numerics
from v4flash.placement import cache as slots
from v4flash.placement.table import HOT

HOT_STACK, COLD_STACK, CACHE, TABLE = "hot", "cold", "cache", "table"
HELD_STACK = "held"  # of one of two devices (paired_experts)
_EXPERTS = "experts"


def changed_state(model: nnx.Module) -> nnx.State:
    """What a pass changes of a model's weights: the caches."""
    return nnx.state(model, nnx.PathContains(CACHE))


def stack_path(path: tuple, stack: str) -> tuple:
    """The path of a routed experts' parameter in one of their stacks: ..., 'experts', 'hot', 'w1', 'weight'."""
    place = path.index(_EXPERTS) + 1
    return (*path[:place], stack, *path[place:])


def published_path(path: tuple) -> tuple | None:
    """The path that a parameter has without tiers; None for what no checkpoint holds."""
    if CACHE in path or TABLE in path:
        return None
    return tuple(part for part in path if part not in (HOT_STACK, COLD_STACK, HELD_STACK))


class ExpertTable(nnx.Module):
    """One layer's row of a placement: tier and slot int32 [E]."""

    def __init__(self, count: int):
        self.tier = nnx.Variable(jnp.zeros((count,), jnp.int32))
        self.slot = nnx.Variable(jnp.zeros((count,), jnp.int32))


class ExpertCache(nnx.Module):
    """Slots for cold experts on the device, and int32 [2]: cold experts asked for so far, and those fetched."""

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int):
        self.experts = Experts(config, numerics, count)
        held = slots.Held.empty(count)
        self.expert, self.age = nnx.Variable(held.expert), nnx.Variable(held.age)
        self.counts = nnx.Variable(jnp.zeros((2,), jnp.int32))

    @property
    def held(self) -> slots.Held:
        return slots.Held(self.expert[...], self.age[...])


class HostExperts(nnx.Module):
    """`count` experts: `hot` on the device, the others in the host's memory with `spare` slots on the device."""

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, *, hot: int, spare: int):
        self.count = count
        self.table = ExpertTable(count)
        self.hot = Experts(config, numerics, hot)
        self.cache = ExpertCache(config, numerics, spare)
        self.cold = Experts(config, numerics, count - hot)

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """As `Experts.__call__`; a choice of weight zero (a dead row's) fetches nothing."""
        every = self.count <= ids.size
        wanted = weights != 0
        hot = wanted & (self.table.tier[...][ids] == HOT)

        def made(experts: Experts, places: jax.Array, here: jax.Array) -> jax.Array:
            """Contributions of the choices that are `here` bool [T, K], zeros for the others."""
            return own_contributions(experts, x, jnp.where(here, places, NOWHERE), weights, every=every)

        graph, start = nnx.split(self.cache)

        def turn(carry: tuple) -> tuple:
            state, parts, left = carry
            cache = nnx.merge(graph, state)
            self._fetch(cache, ids, left)
            places = slots.places(cache.held, ids)
            here = left & (places >= 0)
            parts = parts + made(cache.experts, places, here)
            return nnx.state(cache), parts, left & ~here

        with jax.named_scope("hot"):
            parts = made(self.hot, self.table.slot[...][ids], hot)
        with jax.named_scope("cold"):
            state, parts, _ = jax.lax.while_loop(
                lambda carry: jnp.any(carry[2]), turn, (start, parts, wanted & ~hot)
            )
        nnx.update(self.cache, state)
        return summed(parts)

    def _fetch(self, cache: ExpertCache, ids: jax.Array, wanted: jax.Array) -> None:
        """Brings as many of the experts that choices `wanted` bool [T, K] name into the cache as have room."""
        needed = jnp.zeros((self.count,), bool).at[ids].max(wanted)
        held, fetches = slots.plan(cache.held, needed)
        origins, cold = self.table.slot[...], nnx.state(self.cold)

        def one(number: jax.Array, stacks: nnx.State) -> nnx.State:
            origin, place = origins[fetches.experts[number]], fetches.slots[number]

            def moved(source: jax.Array, stack: jax.Array) -> jax.Array:
                expert = jax.lax.dynamic_index_in_dim(source, origin, keepdims=True)
                expert = jax.device_put(expert, jax.memory.Space.Device)
                return jax.lax.dynamic_update_slice_in_dim(stack, expert, place, 0)

            return jax.tree.map(moved, cold, stacks)

        stacks = jax.lax.fori_loop(0, fetches.count, one, nnx.state(cache.experts))
        nnx.update(cache.experts, stacks)
        cache.expert[...], cache.age[...] = held.expert, held.age
        served = jnp.sum(slots.used(held), dtype=jnp.int32)
        cache.counts[...] += jnp.stack([served, fetches.count])
