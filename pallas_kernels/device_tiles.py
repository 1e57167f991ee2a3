"""Device functions on whole tiles that the attention side shares: partial sums, norms, rotations, block rounding.

Knows: the arithmetic of one tile in registers. Does not know: what a tile means, or any kernel. The roundings
state the rules of `formats` again, block by block.

A tile is [M, N] float32 unless said otherwise, N a power of two; columns beyond the true width hold zeros.
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import (
    ACTIVATION_FLOOR,
    E4M3_MAX,
    INTERPRETED,
    SMALLEST_NORMAL,
    round_e4m3,
    rounded,
    settled,
)

E2M1_MAX = tl.constexpr(6.0)
INDEX_FLOOR = tl.constexpr(6 * 2.0**-126)
ENTRY_SCALE_FLOOR = tl.constexpr(6 * 2.0**-9)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x float32 as an array of `dtype`, rounded to nearest even."""
    return rounded(x, dtype).to(dtype)


@triton.jit
def loop_bound(x):
    """Scalar x as a bound of `range`. The interpreter keeps scalars as arrays of one element."""
    if INTERPRETED:
        return x.handle.data.item()
    else:
        return x


@triton.jit
def product(a, b):
    """a [M, K] times b [K, N], summed in float32. The interpreter would multiply bfloat16 bit patterns."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def partial_sum(pointer, offsets, mask, SPLITS: tl.constexpr, STRIDE: tl.constexpr):
    """The sum over split-K partials [SPLITS, ...], `STRIDE` elements apart, in their order."""
    total = tl.load(pointer + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointer + offsets + split * STRIDE, mask=mask, other=0.0)
    return total


@triton.jit
def row_inverse_rms(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean over WIDTH columns of x^2 + EPS): [M, 1], finite for rows of zeros."""
    mean = tl.maximum(tl.sum(x * x, axis=1) / WIDTH + EPS, SMALLEST_NORMAL)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean))[:, None]


@triton.jit
def turn_factors(pointer, row, WIDTH: tl.constexpr, ROPE: tl.constexpr, N: tl.constexpr):
    """Cosine and sine [N / 2] of each column pair, from row `row` of a table [rows, 2, ROPE / 2].

    Only the last ROPE of the WIDTH columns turn; elsewhere cosine is 1 and sine 0.
    """
    pair = tl.arange(0, N // 2) - (WIDTH - ROPE) // 2
    turning = (pair >= 0) & (pair < ROPE // 2)
    cosine = tl.load(pointer + row * ROPE + pair, mask=turning, other=1.0)
    sine = tl.load(pointer + row * ROPE + ROPE // 2 + pair, mask=turning, other=0.0)
    return cosine, sine


@triton.jit
def turned(x, cosine, sine, M: tl.constexpr, N: tl.constexpr):
    """x with each adjacent (even, odd) pair of columns rotated; cosine and sine broadcast to [M, N / 2]."""
    even, odd = tl.split(tl.reshape(x, (M, N // 2, 2)))
    return tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (M, N))


@triton.jit
def chunked(rows, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Column numbers [1, C, CHUNK] and row numbers [M, 1, 1] for loads of [M, C, CHUNK], to be reshaped to [M, N].

    Loaded in this form whole rows lie in single warps, so that what belongs to a row is held by few threads and
    sums over it need no shared memory. Triton would spread a wide row over all warps.
    """
    first = tl.arange(0, COLUMNS // CHUNK)[None, :, None] * CHUNK
    return first + tl.arange(0, CHUNK)[None, None, :], rows[:, None, None]


@triton.jit
def query_loads(
    pointer, table_ptr, first_row, members, Q: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    TOTAL: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Query heads [M, N] of product Q (splits, columns, first column), and cosine and sine [M, N / 2] of their turns.

    Row m holds head `members[m] % TOTAL` of row first_row + members[m] // TOTAL, which lies among ROWS rows from
    first_row on; table rows of the same numbers turn them.
    """
    CHUNK: tl.constexpr = N if N < 128 else 128
    column, member = chunked(members, CHUNK, N)
    offsets = (first_row + member // TOTAL) * Q[1] + Q[2] + member % TOTAL * WIDTH + column
    inside = tl.broadcast_to(column < WIDTH, (M, N // CHUNK, CHUNK))
    x = tl.reshape(partial_sum(pointer, offsets, inside, Q[0], R * Q[1]), (M, N))
    cosine, sine = turn_factors(table_ptr, first_row, WIDTH, ROPE, N)
    cosine = tl.broadcast_to(cosine[None, :], (M, N // 2))
    sine = tl.broadcast_to(sine[None, :], (M, N // 2))
    for other in tl.static_range(1, ROWS):
        own = (members // TOTAL == other)[:, None]
        more_cosine, more_sine = turn_factors(table_ptr, first_row + other, WIDTH, ROPE, N)
        cosine = tl.where(own, more_cosine[None, :], cosine)
        sine = tl.where(own, more_sine[None, :], sine)
    return x, cosine, sine


@triton.jit
def queries(x, cosine, sine, dtype: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
            M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """`query_loads` normed and rotated, as kept in `dtype`.

    The result is settled: a product's operand made from it takes one trip through shared memory, and no load is
    repeated in the operand's layout.
    """
    x = rounded(settled(x), dtype)
    if NORM:
        x = rounded(x * row_inverse_rms(x, WIDTH, EPS), dtype)
    return settled(rounded(turned(x, cosine, sine, M, N), dtype))


@triton.jit
def prefetch(pointers):
    """Asks for the lines at `pointers` to be brought into L2. Loads behind a barrier do not start before it."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def power_of_two_at_least(x):
    """The smallest power of two not below positive normal x, and its inverse."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def round_e2m1(x):
    """Nearest E2M1 value (ties to even) of x, which a last bit at most carries above 6.

    Adding and removing a number whose last bit is one step of E2M1 rounds to that step.
    """
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(power, 1.0) * 6291456.0  # 1.5 * 2^23 steps of half the power of two
    return (x + anchor) - anchor


@triton.jit
def blocks_and_largest(x, FLOOR: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """x as [M, N / BLOCK, BLOCK], and the largest size in each block [M, N / BLOCK, 1], at least FLOOR."""
    blocks = tl.reshape(x, (M, N // BLOCK, BLOCK))
    return blocks, tl.maximum(tl.max(tl.abs(blocks), axis=2, keep_dims=True), FLOOR)


@triton.jit
def fp8_round_trip(x, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """`formats.fp8_round_trip` of every BLOCK columns."""
    blocks, largest = blocks_and_largest(x, ACTIVATION_FLOOR, BLOCK, M, N)
    scale, inverse = power_of_two_at_least(tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32)))
    return tl.reshape(round_e4m3(blocks * inverse) * scale, (M, N))


@triton.jit
def fp4_index_round_trip(x, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """`formats.fp4_index_round_trip` of every BLOCK columns."""
    blocks, largest = blocks_and_largest(x, INDEX_FLOOR, BLOCK, M, N)
    # The smallest power of two not below largest / 6, which is 2^(e - 2) up to largest = 1.5 * 2^e; the rounding of
    # the quotient changes nothing, for the next number above that is too large by more than half a last bit.
    bits = ((largest.to(tl.int32, bitcast=True) + 0x3FFFFF) & 0x7F800000) - 0x1000000
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return tl.reshape(round_e2m1(blocks * inverse) * scale, (M, N))


@triton.jit
def fp4_entry_round_trip(x, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """`formats.fp4_entry_round_trip` of every GROUP columns."""
    blocks, largest = blocks_and_largest(x, ENTRY_SCALE_FLOOR, GROUP, M, N)
    scale = round_e4m3(tl.div_rn(largest, tl.full(largest.shape, E2M1_MAX, tl.float32)))
    quotient = tl.div_rn(blocks, tl.broadcast_to(scale, blocks.shape))
    quotient = tl.minimum(tl.maximum(quotient, -E2M1_MAX), E2M1_MAX)
    return tl.reshape(round_e2m1(quotient) * scale, (M, N))
