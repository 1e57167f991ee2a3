"""The expert products as two Triton launches; `reference` defines them.

Knows: shapes, grids, and how many warps a tile gets where nothing was measured. Does not know: the bodies (`kernels`).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import launch, tiles, tuning
from pallas_kernels.device_numbers import triton_type
from pallas_kernels.experts import kernels, walking_kernels
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import PEAK_CHANNELS, Hidden, Routes

# Where nothing was measured, down is one program a tile. `fetchers`, of experts in two memories: programs that fetch
# missed experts, as long as there are any; 8 to 16 saturate the link while they do nothing else.
WALKING = {"programs": 0, "warps": 8, "shared": 3, "fetchers": 32}


def gate_up(
    x: jax.Array,
    routed: PackedExperts,
    shared: PackedExperts,
    routes: Routes,
    *,
    limit: float,
    scale_block: int,
    dtype=jnp.bfloat16,
    rounded: bool = True,
) -> Hidden:
    """`reference.gate_up`; `scale_block` (128 or 32) is the block of the shared expert's weight scales."""
    columns, width = x.shape[1], 16 * routed.gate_up.words.shape[1]
    entries = require_gate_up(x, routed.gate_up, shared, routes)
    tile = gate_up_tile(columns, width)
    made = launch.call(
        kernels.gate_up,
        x,
        *routed.gate_up,
        *shared.gate_up,
        *routes,
        grid=(width // 16, 1 + entries),
        outputs=[
            jax.ShapeDtypeStruct((1 + entries, tiles.ROWS, channels), jnp.float16)
            for channels in (width, width // PEAK_CHANNELS)
        ],
        num_warps=tile["warps"],
        BLOCKS=columns // tiles.BLOCK,
        TILES=width // 16,
        LIMIT=float(limit),
        SCALED=scale_block,
        DTYPE=triton_type(dtype),
        ROUND=rounded,
        FENCED=bool(tile["fenced"]),
        WARPS=tile["warps"],
    )
    return Hidden(*made)


def down(
    hidden: Hidden,
    routed: PackedExperts,
    shared: PackedExperts,
    routes: Routes,
    *,
    chosen: int,
    round_block: int,
    scale_block: int,
    dtype=jnp.bfloat16,
) -> jax.Array:
    """`reference.down`; `round_block` is 128, 32 or 0, `scale_block` as in `gate_up`."""
    width, columns = hidden.rows.shape[2], tiles.TILE * routed.down.words.shape[1]
    entries = require_down(hidden, routed.down, shared, routes, round_block)
    operands = (*hidden, *routed.down, *shared.down, routes.expert_ids, routes.count, routes.slot)
    outputs = [jax.ShapeDtypeStruct((tiles.ROWS, chosen + 1, columns), dtype)]
    own_tiles = columns // tiles.TILE
    same = dict(
        BLOCKS=width // tiles.BLOCK, TILES=own_tiles, CHOSEN=chosen, SCALED=scale_block, ROUND=round_block
    )
    walk = walking_tile(columns, width)
    if walk:
        return launch.call(
            walking_kernels.down,
            *operands,
            grid=(walk["programs"],),
            outputs=outputs,
            num_warps=walk["warps"],
            ENTRIES=entries,
            SHARED_COST=walk["shared"],
            PROGRAMS=walk["programs"],
            WARPS=walk["warps"],
            **same,
        )[0]
    tile = down_tile(columns, width)
    return launch.call(
        kernels.down,
        *operands,
        grid=(own_tiles, 1 + entries),
        outputs=outputs,
        num_warps=tile["warps"],
        FENCED=bool(tile["fenced"]),
        WARPS=tile["warps"],
        **same,
    )[0]


def gate_up_tile(columns: int, width: int) -> tuning.Choice:
    """Warps of a tile, and whether its loads are kept together: as measured for these sizes, else by their length."""
    untuned = {"warps": 8 if columns >= 8 * tiles.CHUNK else 4, "fenced": 1}
    return tuning.choice("experts", tuning.by_shape(columns, width, what="gate_up"), untuned)


def down_tile(columns: int, width: int) -> tuning.Choice:
    """As `gate_up_tile`, for down as one program a tile."""
    return tuning.choice("experts", tuning.by_shape(columns, width, what="down"), {"warps": 4, "fenced": 0})


def walking_tile(columns: int, width: int) -> tuning.Choice:
    """What down's walking bodies need to know: programs, warps, the shared expert's cost; {} to do without them.

    Both have as many warps, so that sums are added in the same order: an expert's bits do not tell in which memory it
    lies.
    """
    tile = tuning.choice("experts", tuning.by_shape(columns, width, what="walking down"), WALKING)
    return tile if tile["programs"] and width % (tiles.CHUNK * tile["warps"]) == 0 else {}


def require_gate_up(x: jax.Array, routed, shared: PackedExperts, routes: Routes) -> int:
    """The number of entries. Raises ValueError where shapes of `gate_up` do not fit each other."""
    _require_rows(x.shape[0], x.dtype)
    _require_packed("gate_up", routed, shared.gate_up, 32 * routed.words.shape[1], x.shape[1])
    return _require_routes(routes)


def require_down(hidden: Hidden, routed, shared: PackedExperts, routes: Routes, round_block: int) -> int:
    """The number of entries. Raises ValueError where shapes of `down` do not fit each other."""
    width = hidden.rows.shape[2]
    _require_rows(hidden.rows.shape[1], hidden.rows.dtype)
    _require_packed("down", routed, shared.down, tiles.TILE * routed.words.shape[1], width)
    entries = _require_routes(routes)
    if hidden.rows.shape[0] != 1 + entries:
        raise ValueError(
            f"hidden has {hidden.rows.shape[0]} entries, expected the shared one and {entries} listed"
        )
    if round_block == tiles.CHUNK and width > tiles.CHUNK and width % tiles.CHUNK:
        raise ValueError(f"hidden rows have {width} columns, expected a multiple of the rounding block 128")
    return entries


def _require_rows(rows: int, dtype) -> None:
    if rows != tiles.ROWS or dtype != jnp.float16:
        raise ValueError(f"activations have {rows} rows of {dtype}, expected {tiles.ROWS} of float16")


def _require_packed(name: str, routed, shared, rows: int, columns: int) -> None:
    chunks = tiles.padded(columns, tiles.CHUNK) // tiles.CHUNK
    expected = (rows // tiles.TILE, 4 * chunks, tiles.LANES, 4)
    if columns % tiles.BLOCK or routed.words.shape[1:] != expected:
        raise ValueError(
            f"routed {name} words have shape {routed.words.shape} for rows of {columns}, expected (experts, "
            f"{', '.join(map(str, expected))}) from pack_routed"
        )
    expected = (rows // tiles.TILE, 2 * chunks, 4, tiles.LANES, 4)
    if shared.words.shape != expected:
        raise ValueError(
            f"shared {name} words have shape {shared.words.shape}, expected {expected} from pack_shared"
        )


def _require_routes(routes: Routes) -> int:
    """The number of entries, empty ones included."""
    entries = routes.expert_ids.shape[0]
    shapes = [tuple(part.shape) for part in routes]
    if shapes != [(entries,), (1,), (entries, tiles.ROWS), (entries, tiles.ROWS)]:
        raise ValueError(
            f"routes have shapes {shapes}, expected (NE,), (1,), (NE, {tiles.ROWS}), (NE, {tiles.ROWS})"
        )
    return entries
