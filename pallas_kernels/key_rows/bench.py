"""The cache writes of one layer as cases to check and to time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_case, tuning
from pallas_kernels.bench_case import (
    EXACT,
    ROUNDED,
    ROUNDED_FP4,
    SUMS,
    OperationCase,
    normal,
    nudged,
    random_fp8,
)
from pallas_kernels.dense.specs import PRODUCTS, ProductSpec
from pallas_kernels.key_rows import reference, specs
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import FP4_GROUPS, PoolSpec, RowSpec
from pallas_kernels.rows import Columns, turn_table

ROWS, RING, SPLITS, CALLS = 8, 136, 4, 6
BESIDE = 64  # columns of another product in front of each
# Halves of the query product's first turn that its programs hold while they wait; warps; tiles that they walk over.
TILES = tuple({"each": each} for each in (1, 2, 4, 5)) + (
    {"held": 0},
    {"held": 1},
    {"warps": 4},
    {"warps": 8},
)
FREQUENCIES = 160000.0 ** -(np.arange(0, 64, 2) / 64)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer's caches behind `length` positions; a pool of entries or none; `latent` columns of the query latent."""

    model: str
    spec: RowSpec
    pool: PoolSpec | None
    latent: int
    length: int
    live: int = ROWS

    def __str__(self) -> str:
        if self.pool is None:
            return f"{self.model} cache rows, window alone"
        closing = len(self.closed)
        return f"{self.model} cache rows, ratio {self.pool.ratio}, {closing} of {self.pool.closing(ROWS)} entries"

    @property
    def keyed_by_entries(self) -> bool:
        """Whether index keys are made of entries."""
        return self.pool is not None and self.pool.index_width > 0 and not self.pool.hadamard

    @property
    def product(self) -> ProductSpec:
        """The query product of such a layer."""
        indexed = " index" if self.pool is not None and self.pool.index_width or self.model == "demo" else ""
        return PRODUCTS[f"{self.model} wq_b{indexed}"]

    @property
    def closed(self) -> np.ndarray:
        """Numbers of the entries that the live rows complete."""
        last = (self.length + self.live) // self.pool.ratio
        return np.arange(self.length // self.pool.ratio, last)


KINDS = (
    Kind("v4-flash", specs.V4_FLASH, None, 1024, 5001),
    Kind("v4-flash", specs.V4_FLASH, specs.V4_RATIO_4, 1024, 5001),
    Kind("v4-flash", specs.V4_FLASH, specs.V4_RATIO_128, 1024, 5000),
    Kind("v4-flash", specs.V4_FLASH, specs.V4_RATIO_128, 1024, 5115),
    Kind("v4.1-flash", specs.V41_FLASH, None, 1280, 5001),
    Kind("v4.1-flash", specs.V41_FLASH, specs.V41_RATIO_2, 1280, 5001),
    Kind("v4.1-flash", specs.V41_FLASH, specs.V41_RATIO_1, 1280, 5001, live=7),
    Kind("demo", specs.DEMO, None, 128, 501),
    Kind("demo", specs.DEMO, specs.DEMO_RATIO_2, 128, 501),
    Kind("demo", specs.DEMO, specs.DEMO_RATIO_1, 128, 501, live=7),
)


def cases() -> tuple[OperationCase, ...]:
    """Every kind of layer, where entries close and where none does; and the rows of a drafter's block.

    Writes stand alone for a window, as drafters commit, and where index keys are made of entries.
    """
    joined = [kind for kind in KINDS if not kind.keyed_by_entries]
    return (
        *(_case(kind) for kind in KINDS if kind.pool is None or kind.keyed_by_entries),
        *(_query_case(kind) for kind in joined),
        *(_block_case(kind) for kind in joined if kind.pool is None),
    )


def _random_layer(kind: Kind):
    """Rows, caches, compressor and index of a layer."""
    spec, pool, seeds = kind.spec, kind.pool, iter(range(1000))

    def some(*shape, dtype=spec.type):
        return normal(next(seeds), *shape, dtype=dtype)

    def product(width):
        parts = normal(next(seeds), SPLITS, ROWS, BESIDE + width, scale=SPLITS**-0.5)
        return Columns(parts, BESIDE, width)

    def turns(positions):
        return turn_table(positions, FREQUENCIES[: spec.rope // 2])

    rows = Rows(
        product(spec.width), some(spec.width), turns(kind.length + jnp.arange(ROWS)), product(kind.latent),
        some(kind.latent),
    )  # fmt: skip
    caches = dict(window=some(RING, spec.width))
    if pool is None:
        return rows, Caches(**caches), None, None
    halves, closing = 2 if pool.overlap else 1, pool.closing(ROWS)
    slots, entries = halves * pool.ratio + ROWS, kind.length // pool.ratio + closing + 1
    turned = turns((kind.length // pool.ratio + jnp.arange(closing)) * pool.ratio)

    def compressor(width):
        gate = product(halves * width) if pool.ratio > 1 else None
        bias = some(pool.ratio, halves * width, dtype=jnp.float32) if pool.ratio >= 4 else None
        return Compressor(product(halves * width), gate, bias, some(width), turned)

    index = None
    caches["entries"] = some(entries, spec.width)
    if pool.ratio > 1:
        caches["pending"] = some(slots, 2, halves * spec.width, dtype=jnp.float32)
    if pool.index_width:
        caches["index_keys"] = some(entries, pool.index_width)
        if pool.hadamard:
            caches["index_pending"] = some(slots, 2, halves * pool.index_width, dtype=jnp.float32)
            index = compressor(pool.index_width)
        else:
            projection, weight = some(pool.index_width, spec.width), some(pool.index_width)
            index = LatentIndex(projection, weight, turned)
    return rows, Caches(**caches), compressor(spec.width), index


def _written(kind: Kind, name: str, cache) -> np.ndarray:
    """Slots of a cache that the pass writes."""
    if name in ("entries", "index_keys"):
        return kind.closed
    return (kind.length + np.arange(kind.live)) % cache.shape[0]


def _outputs(kind: Kind, before: Caches, after: Caches) -> dict[str, jax.Array]:
    """What was written, and how many numbers changed beside it."""
    made = {}
    for name, cache in vars(after).items():
        if cache is None:
            continue
        slots = _written(kind, name, cache)
        made[name] = cache[slots]
        changed = (cache != getattr(before, name)).reshape(cache.shape[0], -1).sum(1, dtype=jnp.int32)
        made[f"{name} beside"] = changed.at[slots].set(0)
    return made


def _tolerances(kind: Kind) -> dict[str, float]:
    if not kind.spec.quantise:
        rounded = entries = index = SUMS
    else:
        rounded, index = ROUNDED, ROUNDED_FP4
        entries = ROUNDED_FP4 if kind.pool and kind.pool.rounding == FP4_GROUPS else ROUNDED
    written = {
        "window": rounded, "entries": entries, "index_keys": index, "pending": SUMS, "index_pending": SUMS
    }  # fmt: skip
    return written | {f"{name} beside": EXACT for name in written} | {"latent": rounded}


def _case(kind: Kind) -> OperationCase:
    spec, pool = kind.spec, kind.pool
    length, live = jnp.int32(kind.length), jnp.int32(kind.live)

    def fused(shared, _):
        from pallas_kernels.key_rows import fused as launches

        rows, before, compressor, index = shared
        after, latent = launches.write(rows, before, length, live, spec, pool, compressor, index)
        rows = dataclasses.replace(rows, weight=nudged(rows.weight, latent[0, 0]))
        made = _outputs(kind, before, after) | {"latent": latent[: kind.live]}
        return made, (rows, after, compressor, index)

    def definition(shared, _):
        rows, before, compressor, index = shared
        after, latent = reference.write(rows, before, length, live, spec, pool, compressor, index)
        return _outputs(kind, before, after) | {"latent": latent[: kind.live]}

    return OperationCase(
        "key_rows", str(kind), ("cache_writes",), _bytes(kind), CALLS,
        lambda calls: (_random_layer(kind), [None] * calls), fused, definition, _tolerances(kind),
        interpreted=kind.model == "demo",
    )  # fmt: skip


def _queries(kind: Kind, parts: jax.Array) -> dict[str, jax.Array]:
    return {"queries": parts.sum(0)[: kind.live]}


def _query_operands(kind: Kind, calls: int):
    from pallas_kernels import device_barrier
    from pallas_kernels.key_rows import fused as launches

    product = kind.product
    matrices = [random_fp8(seed, product.matrix(), product.block) for seed in range(calls)]
    return (_random_layer(kind), device_barrier.counters(launches.COUNTER_LINES)), matrices


def _query_settings(kind: Kind) -> dict:
    """What both cases with a query product have in common."""
    size = kind.product.matrix().bytes
    return dict(
        operation="key_rows", kernels=("cache_writes_and_queries",), bytes=size + _bytes(kind),
        choices={tuning.by_shape(kind.product.rows, kind.product.columns): TILES},
        calls=bench_case.calls_for(size), operands=lambda calls: _query_operands(kind, calls),
        tolerances=_tolerances(kind) | {"queries": ROUNDED if kind.spec.quantise else SUMS, "counters": EXACT},
    )  # fmt: skip


def _query_case(kind: Kind) -> OperationCase:
    """Cache writes and the query product in one launch."""
    spec, pool = kind.spec, kind.pool
    length, live = jnp.int32(kind.length), jnp.int32(kind.live)

    def named(before, after, queries, counters):
        return _outputs(kind, before, after) | _queries(kind, queries) | {"counters": counters}

    def fused(shared, matrix):
        from pallas_kernels.key_rows import fused as launches

        (rows, before, compressor, index), counters = shared
        after, queries, counters = launches.write_and_query(
            rows, before, length, live, spec, matrix, counters, pool, compressor, index,
            scale_block=kind.product.block,
        )  # fmt: skip
        rows = dataclasses.replace(rows, weight=nudged(rows.weight, queries[0, 0, 0]))
        return named(before, after, queries, counters), ((rows, after, compressor, index), counters)

    def definition(shared, matrix):
        (rows, before, compressor, index), counters = shared
        made = reference.write_and_query(rows, before, length, live, spec, matrix, pool, compressor, index)
        return named(before, *made, counters)

    return OperationCase(
        name=f"{kind} and queries", fused=fused, reference=definition, **_query_settings(kind)
    )


def _block_case(kind: Kind) -> OperationCase:
    """Rows that enter no cache, of a layer without a pool, and their queries."""
    spec = kind.spec

    def named(made, queries, counters):
        return {"window": made} | _queries(kind, queries) | {"counters": counters}

    def fused(shared, matrix):
        from pallas_kernels.key_rows import fused as launches

        (rows, *rest), counters = shared
        made, queries, counters = launches.block_rows_and_query(
            rows, spec, matrix, counters, scale_block=kind.product.block
        )
        rows = dataclasses.replace(rows, weight=nudged(rows.weight, queries[0, 0, 0]))
        return named(made, queries, counters), ((rows, *rest), counters)

    def definition(shared, matrix):
        (rows, *_), counters = shared
        return named(*reference.block_rows_and_query(rows, spec, matrix), counters)

    return OperationCase(
        name=f"{kind.model} rows and queries of a drafter's block", fused=fused, reference=definition,
        **_query_settings(kind),
    )  # fmt: skip


def _bytes(kind: Kind) -> int:
    """Columns of the products that the pass reads, and what closing entries pool."""
    pool, columns, pooled = kind.pool, kind.spec.width + kind.latent, 0
    if pool is not None:
        halves, index = 2 if pool.overlap else 1, pool.index_width if pool.hadamard else 0
        width = halves * (kind.spec.width + index)
        columns += width * (2 if pool.ratio > 1 else 1)
        pooled = len(kind.closed) * pool.ratio * 2 * width if pool.ratio > 1 else 0
        if pool.index_width and not pool.hadamard:
            pooled += pool.index_width * kind.spec.width * kind.spec.type.itemsize // 4
    return 4 * (SPLITS * ROWS * columns + pooled)
