"""One layer's cache writes fused: each program takes one row, one ring row, one entry or one index key.

Knows: how the work is shared among programs. Does not know: the meaning (`reference`), or how a launch is made
(`fused`).

    programs   [ latents R ][ rows R ][ pending 2 R ][ entries E ][ index pending 2 R ][ index keys E ][ queries ]
                 if asked     always    ratio > 1      with a compressor  own compressor   with an index   if asked

The queries' programs multiply the latents. They have weights under way while they wait for the latents' programs, and
all the others write their caches beside them: nothing of the small programs' time is left to see. As every program of
a launch gets the registers of the greediest, entries and index keys are pooled by several programs there, a part of
the columns each.

No program reads what another writes: a group's older members come from the ring, its members in this pass from
the products themselves, and the ring is long enough that the two never share a slot.
"""

import triton
import triton.language as tl

from pallas_kernels.dense.kernels import waiting_fp8_program, walking_fp8_program
from pallas_kernels.device_barrier import LINE, arrive, is_last
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
    hadamard_times_row,
    matrix_times_row,
    pooled,
    product_row,
)

ENTRY_GROUP = tl.constexpr(specs.ENTRY_GROUP)
INDEX_BLOCK = tl.constexpr(specs.INDEX_BLOCK)
LATCH = tl.constexpr(
    0
)  # line of the latch between query latents and their product; tickets are the next line's words


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
               TERMS: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One normed query latent, rounded as the products that read it expect; with two TERMS as `half_terms` of it."""
    weight = norm_weight(weight_ptr, WIDTH, N)
    x = normed(product_row(latent_ptr, row, dtype, LATENT, R, WIDTH, N), weight, dtype, WIDTH, EPS)
    if QUANTISE:
        x = fp8_round_trip(x, BLOCK, 1, N)
    column = tl.arange(0, N)[None, :]
    place = out_ptr + row * WIDTH + column
    if TERMS == 2:
        upper = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        tl.store(place + R * WIDTH, (x - upper).to(tl.float16), mask=column < WIDTH)
        tl.store(place, upper.to(tl.float16), mask=column < WIDTH)
    else:
        tl.store(place, cast(x, out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def pending_row(value_ptr, gate_ptr, bias_ptr, ring_ptr, program, length, count, VALUE: tl.constexpr,
                GATE: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr,
                RING: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One row's value (programs 0 .. R - 1) or biased gate (R .. 2 R - 1), WIDTH columns, into the ring."""
    row = program % R
    position = length + row
    column = tl.arange(0, N)[None, :]
    inside = column < WIDTH
    place = ring_ptr + (position % RING) * (2 * WIDTH) + column
    stored = inside & (row < count)
    if program < R:
        tl.store(place, product_row(value_ptr, row, tl.float32, VALUE, R, WIDTH, N), mask=stored)
    else:
        gate = product_row(gate_ptr, row, tl.float32, GATE, R, WIDTH, N)
        if BIASED:
            gate += tl.load(bias_ptr + (position % RATIO) * WIDTH + column, mask=inside, other=0.0)
        tl.store(place + WIDTH, gate, mask=stored)


@triton.jit
def store_entry(x, weight_ptr, table_ptr, out_ptr, number, entry, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                EPS: tl.constexpr, QUANTISE: tl.constexpr, FP4: tl.constexpr, ROUNDED: tl.constexpr,
                BLOCK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Norms, rotates and rounds a pooled entry x [1, N], and stores it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = norm_weight(weight_ptr, WIDTH, N)
    cosine, sine = turn_factors(table_ptr, number, WIDTH, ROPE, N)
    x = normed(rounded(x, dtype), weight, dtype, WIDTH, EPS)
    x = rounded(turned(x, cosine[None, :], sine[None, :], 1, N), dtype)
    if QUANTISE:
        x = rounded_row(x, FP4, ROUNDED, BLOCK, N)
    column = tl.arange(0, N)[None, :]
    tl.store(out_ptr + entry * WIDTH + column, cast(x, dtype), mask=column < WIDTH)


@triton.jit
def whole_row(part, rows_ptr, number, share, tickets, SHARES: tl.constexpr, N: tl.constexpr):
    """Puts share `share` of row `number` [1, N / SHARES] beside the others: whether it is the last."""
    COLUMNS: tl.constexpr = N // SHARES
    column = share * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(rows_ptr + number * N + column, part)
    return is_last(tickets + number, 0, SHARES)


@triton.jit
def store_index_key(key, weight_ptr, table_ptr, out_ptr, number, entry, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                    EPS: tl.constexpr, QUANTISE: tl.constexpr, HADAMARD: tl.constexpr):  # fmt: skip
    """Norms, rotates and rounds an index key [1, WIDTH], and stores it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = norm_weight(weight_ptr, WIDTH, WIDTH)
    cosine, sine = turn_factors(table_ptr, number, WIDTH, ROPE, WIDTH)
    key = rounded(key, dtype)
    key = normed(key, weight, dtype, WIDTH, EPS)
    key = rounded(turned(key, cosine[None, :], sine[None, :], 1, WIDTH), dtype)
    if QUANTISE and HADAMARD:
        key = rounded(hadamard_times_row(key, WIDTH) * WIDTH**-0.5, dtype)
    if QUANTISE:
        key = fp4_index_round_trip(key, INDEX_BLOCK, 1, WIDTH)
    tl.store(out_ptr + entry * WIDTH + tl.arange(0, WIDTH)[None, :], cast(key, dtype))


@triton.jit
def write_program(
    program,
    kv_ptr, kv_weight_ptr, table_ptr, latent_ptr, latent_weight_ptr,
    value_ptr, gate_ptr, bias_ptr, entry_weight_ptr, entry_table_ptr,
    index_value_ptr, index_gate_ptr, index_bias_ptr, projection_ptr, index_weight_ptr, index_table_ptr,
    length_ptr, count_ptr, pending_in, index_pending_in,
    window_ptr, pending_ptr, entries_ptr, index_pending_ptr, index_keys_ptr, latent_out_ptr, means_ptr, counters,
    R: tl.constexpr, RING_SLOTS: tl.constexpr, KV: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr,
    GATE: tl.constexpr, INDEX_VALUE: tl.constexpr, INDEX_GATE: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, EPS: tl.constexpr, QUANTISE: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, LATENT_WIDTH: tl.constexpr, LATENT_BLOCK: tl.constexpr, LATENT_N: tl.constexpr,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, BIASED: tl.constexpr, FP4: tl.constexpr,
    PENDING_SLOTS: tl.constexpr, ENTRIES: tl.constexpr, INDEX: tl.constexpr, INDEX_WIDTH: tl.constexpr,
    INDEX_ROPE: tl.constexpr, HADAMARD: tl.constexpr, TERMS: tl.constexpr, SHARES: tl.constexpr,
    INDEX_SHARES: tl.constexpr, LATCH: tl.constexpr, TICKETS: tl.constexpr,
):  # fmt: skip
    """One program of the module's drawing. RING_SLOTS 0 stores row r at r, whether it is live or not.

    SHARES and INDEX_SHARES above 1: so many programs pool a part of an entry's or an index key's columns each. They
    leave it in `means` float32, and whoever finishes last (tickets are the words of `counters` from TICKETS on) goes on
    with the whole. Latents arrive at line LATCH unless that is negative.
    """
    dtype: tl.constexpr = window_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if OVERLAP else 1
    LATENTS: tl.constexpr = R if LATENT[0] else 0
    RINGS: tl.constexpr = 2 * R if ENTRIES and RATIO > 1 else 0
    INDEX_RINGS: tl.constexpr = 2 * R if INDEX == "compressor" else 0
    ENTRY_PROGRAMS: tl.constexpr = ENTRIES * SHARES
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)

    if LATENTS:
        if program < LATENTS:
            latent_row(latent_ptr, latent_weight_ptr, latent_out_ptr, program, dtype, LATENT, R, LATENT_WIDTH, EPS,
                       QUANTISE, LATENT_BLOCK, TERMS, LATENT_N)  # fmt: skip
            if LATCH >= 0:
                arrive(counters, LATCH)

    row = program - LATENTS
    if (row >= 0) & (row < R):
        if RING_SLOTS:
            slot = (length + row) % RING_SLOTS
            stored = row < count
        else:
            slot = row
            stored = row < R
        window_row(kv_ptr, kv_weight_ptr, table_ptr, window_ptr, row, slot, stored, KV, R, WIDTH, ROPE, EPS,
                   QUANTISE, ROUNDED, BLOCK, N)  # fmt: skip

    if RINGS:
        ring = program - (LATENTS + R)
        if (ring >= 0) & (ring < RINGS):
            pending_row(value_ptr, gate_ptr, bias_ptr, pending_ptr, ring, length, count, VALUE, GATE, BIASED, R,
                        RATIO, PENDING_SLOTS, WIDTH * HALVES, N * HALVES)  # fmt: skip

    if ENTRIES:
        place = program - (LATENTS + R + RINGS)
        number = place // SHARES
        entry = length // RATIO + number
        closes = (entry + 1) * RATIO <= length + count
        if (place >= 0) & (place < ENTRY_PROGRAMS) & closes:
            x = pooled(value_ptr, gate_ptr, bias_ptr, pending_in, entry, length, place % SHARES, VALUE, GATE, BIASED,
                       R, RATIO, OVERLAP, PENDING_SLOTS, WIDTH, N // SHARES)  # fmt: skip
            if SHARES == 1:
                store_entry(x, entry_weight_ptr, entry_table_ptr, entries_ptr, number, entry, WIDTH, ROPE, EPS,
                            QUANTISE, FP4, ROUNDED, BLOCK, N)  # fmt: skip
            elif whole_row(x, means_ptr, number, place % SHARES, counters + TICKETS, SHARES, N):
                whole = tl.load(means_ptr + number * N + tl.arange(0, N)[None, :], cache_modifier=".cg")
                store_entry(whole, entry_weight_ptr, entry_table_ptr, entries_ptr, number, entry, WIDTH, ROPE, EPS,
                            QUANTISE, FP4, ROUNDED, BLOCK, N)  # fmt: skip

    if INDEX_RINGS:
        ring = program - (LATENTS + R + RINGS + ENTRY_PROGRAMS)
        if (ring >= 0) & (ring < INDEX_RINGS):
            pending_row(index_value_ptr, index_gate_ptr, index_bias_ptr, index_pending_ptr, ring, length, count,
                        INDEX_VALUE, INDEX_GATE, BIASED, R, RATIO, PENDING_SLOTS, INDEX_WIDTH * HALVES,
                        INDEX_WIDTH * HALVES)  # fmt: skip

    if INDEX != "none":
        place = program - (LATENTS + R + RINGS + ENTRY_PROGRAMS + INDEX_RINGS)
        number = place // INDEX_SHARES
        entry = length // RATIO + number
        closes = (entry + 1) * RATIO <= length + count
        if (place >= 0) & (place < ENTRIES * INDEX_SHARES) & closes:
            if INDEX == "compressor":
                key = pooled(index_value_ptr, index_gate_ptr, index_bias_ptr, index_pending_in, entry, length,
                             place % INDEX_SHARES, INDEX_VALUE, INDEX_GATE, BIASED, R, RATIO, OVERLAP, PENDING_SLOTS,
                             INDEX_WIDTH, INDEX_WIDTH // INDEX_SHARES)  # fmt: skip
            else:
                ELEMENTS: tl.constexpr = 1024 // projection_ptr.dtype.element_ty.primitive_bitwidth
                line = tl.minimum(
                    tl.arange(0, INDEX_WIDTH * N // ELEMENTS) * ELEMENTS, INDEX_WIDTH * WIDTH - 1
                )
                prefetch(projection_ptr + line)  # 128 bytes each, while the entry is made
                weight = norm_weight(entry_weight_ptr, WIDTH, N)
                x = pooled(value_ptr, gate_ptr, bias_ptr, pending_in, entry, length, 0, VALUE, GATE, BIASED, R,
                           RATIO, OVERLAP, PENDING_SLOTS, WIDTH, N)  # fmt: skip
                x = normed(rounded(x, dtype), weight, dtype, WIDTH, EPS)
                key = matrix_times_row(projection_ptr, x, INDEX_WIDTH, WIDTH, N)
            if INDEX_SHARES == 1:
                store_index_key(key, index_weight_ptr, index_table_ptr, index_keys_ptr, number, entry, INDEX_WIDTH,
                                INDEX_ROPE, EPS, QUANTISE, HADAMARD)  # fmt: skip
            else:
                keys_ptr = means_ptr + ENTRIES * N
                if whole_row(key, keys_ptr, number, place % INDEX_SHARES, counters + TICKETS + ENTRIES, INDEX_SHARES,
                             INDEX_WIDTH):  # fmt: skip
                    column = tl.arange(0, INDEX_WIDTH)[None, :]
                    whole_key = tl.load(keys_ptr + number * INDEX_WIDTH + column, cache_modifier=".cg")
                    store_index_key(whole_key, index_weight_ptr, index_table_ptr, index_keys_ptr, number, entry,
                                    INDEX_WIDTH, INDEX_ROPE, EPS, QUANTISE, HADAMARD)  # fmt: skip


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
    PENDING_SLOTS: tl.constexpr, ENTRIES: tl.constexpr, INDEX: tl.constexpr, INDEX_WIDTH: tl.constexpr,
    INDEX_ROPE: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Cache writes alone; grid: the programs of the module's drawing, one for each entry and index key."""
    write_program(
        tl.program_id(0), kv_ptr, kv_weight_ptr, table_ptr, latent_ptr, latent_weight_ptr,
        value_ptr, gate_ptr, bias_ptr, entry_weight_ptr, entry_table_ptr,
        index_value_ptr, index_gate_ptr, index_bias_ptr, projection_ptr, index_weight_ptr, index_table_ptr,
        length_ptr, count_ptr, pending_in, index_pending_in,
        window_ptr, pending_ptr, entries_ptr, index_pending_ptr, index_keys_ptr, latent_out_ptr, kv_ptr, length_ptr,
        R, RING_SLOTS, KV, LATENT, VALUE, GATE, INDEX_VALUE, INDEX_GATE, WIDTH, ROPE, EPS, QUANTISE, ROUNDED, BLOCK,
        N, LATENT_WIDTH, LATENT_BLOCK, LATENT_N, RATIO, OVERLAP, BIASED, FP4, PENDING_SLOTS, ENTRIES, INDEX,
        INDEX_WIDTH, INDEX_ROPE, HADAMARD, 1, 1, 1, -1, 0,
    )  # fmt: skip


@triton.jit
def cache_writes_and_queries(
    kv_ptr, kv_weight_ptr, table_ptr, latent_ptr, latent_weight_ptr,
    value_ptr, gate_ptr, bias_ptr, entry_weight_ptr, entry_table_ptr,
    index_value_ptr, index_gate_ptr, index_bias_ptr, projection_ptr, index_weight_ptr, index_table_ptr,
    length_ptr, count_ptr, window_in, pending_in, entries_in, index_pending_in, index_keys_in,
    words_ptr, scales_ptr, counters_in,
    window_ptr, pending_ptr, entries_ptr, index_pending_ptr, index_keys_ptr, latent_out_ptr,
    queries_ptr, means_ptr, counters,
    R: tl.constexpr, RING_SLOTS: tl.constexpr, KV: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr,
    GATE: tl.constexpr, INDEX_VALUE: tl.constexpr, INDEX_GATE: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, EPS: tl.constexpr, QUANTISE: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, LATENT_WIDTH: tl.constexpr, LATENT_BLOCK: tl.constexpr, LATENT_N: tl.constexpr,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, BIASED: tl.constexpr, FP4: tl.constexpr,
    PENDING_SLOTS: tl.constexpr, ENTRIES: tl.constexpr, INDEX: tl.constexpr, INDEX_WIDTH: tl.constexpr,
    INDEX_ROPE: tl.constexpr, HADAMARD: tl.constexpr,
    SHARES: tl.constexpr, INDEX_SHARES: tl.constexpr, WRITES: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, BFLOAT: tl.constexpr, TERMS: tl.constexpr,
    HELD: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """WRITES programs of cache writes and, behind them, TILES / EACH * SPLITS that multiply the query latents."""
    program = tl.program_id(0)
    if program < WRITES:
        write_program(
            program, kv_ptr, kv_weight_ptr, table_ptr, latent_ptr, latent_weight_ptr,
            value_ptr, gate_ptr, bias_ptr, entry_weight_ptr, entry_table_ptr,
            index_value_ptr, index_gate_ptr, index_bias_ptr, projection_ptr, index_weight_ptr, index_table_ptr,
            length_ptr, count_ptr, pending_in, index_pending_in,
            window_ptr, pending_ptr, entries_ptr, index_pending_ptr, index_keys_ptr, latent_out_ptr, means_ptr,
            counters,
            R, RING_SLOTS, KV, LATENT, VALUE, GATE, INDEX_VALUE, INDEX_GATE, WIDTH, ROPE, EPS, QUANTISE, ROUNDED,
            BLOCK, N, LATENT_WIDTH, LATENT_BLOCK, LATENT_N, RATIO, OVERLAP, BIASED, FP4, PENDING_SLOTS, ENTRIES,
            INDEX, INDEX_WIDTH, INDEX_ROPE, HADAMARD, TERMS, SHARES, INDEX_SHARES, LATCH, LINE,
        )  # fmt: skip
    elif EACH > 1:
        walking_fp8_program(
            program - WRITES, latent_out_ptr, words_ptr, scales_ptr, queries_ptr, counters, LATCH, R,
            TILES // EACH * SPLITS, BLOCKS, TILES, 1, SPLITS, SCALED, BFLOAT, TERMS, EACH, WARPS,
        )  # fmt: skip
    else:
        waiting_fp8_program(
            program - WRITES, latent_out_ptr, words_ptr, scales_ptr, queries_ptr, counters, LATCH, R,
            TILES * SPLITS, BLOCKS, TILES, SPLITS, SCALED, BFLOAT, TERMS, HELD, WARPS,
        )  # fmt: skip
