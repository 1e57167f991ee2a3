"""The cache writes as Triton launches, alone or with the query product behind them; `reference` defines them.

Knows: shapes, and how many programs and warps a launch gets. Does not know: the bodies (`kernels`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import device_barrier, launch, tiles, tuning
from pallas_kernels.dense import fused as dense
from pallas_kernels.key_rows import kernels, specs
from pallas_kernels.key_rows.pooling import POOL_ITEMS
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import PoolSpec, RowSpec
from pallas_kernels.rows import Columns
from pallas_kernels.tiles import PackedMatrix

WARPS, LATENT_WARPS = 4, 8  # the latter where a program makes index keys of latents, or pools long groups
SHARE = 32  # columns that a program pools where others pool the rest
HELD = 2  # halves of the query product's first turn that its programs hold in registers while they wait
COUNTER_LINES = 2


class _Writes(NamedTuple):
    """A launch of cache writes: operands of the kernel, outputs, {operand: output} updated in place, and the rest."""

    operands: list
    outputs: list[jax.ShapeDtypeStruct]
    aliases: dict[int, int]
    programs: int
    constants: dict


def block_rows_and_query(
    rows: Rows, spec: RowSpec, matrix: PackedMatrix, counters: jax.Array, *, scale_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.block_rows_and_query` in one launch, the product in parts [S, R, N], and the next counters.

    Further arguments as in `write_and_query`.
    """
    shape = jax.ShapeDtypeStruct((rows.kv.rows, spec.width), spec.type)
    nowhere = jnp.zeros((), jnp.int32)
    caches, queries, counters = _write_and_query(
        rows, Caches(window=shape), nowhere, nowhere, spec, None, None, None, matrix, counters, scale_block
    )
    return caches.window, queries, counters


def write(
    rows: Rows,
    caches: Caches,
    length: jax.Array,
    count: jax.Array,
    spec: RowSpec,
    pool: PoolSpec | None = None,
    compressor: Compressor | None = None,
    index: Compressor | LatentIndex | None = None,
) -> tuple[Caches, jax.Array | None]:
    """`reference.write` in one launch; the caches are written in place where the caller gives them away."""
    _require_caches(rows, caches, spec, pool, compressor)
    return _write(rows, caches, length, count, spec, pool, compressor, index)


def write_and_query(
    rows: Rows,
    caches: Caches,
    length: jax.Array,
    count: jax.Array,
    spec: RowSpec,
    matrix: PackedMatrix,
    counters: jax.Array,
    pool: PoolSpec | None = None,
    compressor: Compressor | None = None,
    index: Compressor | LatentIndex | None = None,
    *,
    scale_block: int,
) -> tuple[Caches, jax.Array, jax.Array]:
    """`reference.write_and_query` in one launch: caches, the product in parts [S, R, N], and the next counters.

    Index keys made from entries need more registers than a product's programs may have: two launches then.

    Args: as in `write`, with the query latent, and
      matrix: packed [N, latent]. scale_block: the block of its scales, 128 or 32.
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
    """
    _require_caches(rows, caches, spec, pool, compressor)
    given = (rows, caches, length, count, spec, pool, compressor, index)
    if isinstance(index, LatentIndex):
        caches, latent = _write(*given)
        return caches, dense.product(latent, matrix, scale_block=scale_block), counters
    return _write_and_query(*given, matrix, counters, scale_block)


def _require_caches(rows: Rows, caches: Caches, spec: RowSpec, pool: PoolSpec | None, compressor) -> None:
    """Raises ValueError where caches have other types or fewer slots than a pass needs."""
    for name, cache in vars(caches).items():
        expected = jnp.float32 if name.endswith("pending") else spec.type
        if cache is not None and cache.dtype != expected:
            raise ValueError(f"{name} is {cache.dtype}, expected {jnp.dtype(expected)}")
    if compressor is not None and caches.pending is not None:
        needed = (2 if pool.overlap else 1) * pool.ratio + rows.kv.rows - 1
        if caches.pending.shape[0] < needed:
            raise ValueError(f"a pending ring of {caches.pending.shape[0]} slots, expected at least {needed}")
        if caches.index_pending is not None and caches.index_pending.shape[0] != caches.pending.shape[0]:
            raise ValueError(
                f"pending rings of {caches.pending.shape[0]} and {caches.index_pending.shape[0]} slots, "
                "expected one size"
            )


def _writes(rows: Rows, caches: Caches, length, count, spec: RowSpec, pool, compressor, index) -> _Writes:
    """What every launch of cache writes has. A window given as a shape alone is a fresh output."""
    number = rows.kv.rows

    def given(array):
        return length if array is None else array  # no program reads what stands for an absent operand

    def product(columns: Columns | None):
        return (length, (0, 0, 0)) if columns is None else (columns.partials, columns.layout)

    pool = pool or PoolSpec(1, False, specs.FP8_BLOCKS)
    owned = isinstance(index, Compressor)
    (kv, kv_layout), (latent, latent_layout) = product(rows.kv), product(rows.latent)
    (value, value_layout), (gate, gate_layout) = (
        product(getattr(compressor, name, None)) for name in ("value", "gate")
    )
    (index_value, index_value_layout), (index_gate, index_gate_layout) = (
        product(getattr(index, name, None)) for name in ("value", "gate")
    )

    operands = [
        *(kv, rows.weight, rows.table, latent, given(rows.latent_weight)),
        *(value, gate, *(given(getattr(compressor, name, None)) for name in ("bias", "weight", "table"))),
        *(index_value, index_gate, given(getattr(index, "bias", None))),
        *(given(getattr(index, name, None)) for name in ("projection", "weight", "table")),
        *(length, count),
    ]
    outputs, aliases = [], {}
    empty = jax.ShapeDtypeStruct((1,), jnp.int32)
    for cache in vars(caches).values():
        if isinstance(cache, jax.ShapeDtypeStruct):
            outputs.append(cache)
            operands.append(length)
            continue
        if cache is not None:
            aliases[len(operands)] = len(outputs)
        outputs.append(empty if cache is None else jax.ShapeDtypeStruct(cache.shape, cache.dtype))
        operands.append(given(cache))
    latent_width = rows.latent.width if rows.latent is not None else 0
    outputs.append(jax.ShapeDtypeStruct((number, latent_width), spec.latent_type) if latent_width else empty)
    entries = pool.closing(number) if compressor is not None else 0
    constants = dict(
        R=number,
        RING_SLOTS=0 if isinstance(caches.window, jax.ShapeDtypeStruct) else caches.window.shape[0],
        KV=kv_layout,
        LATENT=latent_layout,
        VALUE=value_layout,
        GATE=gate_layout,
        INDEX_VALUE=index_value_layout,
        INDEX_GATE=index_gate_layout,
        WIDTH=spec.width,
        ROPE=spec.rope,
        EPS=spec.norm_eps,
        QUANTISE=spec.quantise,
        ROUNDED=spec.rounded,
        BLOCK=spec.block,
        N=triton.next_power_of_2(spec.width),
        LATENT_WIDTH=latent_width,
        LATENT_BLOCK=min(spec.latent_block, latent_width),
        LATENT_N=triton.next_power_of_2(max(latent_width, 1)),
        RATIO=pool.ratio,
        OVERLAP=pool.overlap,
        BIASED=getattr(compressor, "bias", None) is not None,
        FP4=pool.rounding == specs.FP4_GROUPS,
        PENDING_SLOTS=1 if caches.pending is None else caches.pending.shape[0],
        ENTRIES=entries,
        INDEX="none" if index is None else "compressor" if owned else "latent",
        INDEX_WIDTH=max(pool.index_width, 1),
        INDEX_ROPE=pool.index_rope,
        HADAMARD=pool.hadamard,
    )
    # Rows and latents, then those that write a row's value or gate.
    programs = number * (1 + bool(latent_width))
    programs += 2 * number * (bool(compressor is not None and pool.ratio > 1) + owned)
    return _Writes(operands, outputs, aliases, programs, constants)


def _write(rows: Rows, caches: Caches, *rest) -> tuple[Caches, jax.Array | None]:
    """The launch of cache writes alone."""
    pool, index = rest[3], rest[5]
    own = _writes(rows, caches, *rest)
    many = isinstance(index, LatentIndex) or pool is not None and pool.ratio > POOL_ITEMS.value
    *written, latent = launch.call(
        kernels.cache_writes,
        *own.operands,
        grid=(own.programs + own.constants["ENTRIES"] * (1 + (index is not None)),),
        outputs=own.outputs,
        aliases=own.aliases,
        num_warps=LATENT_WARPS if many else WARPS,
        **own.constants,
    )
    return _kept(caches, written), None if rows.latent is None else latent


def _write_and_query(
    rows: Rows, caches: Caches, length, count, spec: RowSpec, pool, compressor, index, matrix: PackedMatrix, counters,
    scale_block: int,
) -> tuple[Caches, jax.Array, jax.Array]:  # fmt: skip
    """The launch of cache writes and the product of the query latents."""
    own = _writes(rows, caches, length, count, spec, pool, compressor, index)
    latent = own.outputs[-1]
    name = tuning.by_shape(matrix.words.shape[0] * tiles.TILE, latent.shape[1])
    tile = tuning.choice("key_rows", name, {"held": HELD, "warps": None, "each": 1})
    product = dense.fp8_settings(latent, matrix, scale_block, warps=tile["warps"])
    grid, terms = product.pop("grid"), product["TERMS"]
    each = dense.tiles_each(product, product["TILES"], tile["each"])
    entries, padded = own.constants["ENTRIES"], own.constants["N"]
    pooled = pool is not None and pool.ratio > 1
    shares = max(1, padded // SHARE) if pooled else 1
    index_shares = max(1, pool.index_width // SHARE) if index is not None else 1
    if (
        counters.shape[0] < COUNTER_LINES * device_barrier.LINE_WORDS
        or 2 * entries > device_barrier.LINE_WORDS
    ):
        raise ValueError(
            f"{counters.shape[0]} counters and {entries} entries, expected {COUNTER_LINES} lines of "
            f"{device_barrier.LINE_WORDS} and at most {device_barrier.LINE_WORDS // 2} entries"
        )
    writes = own.programs + entries * (shares + index_shares * (index is not None))
    means = entries * (padded + max(pool.index_width, 1)) if entries else 1
    *written, _, queries, _, counters = launch.call(
        kernels.cache_writes_and_queries,
        *own.operands,
        *matrix,
        counters,
        grid=(writes + grid[0] // each,),
        outputs=[
            *own.outputs[:-1],
            jax.ShapeDtypeStruct((terms, *latent.shape), jnp.float16 if terms > 1 else latent.dtype),
            dense.partial(product["SPLITS"], product["TILES"]),
            jax.ShapeDtypeStruct((means,), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ],
        aliases=own.aliases | {len(own.operands) + 2: len(own.outputs) + 2},
        **own.constants,
        **product,
        SHARES=shares,
        INDEX_SHARES=index_shares,
        HELD=tile["held"],
        EACH=each,
        WRITES=writes,
    )
    return _kept(caches, written), queries, counters


def _kept(caches: Caches, written: list[jax.Array]) -> Caches:
    """The written arrays in the places of caches that a layer has."""
    pairs = zip(vars(caches).items(), written, strict=True)
    return Caches(**{name: None if cache is None else array for (name, cache), array in pairs})
