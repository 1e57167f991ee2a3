"""Router and mixture of experts.

Knows: how rows choose experts (scores or a table over token ids), the clamped SwiGLU, and two ways to compute
the chosen experts: gathering each row's few, or running all of them once when rows are many. Does not know:
where an expert's bytes live: a module that does (`model/host_experts.py`) takes the place of `Experts`.

Source: DeepSeek inference/model.py (`Gate`, `Expert`, `MoE`).
"""

from collections.abc import Callable

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import ModelConfig
from v4flash.model.numerics import Linear, Numerics

NOWHERE = -1


class Router(nnx.Module):
    """Chooses experts per row; parameters weight [E, D] and bias [E], or tid2eid [V, K] for hash routing."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, experts: int, chosen: int, hashed: bool):
        self.config, self.numerics, self.chosen = config, numerics, chosen
        self.weight = nnx.Param(jnp.zeros((experts, config.hidden_size), numerics.plain))
        self.tid2eid = nnx.Param(jnp.zeros((config.vocab_size, chosen), jnp.int32)) if hashed else None
        self.bias = None if hashed else nnx.Param(jnp.zeros((experts,), jnp.float32))

    def scores(self, x: jax.Array) -> jax.Array:
        """sqrt(softplus(x W^T)) in float32: [T, E]."""
        return jnp.sqrt(jax.nn.softplus(self.numerics.exact_product("td,ed->te", x, self.weight[...])))

    def __call__(self, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Expert ids [T, K] and their weights [T, K] float32; the bias selects, the weights ignore it."""
        scores = self.scores(x)
        if self.tid2eid is not None:
            ids = self.tid2eid[...][tokens]
        else:
            ids = jax.lax.top_k(scores + self.bias[...], self.chosen)[1]
        weights = jnp.take_along_axis(scores, ids, axis=1)
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + self.config.router_sum_eps)
        return ids, weights * self.config.routed_scaling_factor


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


class Experts(nnx.Module):
    """Routed experts stacked on a leading axis: w1, w3 [E, F, D] and w2 [E, D, F]."""

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int):
        width, storage = config.moe_intermediate_size, config.expert_dtype
        self.config, self.numerics, self.count = config, numerics, count
        self.w1 = Linear(width, config.hidden_size, storage, config, numerics, experts=count)
        self.w2 = Linear(config.hidden_size, width, storage, config, numerics, experts=count)
        self.w3 = Linear(width, config.hidden_size, storage, config, numerics, experts=count)

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """sum_k weights[t, k] * expert_ids[t, k](x[t]) in float32: [T, D]."""
        return summed(self.contributions(x, ids, weights, every=self.count <= ids.size))

    def contributions(self, x: jax.Array, places: jax.Array, weights: jax.Array, *, every: bool) -> jax.Array:
        """weights[t, k] * expert_places[t, k](x[t]) in float32: [T, K, D].

        The bits of a contribution depend on neither the number of experts stacked here nor on their order, so that
        an expert's tier decides nothing (on a CPU; a GPU's library may choose its algorithm by the number).

        Args:
          places: int32 [T, K], places in this stack; NOWHERE for a choice that is not in it, whose contribution
            means nothing and whose weight must be zero.
          every: run every expert on every row, as suits many rows, instead of gathering each row's few. The two
            ways take sums in another order: tiers that are joined must all go the same way.
        """
        return self.run_all(x, places, weights) if every else self.run_chosen(x, places, weights)

    def run_all(self, x: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
        """Every expert on every row; a row's weight is zero for experts it did not choose."""
        chosen = jax.nn.one_hot(places, self.count, dtype=jnp.float32)
        dense = jnp.sum(chosen * weights[..., None], axis=1)
        # One product for each expert, of the same shape however many there are: its bits are its own.
        x = self.w1.rounded_input(x)
        x = jnp.broadcast_to(x, (self.count, *x.shape))
        product, dtype = self.numerics.product, self.numerics.dtype
        gate = product("etd,efd->etf", x, self.w1.decoded()).astype(dtype)
        up = product("etd,efd->etf", x, self.w3.decoded()).astype(dtype)
        hidden = clamped_swiglu(gate, up, self.config.swiglu_limit) * dense.T[..., None]
        down = product("etf,edf->etd", self.w2.rounded_input(hidden), self.w2.decoded()).astype(dtype)
        # An expert that a row chose twice ran once, with both weights.
        again = jnp.tril(places[:, :, None] == places[:, None, :], k=-1).any(axis=2)
        made = down[places, jnp.arange(places.shape[0])[:, None]].astype(jnp.float32)
        return jnp.where(again[..., None], 0.0, made)

    def run_chosen(self, x: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
        """Only the chosen experts, gathered per row before decoding."""
        x = self.w1.rounded_input(x)
        product, dtype = self.numerics.product, self.numerics.dtype
        gate = product("td,tkfd->tkf", x, self.w1.decoded(places)).astype(dtype)
        up = product("td,tkfd->tkf", x, self.w3.decoded(places)).astype(dtype)
        hidden = clamped_swiglu(gate, up, self.config.swiglu_limit) * weights[..., None]
        down = product("tkf,tkdf->tkd", self.w2.rounded_input(hidden), self.w2.decoded(places)).astype(dtype)
        return down.astype(jnp.float32)


RoutedExperts = Callable[[ModelConfig, Numerics, int], nnx.Module]


def own_contributions(
    held: Experts, x: jax.Array, places: jax.Array, weights: jax.Array, *, every: bool
) -> jax.Array:
    """`Experts.contributions` of a stack with some of the chosen experts; exact zeros where the place is NOWHERE."""
    here = places != NOWHERE
    made = held.contributions(x, places, jnp.where(here, weights, 0.0), every=every)
    return jnp.where(here[..., None], made, 0.0)


def summed(contributions: jax.Array) -> jax.Array:
    """The routed output [T, D] of contributions [T, K, D], added in the order of a row's choices."""
    return jnp.sum(contributions, axis=1)


class SharedExpert(nnx.Module):
    """The always-on expert: w1, w3 [F, D] and w2 [D, F] in FP8, clamped like the routed ones."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        width = config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1 = Linear(width, config.hidden_size, "fp8", config, numerics)
        self.w2 = Linear(config.hidden_size, width, "fp8", config, numerics)
        self.w3 = Linear(width, config.hidden_size, "fp8", config, numerics)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))


class MixtureOfExperts(nnx.Module):
    """Router, routed experts and the shared expert: rows [T, D] to [T, D].

    `routed` makes the module of the routed experts, called as `Experts` is.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        experts: int,
        chosen: int,
        hashed: bool,
        routed: RoutedExperts = Experts,
    ):
        self.numerics = numerics
        self.gate = Router(config, numerics, experts=experts, chosen=chosen, hashed=hashed)
        self.experts = routed(config, numerics, experts)
        self.shared_experts = SharedExpert(config, numerics)

    def __call__(self, x: jax.Array, tokens: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output [T, D] and the chosen expert ids [T, K].

        `live` bool [T]; a dead row is routed nowhere (all its weights are zero).
        """
        ids, weights = self.gate(x, tokens)
        weights = jnp.where(live[:, None], weights, 0.0)
        routed = self.experts(x, ids, weights)
        output = (routed + self.shared_experts(x).astype(jnp.float32)).astype(self.numerics.dtype)
        return output, ids
