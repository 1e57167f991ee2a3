"""Launches the fused index selection; the result of `reference.choose`.

Knows: shapes, the sizes of tiles, and how many programs share the work. Does not know: the bodies (`kernels`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton

from pallas_kernels import launch, tuning
from pallas_kernels.index_selection import kernels
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns

NARROW_WIDTH = 64
SHORT = 1 << 10  # slots of a row up to which one warp chooses, which waits for no other
LONG = 1 << 13  # blocks of a row from which more threads share them
MOST_BLOCKS = 1 << 14  # a row's blocks are held in registers, and two counts share one integer


def _hadamard_signs(size: int) -> np.ndarray:
    """The Sylvester Hadamard matrix [size, size] of +1 and -1."""
    axis = np.arange(size)
    return 1.0 - 2.0 * (np.bitwise_count(axis[:, None] & axis) % 2)


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
    spec: IndexSpec,
    candidates: Listed | None = None,
    tile: dict[str, int] | None = None,
) -> tuple[Listed, Listed | None]:
    """`reference.choose` in two launches. `tile` overrides the measured choice for the scores, and its "choosing
    warps" that for the choice."""
    rows, member, source = q.rows, spec.role == "member", spec.role == "source"
    recorded = tuning.tiles("index_selection")
    blocks = spec.kept if member else -(-keys.shape[0] // spec.block)
    short = blocks * spec.block <= SHORT
    wide = "short scores" if short else "scores"
    tile = tile or recorded[wide if spec.width > NARROW_WIDTH else "narrow"]
    together = rows_together(rows, spec, tile["columns"])
    size = "short selection" if short else "long selection" if blocks > LONG else "selection"
    warps = recorded[size]["warps"]
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"{keys.shape[0]} entries in blocks of {spec.block}, expected at most {MOST_BLOCKS} blocks; "
            "choose a shorter context"
        )
    if keys.dtype != spec.type:
        raise ValueError(f"index keys are {keys.dtype}, expected {spec.dtype}")
    lists = (candidates.ids, candidates.counts) if member else (length, length)
    trivial = min(spec.topk, spec.kept * spec.block) if source else spec.topk
    signs = jnp.asarray(_hadamard_signs(spec.width), spec.type) if spec.hadamard else length
    common = dict(RATIO=spec.ratio, ROLE=spec.role or "none", BLOCK=spec.block, KEPT=max(spec.kept, 1))
    shares = max(1, tile["programs"] * together // rows)
    values, peaks = launch.call(
        kernels.index_scores,
        *(q.partials, weights.partials, table, signs, keys, length, count, *lists),
        grid=(shares, rows // together),
        outputs=[
            jax.ShapeDtypeStruct((rows, blocks * spec.block), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
        ],
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        SHARES=shares,
        Q=q.layout,
        W=weights.layout,
        R=rows,
        HEADS=spec.heads,
        WIDTH=spec.width,
        ROPE=spec.rope,
        QUANTISE=spec.quantise,
        HADAMARD=spec.hadamard,
        TRIVIAL=trivial,
        BLOCKS=blocks,
        SCALE=(spec.width * spec.heads) ** -0.5,
        PARTS=triton.next_power_of_2(weights.layout[0]),
        ROWS=together,
        TILE=tile["keys"],
        ENTRIES=keys.shape[0],
        PEAKS=source or blocks > spec.topk,
        **common,
    )
    published = (rows, spec.kept) if source else (1, 1)
    shapes = [(rows, spec.topk), (rows,), published, (rows,), (rows, spec.topk)]
    ids, counts, kept, kept_counts, _ = launch.call(
        kernels.index_choice,
        *(values, peaks, length, count, *lists),
        grid=(rows, 2 if source else 1),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        num_warps=tile.get("choosing warps", warps),
        BLOCKS=blocks,
        PADDED_BLOCKS=triton.next_power_of_2(blocks),
        TOPK=spec.topk,
        PADDED_TOPK=triton.next_power_of_2(spec.topk),
        PADDED_KEPT=triton.next_power_of_2(common["KEPT"]),
        **common,
    )
    return Listed(ids, counts), Listed(kept, kept_counts) if source else candidates
