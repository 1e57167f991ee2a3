"""The dense products as Triton launches; `reference` defines them.

Knows: shapes, and how many warps and shares of the columns a product gets. Does not know: the bodies (`kernels`).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import launch, tiles
from pallas_kernels.dense import kernels
from pallas_kernels.dense.packing import bfloat_terms, half_terms
from pallas_kernels.tiles import PackedMatrix

# Programs that keep an H200 busy without a second, half-empty wave; from the shapes measured there.
MOST_PROGRAMS = 704
MANY_TILES = 96  # from here on eight warps a program did better than four


def shares(tiles: int, chunks: int, warps: int, programs: int = MOST_PROGRAMS) -> int:
    """Into how many shares the columns go: up to `programs` programs, each warp with a chunk at least.

    `chunks` are the pieces a warp takes at a time; shares that divide them evenly are preferred.
    """
    most = max(1, min(chunks // warps, programs // tiles))
    even = [s for s in range(1, most + 1) if chunks % (s * warps) == 0]
    return max(even, default=most)


def _warps(tiles: int, chunks: int) -> int:
    return 8 if tiles >= MANY_TILES and chunks % 8 == 0 else 4


def product(
    x: jax.Array,
    matrix: PackedMatrix,
    *,
    scale_block: int,
    groups: int = 1,
    splits: int | None = None,
    warps: int | None = None,
    fenced: bool = False,
) -> jax.Array:
    """`reference.product` as partial sums float32 [S, R, N] over S shares of the columns.

    `scale_block` is the block of the weight scales, 128 or 32. bf16 x is read as fp16. `splits` chooses S, `warps`
    how many (4 or 8) share a tile, and `fenced` whether a warp's weight loads are kept together.
    """
    terms, settings = _fp8_launch(x, matrix, scale_block, groups, splits, warps)
    outputs = [partial(settings["SPLITS"], settings["TILES"])]
    return launch.call(kernels.fp8_product, terms, *matrix, outputs=outputs, FENCED=fenced, **settings)[0]


def _fp8_launch(
    x: jax.Array,
    matrix: PackedMatrix,
    scale_block: int,
    groups: int,
    splits: int | None = None,
    warps: int | None = None,
) -> tuple[jax.Array, dict]:
    """The rows in terms, and what `fp8_settings` says of them."""
    settings = fp8_settings(x, matrix, scale_block, groups, splits, warps)
    return half_terms(x), settings | dict(GROUPS=groups)


def fp8_settings(
    x: jax.Array | jax.ShapeDtypeStruct,
    matrix: PackedMatrix,
    scale_block: int,
    groups: int = 1,
    splits: int | None = None,
    warps: int | None = None,
) -> dict:
    """The grid, warps and constants that every launch over one FP8 matrix has; x is the rows or their shape."""
    columns = x.shape[1] // groups
    count, chunks = require_packed(x, matrix, columns, groups)
    warps = warps or _warps(count, chunks)
    splits = splits or shares(count, chunks, warps)
    return dict(
        grid=(count * splits,), num_warps=warps, BLOCKS=columns // tiles.BLOCK, TILES=count, SPLITS=splits,
        SCALED=scale_block, BFLOAT=x.dtype == jnp.bfloat16, TERMS=2 if x.dtype == jnp.float32 else 1, WARPS=warps,
    )  # fmt: skip


def tiles_each(product: dict, together: int, wanted: int) -> int:
    """Tiles of a program: `wanted` ones where `kernels.walking_fp8_program` can do a product of these settings, else 1.

    `together`: tiles that a program's must divide, for it may not leave their rows or their rounding block.
    """
    one_turn = product["BLOCKS"] == tiles.CHUNK // tiles.BLOCK * product["SPLITS"] * product["WARPS"]
    return wanted if one_turn and together % wanted == 0 else 1


def exact_product(x: jax.Array, weight: jax.Array, *, splits: int | None = None) -> jax.Array:
    """`reference.exact_product` as partial sums float32 [S, R, N] over S shares of the columns."""
    count = require_plain(x, weight)
    warps = 4
    splits = splits or shares(count, weight.shape[1] // 64, warps)
    terms = bfloat_terms(x)
    return launch.call(
        kernels.bf16_product,
        terms,
        weight,
        grid=(count * splits,),
        outputs=[partial(splits, count)],
        num_warps=warps,
        COLUMNS=weight.shape[1],
        TILES=count,
        SPLITS=splits,
        TERMS=terms.shape[0],
        WARPS=warps,
    )[0]


def partial(splits: int, count: int) -> jax.ShapeDtypeStruct:
    """Partial sums of `count` tiles over `splits` shares of the columns."""
    return jax.ShapeDtypeStruct((splits, tiles.ROWS, count * tiles.TILE), jnp.float32)


def require_packed(x: jax.Array, matrix: PackedMatrix, columns: int, groups: int) -> tuple[int, int]:
    """Tiles and chunks of a packed FP8 matrix, checked against its input."""
    chunks = tiles.padded(columns, tiles.CHUNK) // tiles.CHUNK
    if x.shape[0] != tiles.ROWS or x.shape[1] % (groups * tiles.BLOCK):
        raise ValueError(
            f"activations have shape {x.shape}, expected ({tiles.ROWS}, {groups} x a multiple of 32)"
        )
    if matrix.words.ndim != 5 or matrix.words.shape[1] != 2 * chunks or matrix.words.shape[0] % groups:
        raise ValueError(
            f"packed words have shape {matrix.words.shape}, expected (tiles, {2 * chunks}, 4, 32, 4) for rows of "
            f"{columns} columns in {groups} groups"
        )
    return matrix.words.shape[0], chunks


def require_plain(x: jax.Array, weight: jax.Array) -> int:
    """Tiles of a BF16 weight, checked against its input."""
    n, k = weight.shape
    if weight.dtype != jnp.bfloat16 or n % tiles.TILE or k % 64 or x.shape != (tiles.ROWS, k):
        raise ValueError(
            f"weight is {weight.dtype} {weight.shape} for rows {x.shape}, expected bfloat16 rows in multiples of 32 "
            f"with {tiles.ROWS} activation rows and the same columns, a multiple of 64 (join_bf16)"
        )
    return n // tiles.TILE
