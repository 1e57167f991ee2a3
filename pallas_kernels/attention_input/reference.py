"""What the way into attention means, in plain jax.numpy: a boundary, then products of its rows.

Knows: which rows each product reads. Does not know: what the products are for.

    boundary --rounded--> FP8 product
             --x-------> BF16 product, where there is one

The parts are defined in hyper_connections/reference.py and dense/reference.py.
"""

import jax

from pallas_kernels.dense import reference as dense
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.hyper_connections.specs import BoundarySpec
from pallas_kernels.tiles import PackedMatrix


def boundary_and_products(
    spec: BoundarySpec,
    streams: jax.Array,
    norm: jax.Array,
    projection: Projection,
    matrix: PackedMatrix,
    weight: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    output: Output | None = None,
    *,
    tap: bool = False,
) -> tuple[Boundary, jax.Array, jax.Array | None]:
    """A boundary that is not the last, and products float32 [1, R, N] of its rounded and of its exact rows.

    Args: of `boundary`, and
      matrix: packed FP8, read by the rounded rows.
      weight: bfloat16 [N, D], read by the exact rows, or None.
    """
    made = boundaries.boundary(spec, streams, norm, projection, coefficients, output, tap=tap)
    exact = None if weight is None else dense.exact_product(made.x, weight)
    return made, dense.product(made.rounded, matrix), exact
