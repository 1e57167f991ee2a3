"""Device functions behind the cache writes: rows of products, pooling of items into entries, rows times matrices.

Knows: where an entry's items lie, old ones in the ring and new ones in this pass' products. Does not know: what
becomes of an entry, or how work is shared among programs. A tile of items may hold some columns of them only.
"""

import triton
import triton.language as tl

from pallas_kernels.device_tiles import chunked, partial_sum, rounded

POOL_ITEMS = tl.constexpr(16)  # loaded at a time
NO_GATE = tl.constexpr(-3e38)


@triton.jit
def product_row(pointer, row, dtype: tl.constexpr, P: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
                N: tl.constexpr):  # fmt: skip
    """Row `row` [1, N] of product P (splits, columns, first column), as kept in `dtype`."""
    column = tl.arange(0, N)[None, :]
    x = partial_sum(pointer, row * P[1] + P[2] + column, column < WIDTH, P[0], R * P[1])
    return rounded(x, dtype)


@triton.jit
def item_places(first, entry, columns, RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    """Positions [STEP, 1] of an entry's items from number `first` on, and where `columns` [N] of them lie [STEP, N]."""
    item = first + tl.arange(0, STEP)[:, None]
    column = columns[None, :]
    if OVERLAP:
        return (entry - 1) * RATIO + item, tl.where(item < RATIO, 0, WIDTH) + column
    else:
        return entry * RATIO + item, item * 0 + column


@triton.jit
def old_items(ring_ptr, first, entry, length, columns, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
              RING: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Values and gates [STEP, N] of the items that earlier passes left in the ring, 0 for others."""
    C: tl.constexpr = 2 * WIDTH if OVERLAP else WIDTH
    position, places = item_places(first, entry, columns, RATIO, OVERLAP, WIDTH, STEP)
    kept = (position >= 0) & (position < length) & (columns < WIDTH)[None, :]
    place = tl.maximum(position, 0) % RING * (2 * C) + places
    value = tl.load(ring_ptr + place, mask=kept, other=0.0)
    return value, tl.load(ring_ptr + place + C, mask=kept, other=0.0)


@triton.jit
def with_fresh_items(value, gate, value_ptr, gate_ptr, bias_ptr, first, entry, length, columns,
                     VALUE: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr,
                     RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """`old_items` with those of this pass put in, from the products themselves."""
    C: tl.constexpr = 2 * WIDTH if OVERLAP else WIDTH
    position, places = item_places(first, entry, columns, RATIO, OVERLAP, WIDTH, STEP)
    fresh = (position >= length) & (columns < WIDTH)[None, :]
    row = position - length
    value += partial_sum(value_ptr, row * VALUE[1] + VALUE[2] + places, fresh, VALUE[0], R * VALUE[1])
    gate += partial_sum(gate_ptr, row * GATE[1] + GATE[2] + places, fresh, GATE[0], R * GATE[1])
    if BIASED:
        gate += tl.load(bias_ptr + tl.maximum(position, 0) % RATIO * C + places, mask=fresh, other=0.0)
    return value, gate


@triton.jit
def pooled(value_ptr, gate_ptr, bias_ptr, ring_ptr, entry, length, share, VALUE: tl.constexpr,
           GATE: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
           RING: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The gate-weighted mean of one entry's items, float32; `RATIO` items, with OVERLAP twice as many.

    Of its columns, [1, N] from share * N on; all of them where RATIO is 1. Items stay in fixed groups of STEP
    whether they are old or new: bits must not tell how passes were cut.
    """
    if RATIO == 1:
        return product_row(value_ptr, entry - length, tl.float32, VALUE, R, WIDTH, N)
    else:
        ITEMS: tl.constexpr = RATIO * 2 if OVERLAP else RATIO
        STEP: tl.constexpr = ITEMS if ITEMS < POOL_ITEMS else POOL_ITEMS
        columns = share * N + tl.arange(0, N)
        value, gate = old_items(ring_ptr, 0, entry, length, columns, RATIO, OVERLAP, RING, WIDTH, STEP)
        if ITEMS == STEP:
            value, gate = with_fresh_items(value, gate, value_ptr, gate_ptr, bias_ptr, 0, entry, length, columns,
                                           VALUE, GATE, BIASED, R, RATIO, OVERLAP, WIDTH, STEP)  # fmt: skip
            if OVERLAP:
                position, _ = item_places(0, entry, columns, RATIO, OVERLAP, WIDTH, STEP)
                gate = tl.where(position >= 0, gate, NO_GATE)
            share_of = tl.exp(gate - tl.max(gate, axis=0, keep_dims=True))
            weight = tl.sum(share_of, axis=0, keep_dims=True)
            total = tl.sum(share_of * value, axis=0, keep_dims=True)
        else:
            tl.static_assert(not OVERLAP)
            peak = tl.full((1, N), NO_GATE, tl.float32)
            weight = tl.zeros((1, N), tl.float32)
            total = tl.zeros((1, N), tl.float32)
            for first in range(0, ITEMS, STEP):
                if entry * RATIO + first + STEP > length:
                    value, gate = with_fresh_items(value, gate, value_ptr, gate_ptr, bias_ptr, first, entry, length,
                                                   columns, VALUE, GATE, BIASED, R, RATIO, OVERLAP, WIDTH,
                                                   STEP)  # fmt: skip
                # One group ahead; behind the last one the first is loaded again.
                following = tl.where(first + STEP < ITEMS, first + STEP, 0)
                next_value, next_gate = old_items(
                    ring_ptr, following, entry, length, columns, RATIO, OVERLAP, RING, WIDTH, STEP
                )
                raised = tl.maximum(peak, tl.max(gate, axis=0, keep_dims=True))
                shrink = tl.exp(peak - raised)
                share_of = tl.exp(gate - raised)
                weight = weight * shrink + tl.sum(share_of, axis=0, keep_dims=True)
                total = total * shrink + tl.sum(share_of * value, axis=0, keep_dims=True)
                peak, value, gate = raised, next_value, next_gate
        return tl.div_rn(total, weight)


@triton.jit
def rows_times_row(
    matrix_ptr,
    x,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """[M / STEP] = rows FIRST, FIRST + STEP, ... of a matrix [M, WIDTH] times row x [1, C, N / C]."""
    CHUNK: tl.constexpr = x.shape[2]
    column, row = chunked(FIRST + STEP * tl.arange(0, M // STEP), CHUNK, N)
    part = tl.load(matrix_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(part * x, axis=2), axis=1)


@triton.jit
def matrix_times_row(matrix_ptr, x, M: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """[1, M] = x [1, N] times the transposed matrix [M, WIDTH]."""
    CHUNK: tl.constexpr = 256 if N > 256 else N
    x = tl.reshape(x, (1, N // CHUNK, CHUNK))
    # Four interleaved parts: their loads are under way together, and their results meet without a loop.
    even = tl.join(
        rows_times_row(matrix_ptr, x, 0, 4, M, WIDTH, N), rows_times_row(matrix_ptr, x, 2, 4, M, WIDTH, N)
    )
    odd = tl.join(
        rows_times_row(matrix_ptr, x, 1, 4, M, WIDTH, N), rows_times_row(matrix_ptr, x, 3, 4, M, WIDTH, N)
    )
    return tl.reshape(tl.join(even, odd), (1, M))


@triton.constexpr_function
def bits(number):
    """The exponent of a power of two."""
    return number.bit_length() - 1


@triton.jit
def hadamard_times_row(x, N: tl.constexpr):
    """[1, N] = x [1, N] times the Sylvester Hadamard matrix.

    A step puts the sums of neighbours into the first half and their differences into the second. That moves every bit
    of a column's number by one place; after as many steps as bits each was dealt with once and is back in its place.
    """
    for _ in tl.static_range(bits(N)):
        even, odd = tl.split(tl.reshape(x, (N // 2, 2)))
        x = tl.reshape(tl.trans(tl.join(even + odd, even - odd)), (1, N))
    return x
