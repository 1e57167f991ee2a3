"""The chosen experts of a stack one after the other, for a device that has few of them to compute.

Knows: how an expert runs while a few rows of its weights are decoded at a time. Does not know: why these experts are
here, or what becomes of their contributions.

`Experts.run_chosen` decodes an expert for each choice of each row, those of other devices' experts included, and writes
it to memory; `run_all` decodes the whole stack. Here an expert that nobody chose costs nothing, and on a processor what
is decoded stays in its caches: one V4-Flash expert takes 10 ms of two cores in blocks of 256 rows, 25 ms in one.
"""

import jax
import jax.numpy as jnp

from v4flash.model.experts import NOWHERE, Experts, clamped_swiglu, own_contributions
from v4flash.model.numerics import Linear

PROCESSOR_ROWS = 256  # of a weight, decoded at a time on a processor: 2 MB of bfloat16 at V4-Flash's width


def contributions_in_turn(
    held: Experts,
    x: jax.Array,
    places: jax.Array,
    weights: jax.Array,
    *,
    every: bool,
    rows: int | None = None,
) -> jax.Array:
    """As `own_contributions`: [T, K, D] float32, exact zeros where the place is NOWHERE.

    In float32 it is that, for the same bits; in other types sums are taken in another order.

    Args: rows, of a weight, decoded at a time; None decodes whole weights, and so do weights of other sizes.
    """
    if held.numerics.dtype == jnp.float32:
        return own_contributions(held, x, places, weights, every=every)
    chosen = jnp.zeros((held.count,), bool).at[places].max(places != NOWHERE)
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    x, dtype = held.w1.rounded_input(x), held.numerics.dtype

    def one(number: jax.Array, made: jax.Array) -> jax.Array:
        expert = order[number]
        mine = places == expert
        gate, up = (_product(weight, x, expert, rows).astype(dtype) for weight in (held.w1, held.w3))
        hidden = clamped_swiglu(gate, up, held.config.swiglu_limit)
        hidden = hidden * jnp.sum(jnp.where(mine, weights, 0.0), axis=1, keepdims=True)
        down = _product(held.w2, held.w2.rounded_input(hidden), expert, rows).astype(dtype)
        # A row that chose the expert twice has both weights in its first choice.
        first = mine & (jnp.cumsum(mine, axis=1) == 1)
        return jnp.where(first[..., None], down[:, None].astype(jnp.float32), made)

    empty = jnp.zeros((*places.shape, x.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, jnp.sum(chosen, dtype=jnp.int32), one, empty)


def _product(weight: Linear, x: jax.Array, expert: jax.Array, rows: int | None) -> jax.Array:
    """x [T, K] times one expert's weight [N, K]: [T, N] float32."""
    size = weight.weight.shape[-2]
    rows = rows if rows and size % rows == 0 else size

    def block(start: jax.Array) -> jax.Array:
        return weight.numerics.product("tk,nk->tn", x, weight.decoded_rows(expert, start, rows))

    made = jax.lax.map(block, jnp.arange(0, size, rows, dtype=jnp.int32))
    return jnp.moveaxis(made, 0, 1).reshape(x.shape[0], size)
