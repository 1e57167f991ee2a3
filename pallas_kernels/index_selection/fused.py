"""Launches the fused index selection; the result of `reference.choose`.

Knows: shapes, the sizes of tiles, and how many programs share the work. Does not know: the bodies (`kernels`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import launch, tuning
from pallas_kernels.index_selection import kernels
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns

NARROW_WIDTH = 64
LONG, LONG_WARPS = 1 << 13, 16  # more blocks of a row than this are shared by more threads
MOST_BLOCKS = 1 << 14  # a row's blocks are held in registers, and two counts share one integer


def _hadamard_signs(size: int) -> np.ndarray:
    """The Sylvester Hadamard matrix [size, size] of +1 and -1."""
    axis = np.arange(size)
    return 1.0 - 2.0 * (np.bitwise_count(axis[:, None] & axis) % 2)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def rows_together(rows: int, spec: IndexSpec, columns: int) -> int:
    """How many rows share a program's keys: up to `columns` query heads; a member's rows have keys of their own."""
    together = 1
    while spec.role != "member" and rows % (2 * together) == 0 and 2 * together * spec.heads <= columns:
        together *= 2
    return together


def choose(
    q: Columns,
    weights: Columns,
    table: jax.Array,
    keys: jax.Array,
    length: jax.Array,
    count: jax.Array,
    counters: jax.Array,
    spec: IndexSpec,
    candidates: Listed | None = None,
    tile: dict[str, int] | None = None,
) -> tuple[Listed, Listed | None, jax.Array]:
    """`reference.choose` in one launch, and the counters for the next kernel. `tile` overrides the measured choice.

    `counters` come from `device_barrier.counters`, a line for each of up to as many rows as there are.
    """
    rows, member = q.rows, spec.role == "member"
    tile = tile or tuning.tiles("index_selection")["scores" if spec.width > NARROW_WIDTH else "narrow"]
    together = rows_together(rows, spec, tile["columns"])
    blocks = spec.kept if member else -(-keys.shape[0] // spec.block)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"{keys.shape[0]} entries in blocks of {spec.block}, expected at most {MOST_BLOCKS} blocks; "
            "choose a shorter context"
        )
    if keys.dtype != spec.type:
        raise ValueError(f"index keys are {keys.dtype}, expected {spec.dtype}")
    lists = (candidates.ids, candidates.counts) if member else (length, length)
    source, kept = spec.role == "source", max(spec.kept, 1)
    trivial = min(spec.topk, spec.kept * spec.block) if source else spec.topk
    signs = jnp.asarray(_hadamard_signs(spec.width), spec.type) if spec.hadamard else length
    shares = max(1, tile["programs"] * together // rows)
    operands = (q.partials, weights.partials, table, signs, keys, length, count, *lists, counters)
    lists_of_ids = [
        (rows, spec.topk),
        (rows,),
        (rows, kept) if source else (1, 1),
        (rows,),
        (rows, spec.topk),
    ]
    ids, counts, blocks_kept, kept_counts, _, _, _, counters = launch.call(
        kernels.index_selection,
        *operands,
        grid=(rows // together * shares + (2 if source else 1) * rows,),
        outputs=[
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in lists_of_ids),
            jax.ShapeDtypeStruct((rows, blocks * spec.block), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ],
        aliases={len(operands) - 1: 7},
        num_warps=tile["warps"] if blocks <= LONG else max(tile["warps"], LONG_WARPS),
        num_stages=tile["stages"],
        Q=q.layout,
        W=weights.layout,
        R=rows,
        HEADS=spec.heads,
        WIDTH=spec.width,
        ROPE=spec.rope,
        RATIO=spec.ratio,
        QUANTISE=spec.quantise,
        HADAMARD=spec.hadamard,
        ROLE=spec.role or "none",
        BLOCK=spec.block,
        KEPT=kept,
        TRIVIAL=trivial,
        BLOCKS=blocks,
        SCALE=(spec.width * spec.heads) ** -0.5,
        PARTS=_power_of_two(weights.layout[0]),
        ROWS=together,
        TILE=tile["keys"],
        PADDED_BLOCKS=_power_of_two(blocks),
        TOPK=spec.topk,
        PADDED_TOPK=_power_of_two(spec.topk),
        PADDED_KEPT=_power_of_two(kept),
        SHARES=shares,
    )
    return Listed(ids, counts), Listed(blocks_kept, kept_counts) if source else candidates, counters
