"""What a pass of R rows writes into one layer's caches, in plain jax.numpy.

Knows: key-value rows (norm, rotation, rounding), pooling of closing groups into entries, index keys, and the
normed and rounded query latent that comes out of the same products. Does not know: who reads the caches.

    window         ring of rows, position p in slot p % capacity           kv -> norm -> turn -> round
    pending        ring of (value, gate + bias) per position, float32
    entries        entry j pools positions j * ratio .. (j + 1) * ratio - 1 (overlap: and the group before)
    index_pending  the same ring for an index compressor of its own
    index_keys     beside the entries

Only the first `count` rows, at positions length .. length + count - 1, are stored, and only entries whose group
they complete. Source: DeepSeek inference/model.py (`Compressor`, `Indexer` and the cache updates of `MLA`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.dense import reference as dense
from pallas_kernels.key_rows.specs import ENTRY_GROUP, FP4_GROUPS, INDEX_BLOCK, PoolSpec, RowSpec
from pallas_kernels.rows import Columns, rms_norm, turn
from pallas_kernels.tiles import PackedMatrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What every pass has: the key-value product, its norm's weight [d], and turns [R, 2, rope / 2] of the rows.

    `latent`, with its norm's weight, is the query latent's product where the caller wants it finished.
    """

    kv: Columns
    weight: jax.Array
    table: jax.Array
    latent: Columns | None = None
    latent_weight: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressor:
    """Products value and gate (ratio 1: no gate), bias [ratio, C] or None, norm weight [d].

    `table` [E, 2, rope / 2] turns the entries that may close, the first of which is entry length // ratio; entry j
    turns by position j * ratio.
    """

    value: Columns
    gate: Columns | None
    bias: jax.Array | None
    weight: jax.Array
    table: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentIndex:
    """Index keys made from the normed entry before its rotation: projection [di, d], norm weight [di], turns."""

    projection: jax.Array
    weight: jax.Array
    table: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """One layer's caches: window [C, d], and where the layer owns entries the others (see the module)."""

    window: jax.Array
    pending: jax.Array | None = None
    entries: jax.Array | None = None
    index_pending: jax.Array | None = None
    index_keys: jax.Array | None = None


def round_row(x: jax.Array, spec: RowSpec) -> jax.Array:
    """Rows [..., d] with their leading columns rounded to E4M3."""
    return jnp.concatenate(
        [formats.fp8_round_trip(x[..., : spec.rounded], spec.block), x[..., spec.rounded :]], axis=-1
    )


def window_rows(rows: Rows, spec: RowSpec) -> jax.Array:
    """Finished key-value rows [R, d] in the model's type."""
    x = turn(rms_norm(rows.kv.summed().astype(spec.type), rows.weight, spec.norm_eps), rows.table)
    return round_row(x, spec) if spec.quantise else x


def query_latent(rows: Rows, spec: RowSpec) -> jax.Array:
    """The normed query latent [R, L] as the next products read it (`RowSpec.latent_type`)."""
    x = rms_norm(rows.latent.summed().astype(spec.type), rows.latent_weight, spec.norm_eps)
    if spec.quantise:
        x = formats.fp8_round_trip(x, min(spec.latent_block, x.shape[-1]))
    return x.astype(spec.latent_type)


def block_rows(rows: Rows, spec: RowSpec) -> tuple[jax.Array, jax.Array | None]:
    """Key-value rows [R, d] of a drafter's block, which enter no ring, and the query latent if it is asked for."""
    return window_rows(rows, spec), None if rows.latent is None else query_latent(rows, spec)


def block_rows_and_query(rows: Rows, spec: RowSpec, matrix: PackedMatrix) -> tuple[jax.Array, jax.Array]:
    """`block_rows`, and in place of the query latent its product with a packed matrix [N, L]: float32 [1, R, N]."""
    made, latent = block_rows(rows, spec)
    return made, dense.product(latent, matrix)


def write_ring(ring: jax.Array, rows: jax.Array, length: jax.Array, count: jax.Array) -> jax.Array:
    """rows[:count] stored at positions length, length + 1, ..."""
    slots = (length + jnp.arange(rows.shape[0])) % ring.shape[0]
    slots = jnp.where(jnp.arange(rows.shape[0]) < count, slots, ring.shape[0])
    return ring.at[slots].set(rows.astype(ring.dtype), mode="drop")


def write_entries(
    cache: jax.Array, new: jax.Array, length: jax.Array, count: jax.Array, ratio: int
) -> jax.Array:
    """new[i] stored as entry length // ratio + i if the live rows complete it."""
    index = length // ratio + jnp.arange(new.shape[0])
    index = jnp.where((index + 1) * ratio <= length + count, index, cache.shape[0])
    return cache.at[index].set(new.astype(cache.dtype), mode="drop")


def pooled(
    compressor: Compressor, ring: jax.Array | None, length: jax.Array, count: jax.Array, pool: PoolSpec
):
    """Gate-weighted means float32 [E, d] of the groups that may close, and the ring with the live rows in it."""
    value = compressor.value.summed()
    if pool.ratio == 1:
        return value, None
    positions = length + jnp.arange(value.shape[0])
    gate = compressor.gate.summed()
    if compressor.bias is not None:
        gate = gate + compressor.bias[positions % pool.ratio]
    ring = write_ring(ring, jnp.stack([value, gate], axis=1), length, count)
    width = value.shape[1] // (2 if pool.overlap else 1)
    index = length // pool.ratio + jnp.arange(pool.closing(value.shape[0]))
    members = index[:, None] * pool.ratio + jnp.arange(pool.ratio)
    items = ring[members % ring.shape[0]][..., -width:]
    if pool.overlap:
        before = ring[(members - pool.ratio) % ring.shape[0]][..., :width]
        missing = jnp.asarray([0.0, -jnp.inf])[:, None]
        before = jnp.where((members >= pool.ratio)[..., None, None], before, missing)
        items = jnp.concatenate([before, items], axis=1)
    return jnp.sum(jax.nn.softmax(items[:, :, 1], axis=1) * items[:, :, 0], axis=1), ring


def round_index(x: jax.Array, pool: PoolSpec, spec: RowSpec) -> jax.Array:
    """Index vectors [..., di] in their rounded basis; unchanged where nothing is rounded."""
    if not spec.quantise:
        return x
    return formats.fp4_index_round_trip(formats.hadamard_transform(x) if pool.hadamard else x, INDEX_BLOCK)


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
    """The caches after a pass of R rows, and the query latent if `rows` has its product.

    Args: length, count int32 []; pool and compressor for layers that own entries; index for those that own index
    keys: a compressor of its own, or a projection of the entry.
    """
    latent = None if rows.latent is None else query_latent(rows, spec)
    made = dict(window=write_ring(caches.window, window_rows(rows, spec), length, count))
    if compressor is not None:
        mean, ring = pooled(compressor, caches.pending, length, count, pool)
        if ring is not None:
            made["pending"] = ring
        normed = rms_norm(mean.astype(spec.type), compressor.weight, spec.norm_eps)
        entry = turn(normed, compressor.table)
        if spec.quantise and pool.rounding == FP4_GROUPS:
            entry = formats.fp4_entry_round_trip(entry, ENTRY_GROUP)
        elif spec.quantise:
            entry = round_row(entry, spec)
        made["entries"] = write_entries(caches.entries, entry, length, count, pool.ratio)
    if isinstance(index, Compressor):
        mean, made["index_pending"] = pooled(index, caches.index_pending, length, count, pool)
        key = rms_norm(mean.astype(spec.type), index.weight, spec.norm_eps)
    elif index is not None:
        precision = jax.lax.Precision.HIGHEST if spec.type == jnp.float32 else None
        key = jnp.einsum(
            "ek,nk->en", normed, index.projection.astype(spec.type),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        key = rms_norm(key.astype(spec.type), index.weight, spec.norm_eps)
    if index is not None:
        key = round_index(turn(key, index.table), pool, spec)
        made["index_keys"] = write_entries(caches.index_keys, key, length, count, pool.ratio)
    return dataclasses.replace(caches, **made), latent


def write_and_query(
    rows: Rows,
    caches: Caches,
    length: jax.Array,
    count: jax.Array,
    spec: RowSpec,
    matrix: PackedMatrix,
    pool: PoolSpec | None = None,
    compressor: Compressor | None = None,
    index: Compressor | LatentIndex | None = None,
) -> tuple[Caches, jax.Array]:
    """`write`, and in place of the query latent its product with a packed matrix [N, L]: float32 [1, R, N]."""
    caches, latent = write(rows, caches, length, count, spec, pool, compressor, index)
    return caches, dense.product(latent, matrix)
