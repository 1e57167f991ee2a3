"""Launches the fused router, alone or behind the boundary in front of it; the results of reference.py.

Knows: shapes, the sizes of tiles, and which buffers are updated in place. Does not know: the arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import launch, tuning
from pallas_kernels.experts.reference import Routes
from pallas_kernels.hyper_connections import fused as boundaries
from pallas_kernels.hyper_connections.reference import Boundary, Output, Projection
from pallas_kernels.hyper_connections.specs import BoundarySpec
from pallas_kernels.router import kernels
from pallas_kernels.router.reference import Gate
from pallas_kernels.router.specs import RouterSpec

COUNTER_LINES = 3
ROWS = 8  # the expert launches take no more
EXPERTS = 16  # of one gate program
_MOST_CHOSEN = 8


class Tile(NamedTuple):
    """How a launch is cut.

    Attributes:
      gates: the most gate programs. warps: of every program. columns: most of a column program, 4 or 8 for each warp.
    """

    gates: int = 132
    warps: int = 8
    columns: int = 64


ALONE, JOINED = Tile(), Tile(gates=64)


def _array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layout(spec: RouterSpec, gates: int) -> dict[str, int]:
    """The kernel's tile constants: BE experts by BK columns a gate program."""
    tiles = -(-spec.experts // EXPERTS)
    widths = [width for width in (64, 128, 256, 512, 1024) if spec.width % width == 0]
    if not widths:
        raise ValueError(f"width is {spec.width}, expected a multiple of 64")
    few = [width for width in widths if tiles * (spec.width // width) <= gates]
    return dict(BE=EXPERTS, BK=few[0] if few else widths[-1])


def constants(spec: RouterSpec, gate: Gate, gates: int) -> dict:
    """The kernel constants that follow from the model."""
    if gate.weight.shape != (spec.experts, spec.width):
        raise ValueError(f"the gate is {gate.weight.shape}, expected {(spec.experts, spec.width)}")
    if spec.chosen > _MOST_CHOSEN:
        raise ValueError(f"{spec.chosen} experts a row, expected at most {_MOST_CHOSEN}")
    return dict(
        E=spec.experts, K=spec.chosen, HASHED=gate.table is not None, SCALING=spec.scaling, SUM_EPS=spec.sum_eps,
        **layout(spec, gates),
    )  # fmt: skip


def gate_programs(spec: RouterSpec, gates: int) -> int:
    """Programs that share the gate's product."""
    tiles = layout(spec, gates)
    return -(-spec.experts // tiles["BE"]) * (spec.width // tiles["BK"])


def _operands(gate: Gate, tokens: jax.Array | None, count: jax.Array) -> list[jax.Array]:
    """What the gate reads; the weight stands where a variant reads nothing."""
    given = [gate.weight if part is None else part for part in (gate.bias, gate.table, tokens)]
    return [gate.weight, *given, count.reshape(1)]


def _outputs(spec: RouterSpec, rows: int, counters: jax.Array, gates: int) -> list[jax.ShapeDtypeStruct]:
    """expert_ids, count, weight, slot, ids, partial logits, counters."""
    entries = rows * spec.chosen
    return [
        _array(entries, dtype=jnp.int32),
        _array(1, dtype=jnp.int32),
        _array(entries, rows),
        _array(entries, rows, dtype=jnp.int32),
        _array(rows, spec.chosen, dtype=jnp.int32),
        _array(spec.width // layout(spec, gates)["BK"], rows, spec.experts),
        _array(*counters.shape, dtype=jnp.int32),
    ]


def route(
    spec: RouterSpec,
    x: jax.Array,
    gate: Gate,
    count: jax.Array,
    counters: jax.Array,
    tokens: jax.Array | None = None,
    *,
    tile: Tile = ALONE,
) -> tuple[Routes, jax.Array, jax.Array]:
    """`reference.route` of x [8, D] (float32 or bfloat16) in one launch: entries, ids, and the next counters.

    Args:
      count: int32 [], live rows. tokens: int32 [R], for hash routing.
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
    """
    rows = x.shape[0]
    if x.shape != (ROWS, spec.width):
        raise ValueError(f"x is {x.shape}, expected {(ROWS, spec.width)}")
    operands = [x, *_operands(gate, tokens, count), counters]
    *routes, ids, _, counters = launch.call(
        kernels.route,
        *operands,
        grid=(gate_programs(spec, tile.gates),),
        outputs=_outputs(spec, rows, counters, tile.gates),
        aliases={len(operands) - 1: 6},
        num_warps=tile.warps,
        R=rows,
        D=spec.width,
        **constants(spec, gate, tile.gates),
    )
    return Routes(*routes), ids, counters


def boundary_and_route(
    spec: BoundarySpec,
    router: RouterSpec,
    streams: jax.Array,
    norm: jax.Array,
    projection: Projection,
    gate: Gate,
    count: jax.Array,
    counters: jax.Array,
    coefficients: jax.Array,
    output: Output,
    tokens: jax.Array | None = None,
    *,
    tile: Tile | None = None,
) -> tuple[Boundary, Routes, jax.Array, jax.Array]:
    """The boundary in front of a mixture of experts and its router in one launch.

    Arguments as in `hyper_connections.fused.boundary` and `route`; streams are updated in place.
    """
    rows = streams.shape[0]
    if rows != ROWS:
        raise ValueError(f"{rows} rows, expected {ROWS}")
    name = tuning.by_shape(router.experts, router.width)
    tile = tile or JOINED._replace(**tuning.choice("router", name, {}))
    parts, _, *given = boundaries.operands(streams, norm, projection, coefficients, output, counters)[0]
    fixed = boundaries.constants(spec, rows, projection, tile.columns, tile.warps)
    fixed |= boundaries.parts_constants(output)
    programs, dtype, width = spec.width // fixed["BD"], spec.type, spec.width
    operands = [parts, *given[:-1], *_operands(gate, tokens, count), counters]
    made = launch.call(
        kernels.boundary_and_route,
        *operands,
        grid=(programs + rows * (fixed["SHARES"] + 1) + gate_programs(router, tile.gates),),
        outputs=[
            _array(rows, spec.streams, width, dtype=dtype),
            _array(rows, spec.mixes),
            _array(*((rows, width) if spec.delayed else (1, 1)), dtype=dtype),
            _array(rows, width, dtype=dtype),
            _array(rows, width, dtype=jnp.float16),
            _array(1, 1, dtype=dtype),
            boundaries.sums(fixed),
            *_outputs(router, rows, counters, tile.gates),
        ],
        aliases={len(given) - 1: 0, len(operands) - 1: 13},
        num_warps=tile.warps,
        **fixed,
        **constants(router, gate, tile.gates),
    )
    streams, own, _, x, rounded, _, _, *routes, ids, _, counters = made
    return Boundary(streams, own, None, x, rounded, None), Routes(*routes), ids, counters
