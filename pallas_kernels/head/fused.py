"""The head as two Triton launches; `reference` defines it.

Knows: shapes and grids. Does not know: the bodies (`kernels`).
"""

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import launch, tiles, tuning
from pallas_kernels.dense.packing import bfloat_terms
from pallas_kernels.head import kernels


def logits_argmax(x: jax.Array, weight: jax.Array, *, logits: bool = False):
    """`reference.logits_argmax`; V must be a multiple of 32 and D of 64, and there are 8 rows."""
    tokens, columns = weight.shape
    if (
        weight.dtype != jnp.bfloat16
        or tokens % tiles.TILE
        or columns % 64
        or x.shape != (tiles.ROWS, columns)
    ):
        raise ValueError(
            f"head is {weight.dtype} {weight.shape} for rows {x.shape}, expected bfloat16 [32 a, 64 b] for rows "
            f"[{tiles.ROWS}, 64 b]"
        )
    terms = bfloat_terms(x)
    tile = tuning.choice("head", tuning.by_shape(tokens, columns), {"warps": 8 if columns >= 512 else 4})
    count, warps = tokens // tiles.TILE, tile["warps"]
    shape = (tiles.ROWS, tokens if logits else 1)
    tile_best, full = launch.call(
        kernels.tile_winners,
        terms,
        weight,
        grid=(count,),
        outputs=[
            jax.ShapeDtypeStruct((tiles.ROWS, count, 2), jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        num_warps=warps,
        COLUMNS=columns,
        TERMS=terms.shape[0],
        LOGITS=logits,
        WARPS=warps,
    )
    best = best_of(tile_best, count, row=2 * count, tile=2, part=1)
    return (*best, full) if logits else best


def best_of(
    tile_best: jax.Array, count: int, *, row: int, tile: int, part: int
) -> tuple[jax.Array, jax.Array]:
    """Each row's best token int32 [8] and its logit float32 [8] among `count` winners a row.

    `tile_best` holds pairs of int32 as `kernels.tile_winners` writes them; rows, tiles and the parts of a pair lie
    `row`, `tile` and `part` numbers apart.
    """
    one = jax.ShapeDtypeStruct((tiles.ROWS,), jnp.int32)
    token, logit = launch.call(
        kernels.winners,
        tile_best,
        grid=(tiles.ROWS,),
        outputs=[one, one.update(dtype=jnp.float32)],
        num_warps=8,
        TILES=count,
        PADDED=triton.next_power_of_2(count),
        ROW=row,
        TILE=tile,
        PART=part,
    )
    return token, logit
