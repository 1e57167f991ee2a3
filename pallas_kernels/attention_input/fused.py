"""Launches the boundary in front of attention with its products; the same results as reference.py.

Knows: shapes, the sizes of tiles, and which buffers are updated in place. Does not know: the arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import launch, tiles, tuning
from pallas_kernels.attention_input import kernels
from pallas_kernels.dense import fused as dense
from pallas_kernels.hyper_connections import fused as boundaries
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.hyper_connections.specs import BoundarySpec
from pallas_kernels.tiles import PackedMatrix

LINES = 8  # of the latch between row programs and product programs
COUNTER_LINES = boundaries.COUNTER_LINES + LINES


class Tile(NamedTuple):
    """How a launch is cut.

    Attributes:
      columns: most of one column program, 4 or 8 for each warp.
      warps: of every program, 4 or 8; narrow matrices have 4.
      programs: the most that share one product.
      held: halves (0, 1 or 2) of its first turn's weights that an FP8 product keeps in registers while it waits; with
        0 the BF16 product keeps none either.
    """

    columns: int = 32
    warps: int = 8
    programs: int = 528
    held: int = 2


TILE = Tile()


def _array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def boundary_and_products(
    spec: BoundarySpec,
    source: jax.Array | tuple[jax.Array, jax.Array],
    norm: jax.Array,
    projection: Projection,
    matrix: PackedMatrix,
    counters: jax.Array,
    weight: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    output: Output | None = None,
    *,
    scale_block: int,
    tap: bool = False,
    tile: Tile | None = None,
) -> tuple[Boundary, jax.Array, jax.Array | None, jax.Array]:
    """`reference.boundary_and_products` in one launch, and the counters for the next kernel.

    Products come as partial sums float32 [S, 8, N] over shares of the columns.

    Args:
      source: streams [8, S, D] in the model's type, updated in place; or (table [V, D], tokens int32 [8]).
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
      scale_block: the block of the weight scales, 128 or 32.
      tile: by default what was measured for these shapes.
      others: as in reference.py.
    """
    sizes = matrix.words.shape[0] * tiles.TILE, 0 if weight is None else weight.shape[0], spec.width
    tile = tile or TILE._replace(**tuning.choice("attention_input", tuning.by_shape(*sizes), {}))
    given, embed = boundaries.operands(source, norm, projection, coefficients, output, counters)
    rows, width, dtype = tiles.ROWS, spec.width, spec.type
    count, chunks = dense.require_packed(_array(rows, width), matrix, width, 1)
    warps = tile.warps if chunks >= tile.warps else 4
    fixed = boundaries.constants(spec, rows, projection, tile.columns, warps)
    fixed |= boundaries.parts_constants(output)
    found, expected = (source[1].shape, (rows,)) if embed else (source.shape, (rows, spec.streams, width))
    if found != expected:
        raise ValueError(f"{'tokens' if embed else 'streams'} are {found}, expected {expected}")
    terms = 3 if dtype == jnp.float32 and weight is not None else 1
    splits = dense.shares(count, chunks, warps, tile.programs)
    plain = plain_splits = 0
    if weight is not None:
        plain = dense.require_plain(_array(rows, width), weight)
        plain_splits = dense.shares(plain, width // 64, warps, tile.programs)
    products = count * splits + plain * plain_splits
    operands = [*given[:-2], *matrix, norm if weight is None else weight, *given[-2:]]
    made = launch.call(
        kernels.boundary_and_products,
        *operands,
        grid=(width // fixed["BD"] + rows * (fixed["SHARES"] + 1) + products,),
        outputs=[
            _array(rows, spec.streams, width, dtype=dtype),
            _array(rows, spec.mixes),
            _array(*((rows, width) if spec.delayed else (1, 1)), dtype=dtype),
            _array(rows, width, dtype=dtype),
            _array(rows, width, dtype=jnp.float16),
            _array(*((rows, width) if tap else (1, 1)), dtype=dtype),
            boundaries.sums(fixed),
            _array(*((terms, rows, width) if terms > 1 else (1, 1)), dtype=jnp.bfloat16),
            dense.partial(splits, count),
            dense.partial(plain_splits, plain) if plain else _array(1, 1),
            _array(*counters.shape, dtype=jnp.int32),
        ],
        aliases={len(operands) - 1: 10} | ({} if embed else {len(operands) - 2: 0}),
        num_warps=warps,
        EMBED=embed,
        TAP=tap,
        LINES=min(LINES, 1 << (products.bit_length() - 1)),  # each has a waiter, who clears it
        TILES=count,
        SPLITS=splits,
        SCALED=scale_block,
        TERMS=terms,
        BF16_TILES=plain,
        BF16_SPLITS=plain_splits,
        HELD=tile.held,
        **fixed,
    )
    streams, own, _, x, rounded, mean, _, _, low, exact, counters = made
    result = Boundary(streams, own, None, x, rounded, mean if tap else None)
    return result, low, None if weight is None else exact, counters
