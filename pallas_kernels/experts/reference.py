"""What the expert launches compute, in plain jax.numpy on the packed weights.

Knows: the clamped SwiGLU, the rounding points of the published model, the list of distinct experts and where
each partial output lies. Does not know: how the router scores. Only listed experts are read.

Source: DeepSeek inference/model.py (`Expert`, `MoE`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats, tiles
from pallas_kernels.experts.packing import CHANNELS, PackedExperts

EMPTY = -1
PEAK_CHANNELS = 8


class Routes(NamedTuple):
    """The experts that the rows of a step use, each listed once, and who uses them.

    Attributes:
      expert_ids: int32 [NE], places in the arena; EMPTY entries and entries from `count` on cost nothing. A row
        that chose an expert twice needs two entries of it.
      count: int32 [1].
      weight: float32 [NE, R], the routing weight of row r for entry e.
      slot: int32 [NE, R], the place of the entry among the row's own choices, or EMPTY: not routed.
    """

    expert_ids: jax.Array
    count: jax.Array
    weight: jax.Array
    slot: jax.Array


class Hidden(NamedTuple):
    """What gate and up hand to down.

    Attributes:
      rows: float16 [1 + NE, R, F], times 2^7: the shared expert's, then the list's.
      peaks: float16 [1 + NE, R, F / 8], the largest size of each 8 channels.
    """

    rows: jax.Array
    peaks: jax.Array


def routes(ids: jax.Array, weights: jax.Array, live: jax.Array, entries: int) -> Routes:
    """The list for expert ids int32 [R, K] and weights [R, K]; dead rows are routed nowhere.

    Experts come in ascending order. `entries` must hold every distinct expert: R * K always does.
    """
    rows, chosen = ids.shape
    earlier = (ids[:, :, None] == ids[:, None, :]) & (jnp.arange(chosen) < jnp.arange(chosen)[:, None])
    key = jnp.where(live[:, None], ids * chosen + jnp.sum(earlier, axis=-1), jnp.iinfo(jnp.int32).max)
    listed = jnp.unique(key, size=entries, fill_value=jnp.iinfo(jnp.int32).max)
    present = listed != jnp.iinfo(jnp.int32).max
    match = (key[None] == listed[:, None, None]) & present[:, None, None]
    slot = jnp.where(jnp.any(match, axis=-1), jnp.argmax(match, axis=-1), EMPTY)
    return Routes(
        jnp.where(present, listed // chosen, EMPTY).astype(jnp.int32),
        jnp.sum(present, dtype=jnp.int32).reshape(1),
        jnp.sum(jnp.where(match, weights[None], 0.0), axis=-1),
        slot.astype(jnp.int32),
    )


def listed(routes: Routes) -> jax.Array:
    """bool [NE]: the entries that name an expert."""
    return (jnp.arange(routes.expert_ids.shape[0]) < routes.count[0]) & (routes.expert_ids >= 0)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("rk,nk->rn", x, weight, precision=jax.lax.Precision.HIGHEST)


def _stored(x: jax.Array, dtype) -> jax.Array:
    """float32 `x` as an array of `dtype` holds it, still float32; XLA may drop a pair of conversions, not this."""
    return jax.lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


def _hidden(x, weight, row_weight, limit: float, dtype) -> jax.Array:
    """One expert's hidden rows float32 [R, F] from its interleaved gate-and-up weight [2 F, D]."""
    both = _stored(_product(x, weight[:, : x.shape[1]]), dtype)
    both = both.reshape(x.shape[0], -1, 2, CHANNELS)
    gate, up = both[:, :, 0].reshape(x.shape[0], -1), both[:, :, 1].reshape(x.shape[0], -1)
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return _stored(hidden * row_weight[:, None], dtype)


def sticky_half(x: jax.Array) -> jax.Array:
    """float32 to float16, rounded to odd: cut, with the last bit set where something was cut off.

    A later rounding to at least two bits fewer then gives what it would have given without this one. What float16
    cannot hold becomes its largest number.
    """
    size = jnp.minimum(jnp.abs(x), float(jnp.finfo(jnp.float16).max))
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
    odd = (bits & jnp.uint32(0xFFFFE000)) | jnp.where((bits & 0x1FFF) != 0, jnp.uint32(0x2000), jnp.uint32(0))
    normal = jax.lax.bitcast_convert_type(odd, jnp.float32)
    steps = size * 2.0**24  # of a subnormal float16
    whole = jnp.floor(steps)
    small = (whole + jnp.where((whole != steps) & (whole % 2 == 0), 1.0, 0.0)) * 2.0**-24
    return jnp.copysign(jnp.where(size < 2.0**-14, small, normal), x).astype(jnp.float16)


def gate_up(
    x: jax.Array,
    routed: PackedExperts,
    shared: PackedExperts,
    routes: Routes,
    *,
    limit: float,
    dtype=jnp.bfloat16,
    rounded: bool = True,
) -> Hidden:
    """The hidden rows of the shared expert and of every entry.

    Args:
      x: float16 [R, D], rounded as the model feeds it to these products.
      limit: clamp of the SwiGLU.
      dtype: the model's activation type, which gate, up and the hidden rows are rounded to.
      rounded: whether `down` will round the hidden rows: then they are kept rounded to odd.

    Rows that an entry is not routed to are zero here; the fused body leaves them unwritten.
    """
    wide = x.astype(jnp.float32)

    def entry(item):
        expert, weight, slot, here = item
        packed = jax.tree.map(lambda a: a[jnp.maximum(expert, 0)], routed.gate_up)
        hidden = _hidden(wide, tiles.unpack_fp4(packed), weight, limit, dtype)
        return jnp.where(here & (slot >= 0)[:, None], hidden, 0)

    own = _hidden(wide, tiles.unpack_fp8(shared.gate_up), jnp.ones(x.shape[0]), limit, dtype)
    items = (routes.expert_ids, routes.weight, routes.slot, listed(routes))
    hidden = jnp.concatenate([own[None], jax.lax.map(entry, items)]) * tiles.HIDDEN_GAIN
    kept = sticky_half(hidden) if rounded else hidden.astype(jnp.float16)
    return Hidden(kept, jnp.max(jnp.abs(kept).reshape(*kept.shape[:2], -1, PEAK_CHANNELS), axis=-1))


def down(
    hidden: Hidden,
    routed: PackedExperts,
    shared: PackedExperts,
    routes: Routes,
    *,
    chosen: int,
    round_block: int,
    dtype=jnp.bfloat16,
) -> jax.Array:
    """Partial outputs [R, chosen + 1, D] in `dtype`: a row's experts in its own order, then the shared expert.

    Args:
      hidden: from `gate_up`.
      round_block: columns that share a scale of the hidden rows' FP8 rounding, 0 for no rounding.

    Slots of dead rows are zero here; the fused body leaves them unwritten.
    """
    rows, width = hidden.rows.shape[1:]
    wide = hidden.rows.astype(jnp.float32) / tiles.HIDDEN_GAIN
    if round_block:
        wide = formats.fp8_round_trip(wide, min(round_block, width))

    def entry(item):
        expert, own = item
        packed = jax.tree.map(lambda a: a[jnp.maximum(expert, 0)], routed.down)
        return _product(own, tiles.unpack_fp4(packed)[:, :width]).astype(dtype)

    made = jax.lax.map(entry, (routes.expert_ids, wide[1:]))
    own = _product(wide[0], tiles.unpack_fp8(shared.down)[:, :width]).astype(dtype)
    used = (routes.slot >= 0) & listed(routes)[:, None]
    slot = jnp.where(used, routes.slot, chosen + 1)
    partial = jnp.zeros((rows, chosen + 1, own.shape[1]), dtype).at[:, chosen].set(own)
    return partial.at[jnp.arange(rows)[None], slot].set(made, mode="drop")


def combined(partial: jax.Array) -> jax.Array:
    """The sublayer's output [R, D] in the partials' type: routed experts in the row's order, then the shared one."""
    wide = partial.astype(jnp.float32)
    total = wide[:, 0]
    for slot in range(1, wide.shape[1]):
        total = total + wide[:, slot]
    return total.astype(partial.dtype)
