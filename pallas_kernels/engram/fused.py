"""Launches the kernels around an Engram layer's product; the results of reference.py.

Knows: shapes and the sizes of tiles. Does not know: the arithmetic, or the product.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.engram import kernels
from pallas_kernels.engram.reference import TABLE_GROUP, Memory
from pallas_kernels.engram.specs import EngramSpec
from pallas_kernels.hyper_connections.fused import parts_constants
from pallas_kernels.hyper_connections.reference import Output

_MERGE_WARPS = 8
_TURN_COLUMNS = 1024


def lookup(spec: EngramSpec, memory: Memory, ring: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """`reference.lookup` in one launch: float16 [rows, C * W].

    It depends on token ids alone, so it and the product behind it may come anywhere earlier in the step.
    """
    block = min(spec.block or TABLE_GROUP, spec.head_dim)
    if spec.head_dim % block or memory.payload.shape[1] != spec.head_dim:
        raise ValueError(
            f"table rows are {memory.payload.shape[1]} wide, expected {spec.head_dim}, a multiple of {block}"
        )
    packed = memory.scale is not None
    operands = [
        memory.payload, memory.scale if packed else memory.payload, memory.token_map,
        jax.lax.bitcast_convert_type(memory.multipliers, jnp.int32), memory.primes, memory.offsets, ring,
        start.reshape(1),
    ]  # fmt: skip
    return launch.call(
        kernels.lookup,
        *operands,
        grid=(spec.columns, rows),
        outputs=[jax.ShapeDtypeStruct((rows, spec.columns * spec.head_dim), jnp.float16)],
        num_warps=1,
        N=ring.shape[0],
        NGRAMS=spec.ngrams,
        HEADS=spec.heads,
        WIDTH=spec.head_dim,
        C=spec.columns,
        PAD=spec.pad,
        PACKED=packed,
        ROUND=bool(spec.block),
        B=block,
        BFLOAT=spec.type == jnp.bfloat16,
    )[0]


def merge(
    spec: EngramSpec,
    streams: jax.Array,
    partials: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    coefficients: jax.Array | None = None,
    output: Output | None = None,
) -> jax.Array:
    """`reference.merge` in one launch: new streams [R, S, D] in a new array.

    With `output`, the output of the sublayer before is spread first, by `coefficients`, as a boundary would
    (hyper_connections/reference.py); the boundary behind then takes the streams as they are.
    """
    rows, parts, width = streams.shape[0], partials.shape[0], spec.width
    if streams.shape[1:] != (spec.streams, width) or partials.shape[2] != (spec.streams + 1) * width:
        raise ValueError(
            f"streams are {streams.shape} and the product {partials.shape}, expected {spec.streams} streams of "
            f"{width} and {(spec.streams + 1) * width} columns"
        )
    given = [streams, streams, streams]
    if output is not None:
        experts = output.experts is not None
        given = [
            output.experts if experts else output.partials,
            output.count.reshape(1) if experts else streams,
            coefficients,
        ]
    return launch.call(
        kernels.merge,
        *given,
        streams,
        partials,
        q_weight,
        k_weight,
        grid=(spec.streams, rows),
        outputs=[jax.ShapeDtypeStruct(streams.shape, spec.type)],
        num_warps=_MERGE_WARPS,
        R=rows,
        D=width,
        S=spec.streams,
        TURN=min(_TURN_COLUMNS, width & -width),
        P=parts,
        EPS=spec.eps,
        **parts_constants(output),
    )[0]
