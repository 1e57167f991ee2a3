"""Launches the fused boundary; the same calls and results as reference.py.

Knows: shapes, the sizes of tiles, and which buffers are updated in place. Does not know: the arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import launch, tiles
from pallas_kernels.hyper_connections import kernels
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.hyper_connections.specs import BoundarySpec

COUNTER_LINES = 1
SHARES = 4  # programs of one row, where its blocks divide so


class Tile(NamedTuple):
    """How a launch is cut: most columns of a column program (4 or 8 for each warp), and warps of every program."""

    columns: int = 32
    warps: int = 4


TILE = Tile()


def _array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _power_of_two_in(number: int) -> int:
    return number & -number


def layout(spec: BoundarySpec, mixes: int, columns: int, warps: int) -> dict[str, int]:
    """The kernel's tile constants.

    BD columns a column program, one or two a thread; W words of a partial sum; SHARES of a row, each in turns of NB
    blocks of B columns.
    """
    block = min(spec.block or 32, spec.width)
    fitting = [
        own for own in (8 * warps, 4 * warps) if own <= max(columns, 4 * warps) and spec.width % own == 0
    ]
    if spec.width % block or not fitting:
        raise ValueError(
            f"width is {spec.width}, expected a multiple of {4 * warps} columns and of blocks of {block}"
        )
    shares = next(shares for shares in (SHARES, 2, 1) if spec.width % (shares * block) == 0)
    turn = _power_of_two_in(spec.width // shares)
    width = max(16, 1 << mixes.bit_length())
    return dict(BD=fitting[0], W=width, B=block, NB=turn // block, SHARES=shares)


def constants(spec: BoundarySpec, rows: int, projection: Projection | None, columns: int, warps: int) -> dict:
    """The kernel constants that follow from the model and from how a launch is cut; `rows` must be 8."""
    if rows != tiles.ROWS:
        raise ValueError(f"{rows} rows, expected {tiles.ROWS}")
    mixes = 0 if projection is None else projection.fn.shape[0]
    return dict(
        R=rows, D=spec.width, S=spec.streams, MIXES=mixes, DELAYED=spec.delayed, ROUND=bool(spec.block),
        NORM_EPS=spec.norm_eps, MIX_EPS=spec.mix_eps, ITERATIONS=spec.iterations,
        WARPS=warps, **layout(spec, mixes, columns, warps),
    )  # fmt: skip


def sums(fixed: dict) -> jax.ShapeDtypeStruct:
    """The scratch array of partial sums."""
    return _array(fixed["D"] // fixed["BD"] * fixed["R"] * (fixed["W"] + 1))


def parts_constants(output: Output | None) -> dict:
    """How many parts the output before has, and whether they are experts'."""
    if output is None:
        return dict(PARTS=0, EXPERTS=False)
    if output.experts is not None:
        return dict(PARTS=output.experts.shape[1], EXPERTS=True)
    return dict(PARTS=output.partials.shape[0], EXPERTS=False)


def operands(
    source: jax.Array | tuple[jax.Array, jax.Array],
    norm: jax.Array,
    projection: Projection | None,
    coefficients: jax.Array | None,
    output: Output | None,
    counters: jax.Array,
) -> tuple[list[jax.Array], bool]:
    """The kernel's operands up to `counters_in`, and whether the streams come from the embedding.

    An operand that a variant never reads is some array that is at hand anyway, but none that is updated in place: for
    a second reader XLA would copy it.
    """
    embed = isinstance(source, tuple)
    table, tokens = source if embed else (norm, norm)
    parts = [norm, norm]
    if output is not None:
        parts = [output.partials, norm]
        if output.experts is not None:
            parts = [output.experts, output.count.reshape(1)]
    given = norm if coefficients is None else coefficients
    mix = [norm] * 3 if projection is None else [projection.fn, projection.base, projection.scale]
    streams = norm if embed else source
    return [*parts, given, table, tokens, *mix, norm, streams, counters], embed


def boundary(
    spec: BoundarySpec,
    source: jax.Array | tuple[jax.Array, jax.Array],
    norm: jax.Array,
    projection: Projection | None,
    counters: jax.Array,
    coefficients: jax.Array | None = None,
    output: Output | None = None,
    *,
    last: bool = False,
    tap: bool = False,
    tile: Tile = TILE,
) -> tuple[Boundary, jax.Array]:
    """One boundary in one launch: the result of `reference.boundary`, and the counters for the next kernel.

    Args:
      source: streams [8, S, D] in the model's type, updated in place; or (table [V, D], tokens int32 [8]) in front of
        the first layer.
      norm: weight [D]. projection, coefficients, output, last, tap: as in reference.py.
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
    """
    given, embed = operands(source, norm, projection, coefficients, output, counters)
    rows = source[1].shape[0] if embed else source.shape[0]
    fixed = constants(spec, rows, projection, *tile) | parts_constants(output)
    if not embed and source.shape != (rows, spec.streams, spec.width):
        raise ValueError(f"streams are {source.shape}, expected {(rows, spec.streams, spec.width)}")
    programs, width, dtype = spec.width // fixed["BD"], spec.width, spec.type
    wants_hidden = spec.delayed or last
    streams, own, hidden, x, rounded, mean, _, counters = launch.call(
        kernels.boundary,
        *given,
        grid=(programs + rows * fixed["SHARES"] + (0 if last else rows),),
        outputs=[
            _array(rows, spec.streams, width, dtype=dtype),
            _array(*((1, 1) if last else (rows, spec.mixes))),
            _array(*((rows, width) if wants_hidden else (1, 1)), dtype=dtype),
            _array(rows, width, dtype=dtype),
            _array(rows, width, dtype=jnp.float16),
            _array(*((rows, width) if tap else (1, 1)), dtype=dtype),
            sums(fixed),
            _array(*counters.shape, dtype=jnp.int32),
        ],
        aliases={len(given) - 1: 7} if embed else {len(given) - 2: 0, len(given) - 1: 7},
        num_warps=tile.warps,
        EMBED=embed,
        LAST=last,
        TAP=tap,
        **fixed,
    )
    result = Boundary(
        streams, None if last else own, hidden if last else None, x, rounded, mean if tap else None
    )
    return result, counters
