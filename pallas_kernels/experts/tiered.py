"""The expert products of experts in two memories as three Triton launches; `tiers` defines them.

Knows: shapes, grids and constants. Does not know: the bodies (`tier_kernels`, `walking_tier_kernels`).
"""

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import launch, tiles
from pallas_kernels.device_numbers import triton_type
from pallas_kernels.experts import fused, tiers, walking_tier_kernels
from pallas_kernels.experts import tier_kernels as kernels
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import PEAK_CHANNELS, Hidden, Routes
from pallas_kernels.experts.tiers import Kept, TieredExperts


def place(layer: jax.Array, table: jax.Array, routes: Routes, kept: Kept) -> tuple[jax.Array, Kept]:
    """`tiers.place`; owners, ages and counts are updated in place."""
    entries, (layers, slots) = routes.expert_ids.shape[0], kept.owners.shape
    if table.ndim != 3 or table.shape[::2] != (layers, 2) or table.dtype != jnp.int32:
        raise ValueError(f"the table is {table.dtype} {table.shape}, expected int32 ({layers}, experts, 2)")
    state = [kept.owners, kept.ages, kept.counts]
    places, owners, ages, counts = launch.call(
        kernels.place_experts,
        layer.reshape(1),
        table,
        routes.expert_ids,
        routes.count,
        *state,
        grid=(1,),
        outputs=[
            jax.ShapeDtypeStruct(tiers.places_shape(entries), jnp.int32),
            *(jax.ShapeDtypeStruct(part.shape, jnp.int32) for part in state),
        ],
        aliases={4: 1, 5: 2, 6: 3},
        num_warps=4,
        EXPERTS=table.shape[1],
        ENTRIES=entries,
        SLOTS=slots,
        WIDE_ENTRIES=triton.next_power_of_2(entries),
        WIDE_SLOTS=triton.next_power_of_2(slots),
    )
    return places, kept._replace(owners=owners, ages=ages, counts=counts)


def gate_up(
    x: jax.Array,
    experts: TieredExperts,
    shared: PackedExperts,
    routes: Routes,
    places: jax.Array,
    records: jax.Array,
    *,
    limit: float,
    scale_block: int,
    dtype=jnp.bfloat16,
    rounded: bool = True,
) -> tuple[Hidden, jax.Array]:
    """`tiers.gate_up`; `scale_block` as in `fused.gate_up`. Records are updated in place."""
    hot = experts.hot.gate_up
    columns, width = x.shape[1], 16 * hot.words.shape[1]
    entries = fused.require_gate_up(x, hot, shared, routes)
    _require_records(experts, places, records, entries)
    tile = fused.gate_up_tile(columns, width)
    offsets = tiers.record_offsets(experts.hot)
    operands = [
        x,
        *hot,
        *shared.gate_up,
        experts.cold,
        places,
        routes.weight,
        routes.slot,
        records,
    ]
    *made, records = launch.call(
        kernels.gate_up_tiered,
        *operands,
        grid=(width // 16, 1 + entries),
        outputs=[
            *(
                jax.ShapeDtypeStruct((1 + entries, tiles.ROWS, channels), jnp.float16)
                for channels in (width, width // PEAK_CHANNELS)
            ),
            jax.ShapeDtypeStruct(records.shape, jnp.int32),
        ],
        aliases={len(operands) - 1: 2},
        num_warps=tile["warps"],
        BLOCKS=columns // tiles.BLOCK,
        TILES=width // 16,
        LIMIT=float(limit),
        SCALED=scale_block,
        DTYPE=triton_type(dtype),
        ROUND=rounded,
        FENCED=bool(tile["fenced"]),
        WARPS=tile["warps"],
        RECORD=records.shape[1],
        WORDS=offsets["gate_up.words"],
        SCALES=offsets["gate_up.scales"],
    )
    return Hidden(*made), records


def down(
    hidden: Hidden,
    experts: TieredExperts,
    shared: PackedExperts,
    routes: Routes,
    places: jax.Array,
    records: jax.Array,
    *,
    chosen: int,
    round_block: int,
    scale_block: int,
    dtype=jnp.bfloat16,
) -> tuple[jax.Array, jax.Array]:
    """`tiers.down`; blocks as in `fused.down`. Records are updated in place."""
    hot = experts.hot.down
    width, columns = hidden.rows.shape[2], tiles.TILE * hot.words.shape[1]
    entries = fused.require_down(hidden, hot, shared, routes, round_block)
    _require_records(experts, places, records, entries)
    tile, walk = fused.down_tile(columns, width), fused.walking_tile(columns, width)
    offsets = tiers.record_offsets(experts.hot)
    operands = [*hidden, *hot, *shared.down, experts.cold, places, routes.slot, records]
    own_tiles, warps = columns // tiles.TILE, (walk or tile)["warps"]
    same = dict(
        outputs=[
            jax.ShapeDtypeStruct((tiles.ROWS, chosen + 1, columns), dtype),
            jax.ShapeDtypeStruct(records.shape, jnp.int32),
        ],
        aliases={len(operands) - 1: 1},
        num_warps=warps,
        BLOCKS=width // tiles.BLOCK,
        TILES=own_tiles,
        CHOSEN=chosen,
        SCALED=scale_block,
        ROUND=round_block,
        FENCED=bool(tile["fenced"]),
        WARPS=warps,
        RECORD=records.shape[1],
        WORDS=offsets["down.words"],
        SCALES=offsets["down.scales"],
    )
    if walk:
        if not 0 < walk["fetchers"] < walk["programs"]:
            raise ValueError(
                f"{walk['fetchers']} of {walk['programs']} programs fetch, expected some but not all"
            )
        partial, records = launch.call(
            walking_tier_kernels.down_tiered,
            *operands,
            grid=(walk["programs"],),
            ENTRIES=entries,
            SHARED_COST=walk["shared"],
            FETCHERS=walk["fetchers"],
            PROGRAMS=walk["programs"],
            **same,
        )
    else:
        partial, records = launch.call(kernels.down_tiered, *operands, grid=(own_tiles, 1 + entries), **same)
    return partial, records


def _require_records(experts: TieredExperts, places: jax.Array, records: jax.Array, entries: int) -> None:
    words = tiers.record_words(experts.hot)
    for name, array in (("cold experts", experts.cold), ("kept records", records)):
        if array.ndim != 2 or array.shape[1] != words or array.dtype != jnp.int32:
            raise ValueError(
                f"{name} are {array.dtype} {array.shape}, expected int32 (slots, {words}) for these hot experts"
            )
    if places.shape != tiers.places_shape(entries):
        raise ValueError(f"places are {places.shape}, expected {tiers.places_shape(entries)}")
