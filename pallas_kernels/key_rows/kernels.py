"""One layer's cache writes fused: each program takes one row, one ring row, one entry or one index key.

Knows: how the work is shared among programs. Does not know: the meaning (`reference`).

    programs   [ rows R ][ latents R ][ pending R ][ entries E ][ index pending R ][ index keys E ]
                 always    if asked     ratio > 1    with a compressor  own compressor   with an index

No program reads what another writes: a group's older members come from the ring, its members in this pass from
the products themselves, and the ring is long enough that the two never share a slot.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import launch
from pallas_kernels.device_tiles import (
    cast,
    fp4_entry_round_trip,
    fp4_index_round_trip,
    fp8_round_trip,
    prefetch,
    rounded,
    row_inverse_rms,
    turn_factors,
    turned,
)
from pallas_kernels.key_rows import specs
from pallas_kernels.key_rows.pooling import (
    POOL_ITEMS,
    hadamard_times_row,
    matrix_times_row,
    pooled,
    product_row,
)
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import PoolSpec, RowSpec
from pallas_kernels.rows import Columns

WARPS, LATENT_WARPS = 4, 8  # the latter where a program makes index keys of latents, or pools long groups
ENTRY_GROUP = tl.constexpr(specs.ENTRY_GROUP)
INDEX_BLOCK = tl.constexpr(specs.INDEX_BLOCK)


@triton.jit
def norm_weight(pointer, WIDTH: tl.constexpr, N: tl.constexpr):
    """A norm's weight [1, N], float32. Loaded before the row is made: the wait for both is one wait."""
    column = tl.arange(0, N)[None, :]
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def normed(x, weight, dtype: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Row x [1, N], kept in `dtype`, normed and weighted, as kept in `dtype`."""
    return rounded(x * row_inverse_rms(x, WIDTH, EPS) * weight, dtype)


@triton.jit
def rounded_row(x, FP4: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """Row x [1, N] as caches keep it: FP4 groups throughout, or FP8 blocks in the first ROUNDED columns."""
    if FP4:
        return fp4_entry_round_trip(x, ENTRY_GROUP, 1, N)
    else:
        return tl.where(tl.arange(0, N)[None, :] < ROUNDED, fp8_round_trip(x, BLOCK, 1, N), x)


@triton.jit
def window_row(kv_ptr, weight_ptr, table_ptr, out_ptr, row, slot, stored, KV: tl.constexpr, R: tl.constexpr,
               WIDTH: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr, QUANTISE: tl.constexpr,
               ROUNDED: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One finished key-value row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = norm_weight(weight_ptr, WIDTH, N)
    cosine, sine = turn_factors(table_ptr, row, WIDTH, ROPE, N)
    x = normed(product_row(kv_ptr, row, dtype, KV, R, WIDTH, N), weight, dtype, WIDTH, EPS)
    x = rounded(turned(x, cosine[None, :], sine[None, :], 1, N), dtype)
    if QUANTISE:
        x = rounded_row(x, False, ROUNDED, BLOCK, N)
    column = tl.arange(0, N)[None, :]
    tl.store(out_ptr + slot * WIDTH + column, cast(x, dtype), mask=(column < WIDTH) & stored)


@triton.jit
def latent_row(latent_ptr, weight_ptr, out_ptr, row, dtype: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr,
               WIDTH: tl.constexpr, EPS: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
               N: tl.constexpr):  # fmt: skip
    """One normed query latent, rounded as the products that read it expect."""
    weight = norm_weight(weight_ptr, WIDTH, N)
    x = normed(product_row(latent_ptr, row, dtype, LATENT, R, WIDTH, N), weight, dtype, WIDTH, EPS)
    if QUANTISE:
        x = fp8_round_trip(x, BLOCK, 1, N)
    column = tl.arange(0, N)[None, :]
    tl.store(out_ptr + row * WIDTH + column, cast(x, out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def pending_row(value_ptr, gate_ptr, bias_ptr, ring_ptr, row, position, stored, VALUE: tl.constexpr,
                GATE: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr,
                RING: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One row's value and biased gate, WIDTH columns each, into the ring."""
    dtype: tl.constexpr = tl.float32
    column = tl.arange(0, N)[None, :]
    inside = column < WIDTH
    value = product_row(value_ptr, row, dtype, VALUE, R, WIDTH, N)
    gate = product_row(gate_ptr, row, dtype, GATE, R, WIDTH, N)
    if BIASED:
        gate += tl.load(bias_ptr + (position % RATIO) * WIDTH + column, mask=inside, other=0.0)
    place = ring_ptr + (position % RING) * (2 * WIDTH) + column
    tl.store(place, value, mask=inside & stored)
    tl.store(place + WIDTH, gate, mask=inside & stored)


@triton.jit
def store_index_key(key, weight, cosine, sine, out_ptr, entry, WIDTH: tl.constexpr, EPS: tl.constexpr,
                    QUANTISE: tl.constexpr, HADAMARD: tl.constexpr):  # fmt: skip
    """Norms, rotates and rounds an index key [1, WIDTH], kept in the caches' type so far, and stores it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    key = normed(key, weight, dtype, WIDTH, EPS)
    key = rounded(turned(key, cosine[None, :], sine[None, :], 1, WIDTH), dtype)
    if QUANTISE and HADAMARD:
        key = rounded(hadamard_times_row(key, WIDTH) * WIDTH**-0.5, dtype)
    if QUANTISE:
        key = fp4_index_round_trip(key, INDEX_BLOCK, 1, WIDTH)
    tl.store(out_ptr + entry * WIDTH + tl.arange(0, WIDTH)[None, :], cast(key, dtype))


@triton.jit
def cache_writes(
    kv_ptr, kv_weight_ptr, table_ptr, latent_ptr, latent_weight_ptr,
    value_ptr, gate_ptr, bias_ptr, entry_weight_ptr, entry_table_ptr,
    index_value_ptr, index_gate_ptr, index_bias_ptr, projection_ptr, index_weight_ptr, index_table_ptr,
    length_ptr, count_ptr, window_in, pending_in, entries_in, index_pending_in, index_keys_in,
    window_ptr, pending_ptr, entries_ptr, index_pending_ptr, index_keys_ptr, latent_out_ptr,
    R: tl.constexpr, RING_SLOTS: tl.constexpr, KV: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr,
    GATE: tl.constexpr, INDEX_VALUE: tl.constexpr, INDEX_GATE: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, EPS: tl.constexpr, QUANTISE: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, LATENT_WIDTH: tl.constexpr, LATENT_BLOCK: tl.constexpr, LATENT_N: tl.constexpr,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, BIASED: tl.constexpr, FP4: tl.constexpr,
    PENDING_SLOTS: tl.constexpr, ENTRY_PROGRAMS: tl.constexpr, INDEX: tl.constexpr, INDEX_WIDTH: tl.constexpr,
    INDEX_ROPE: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Grid: the programs of the module's drawing. RING_SLOTS 0 stores row r at r, whether it is live or not."""
    dtype: tl.constexpr = window_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if OVERLAP else 1
    LATENTS: tl.constexpr = R if LATENT[0] else 0
    RINGS: tl.constexpr = R if ENTRY_PROGRAMS and RATIO > 1 else 0
    INDEX_RINGS: tl.constexpr = R if INDEX == "compressor" else 0
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    program = tl.program_id(0)

    if program < R:
        if RING_SLOTS:
            slot = (length + program) % RING_SLOTS
            stored = program < count
        else:
            slot = program
            stored = program < R
        window_row(kv_ptr, kv_weight_ptr, table_ptr, window_ptr, program, slot, stored, KV, R, WIDTH, ROPE, EPS,
                   QUANTISE, ROUNDED, BLOCK, N)  # fmt: skip

    if LATENTS:
        row = program - R
        if (row >= 0) & (row < LATENTS):
            latent_row(latent_ptr, latent_weight_ptr, latent_out_ptr, row, dtype, LATENT, R, LATENT_WIDTH, EPS,
                       QUANTISE, LATENT_BLOCK, LATENT_N)  # fmt: skip

    if RINGS:
        row = program - (R + LATENTS)
        if (row >= 0) & (row < RINGS):
            pending_row(value_ptr, gate_ptr, bias_ptr, pending_ptr, row, length + row, row < count, VALUE, GATE,
                        BIASED, R, RATIO, PENDING_SLOTS, WIDTH * HALVES, N * HALVES)  # fmt: skip

    if ENTRY_PROGRAMS:
        number = program - (R + LATENTS + RINGS)
        entry = length // RATIO + number
        closes = (entry + 1) * RATIO <= length + count
        if (number >= 0) & (number < ENTRY_PROGRAMS) & closes:
            weight = norm_weight(entry_weight_ptr, WIDTH, N)
            cosine, sine = turn_factors(entry_table_ptr, number, WIDTH, ROPE, N)
            x = pooled(value_ptr, gate_ptr, bias_ptr, pending_in, entry, length, VALUE, GATE, BIASED, R, RATIO,
                       OVERLAP, PENDING_SLOTS, WIDTH, N)  # fmt: skip
            x = normed(rounded(x, dtype), weight, dtype, WIDTH, EPS)
            x = rounded(turned(x, cosine[None, :], sine[None, :], 1, N), dtype)
            if QUANTISE:
                x = rounded_row(x, FP4, ROUNDED, BLOCK, N)
            column = tl.arange(0, N)[None, :]
            tl.store(entries_ptr + entry * WIDTH + column, cast(x, dtype), mask=column < WIDTH)

    if INDEX_RINGS:
        row = program - (R + LATENTS + RINGS + ENTRY_PROGRAMS)
        if (row >= 0) & (row < INDEX_RINGS):
            pending_row(index_value_ptr, index_gate_ptr, index_bias_ptr, index_pending_ptr, row, length + row,
                        row < count, INDEX_VALUE, INDEX_GATE, BIASED, R, RATIO, PENDING_SLOTS,
                        INDEX_WIDTH * HALVES, INDEX_WIDTH * HALVES)  # fmt: skip

    if INDEX != "none":
        number = program - (R + LATENTS + RINGS + ENTRY_PROGRAMS + INDEX_RINGS)
        entry = length // RATIO + number
        closes = (entry + 1) * RATIO <= length + count
        if (number >= 0) & closes:
            index_weight = norm_weight(index_weight_ptr, INDEX_WIDTH, INDEX_WIDTH)
            cosine, sine = turn_factors(index_table_ptr, number, INDEX_WIDTH, INDEX_ROPE, INDEX_WIDTH)
            if INDEX == "compressor":
                key = pooled(index_value_ptr, index_gate_ptr, index_bias_ptr, index_pending_in, entry, length,
                             INDEX_VALUE, INDEX_GATE, BIASED, R, RATIO, OVERLAP, PENDING_SLOTS, INDEX_WIDTH,
                             INDEX_WIDTH)  # fmt: skip
            else:
                ELEMENTS: tl.constexpr = 1024 // projection_ptr.dtype.element_ty.primitive_bitwidth
                line = tl.minimum(
                    tl.arange(0, INDEX_WIDTH * N // ELEMENTS) * ELEMENTS, INDEX_WIDTH * WIDTH - 1
                )
                prefetch(projection_ptr + line)  # 128 bytes each, while the entry is made
                weight = norm_weight(entry_weight_ptr, WIDTH, N)
                x = pooled(value_ptr, gate_ptr, bias_ptr, pending_in, entry, length, VALUE, GATE, BIASED, R,
                           RATIO, OVERLAP, PENDING_SLOTS, WIDTH, N)  # fmt: skip
                x = normed(rounded(x, dtype), weight, dtype, WIDTH, EPS)
                key = matrix_times_row(projection_ptr, x, INDEX_WIDTH, WIDTH, N)
            store_index_key(rounded(key, dtype), index_weight, cosine, sine, index_keys_ptr, entry, INDEX_WIDTH,
                            EPS, QUANTISE, HADAMARD)  # fmt: skip


def block_rows(rows: Rows, spec: RowSpec) -> tuple[jax.Array, jax.Array | None]:
    """`reference.block_rows` in one launch."""
    shape = jax.ShapeDtypeStruct((rows.kv.rows, spec.width), spec.type)
    nowhere = jnp.zeros((), jnp.int32)
    caches, latent = _launch(rows, Caches(window=shape), nowhere, nowhere, spec, None, None, None)
    return caches.window, latent


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
    return _launch(rows, caches, length, count, spec, pool, compressor, index)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _launch(rows: Rows, caches: Caches, length, count, spec: RowSpec, pool, compressor, index):
    """The launch behind both. A window given as a shape alone is a fresh output."""
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
    programs = number * (1 + bool(latent_width) + bool(compressor is not None and pool.ratio > 1) + owned)
    programs += entries * (1 + (index is not None))
    made = launch.call(
        cache_writes,
        *operands,
        grid=(programs,),
        outputs=outputs,
        aliases=aliases,
        num_warps=LATENT_WARPS if isinstance(index, LatentIndex) or pool.ratio > POOL_ITEMS.value else WARPS,
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
        N=_power_of_two(spec.width),
        LATENT_WIDTH=latent_width,
        LATENT_BLOCK=min(spec.latent_block, latent_width),
        LATENT_N=_power_of_two(max(latent_width, 1)),
        RATIO=pool.ratio,
        OVERLAP=pool.overlap,
        BIASED=getattr(compressor, "bias", None) is not None,
        FP4=pool.rounding == specs.FP4_GROUPS,
        PENDING_SLOTS=1 if caches.pending is None else caches.pending.shape[0],
        ENTRY_PROGRAMS=entries,
        INDEX="none" if index is None else "compressor" if owned else "latent",
        INDEX_WIDTH=max(pool.index_width, 1),
        INDEX_ROPE=pool.index_rope,
        HADAMARD=pool.hadamard,
    )
    *written, latent_out = made
    kept = {
        name: None if cache is None else array
        for (name, cache), array in zip(vars(caches).items(), written, strict=True)
    }
    return Caches(**kept), latent_out if latent_width else None
