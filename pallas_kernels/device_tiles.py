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
)

E2M1_MAX = tl.constexpr(6.0)
INDEX_FLOOR = tl.constexpr(6 * 2.0**-126)
ENTRY_SCALE_FLOOR = tl.constexpr(6 * 2.0**-9)
# Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even, of a small float32.
INTEGER_MAGIC = tl.constexpr(12582912.0)


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
def query_tile(
    pointer, table_ptr, rows, heads, dtype: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Query heads [M, N] of product Q (splits, columns, first column), normed, rotated, as kept in `dtype`.

    Head heads[m] of row rows[m], both int32 [M]; table row rows[m] turns it. The partner of a rotated column is
    loaded a second time: behind a join, which `turned` ends with, Triton gives a product's operand a layout that
    cannot be fed while further keys load.
    """
    column = tl.arange(0, N)[None, :]
    offsets = (rows * Q[1] + Q[2] + heads * WIDTH)[:, None]
    turning = tl.broadcast_to((column >= WIDTH - ROPE) & (column < WIDTH), (M, N))
    x = partial_sum(pointer, offsets + column, tl.broadcast_to(column < WIDTH, (M, N)), Q[0], R * Q[1])
    partner = partial_sum(pointer, offsets + (column ^ 1), turning, Q[0], R * Q[1])
    x = rounded(x, dtype)
    partner = rounded(partner, dtype)
    if NORM:
        scale = row_inverse_rms(x, WIDTH, EPS)
        x = rounded(x * scale, dtype)
        partner = rounded(partner * scale, dtype)
    factors = table_ptr + (rows * ROPE)[:, None] + (column - (WIDTH - ROPE)) // 2
    cosine = tl.load(factors, mask=turning, other=1.0)
    sine = tl.load(factors + ROPE // 2, mask=turning, other=0.0)
    sine = tl.where(column % 2 == 0, -sine, sine)
    return rounded(x * cosine + partner * sine, dtype)


@triton.jit
def power_of_two_at_least(x):
    """The smallest power of two not below positive normal x, and its inverse."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def round_e2m1(x):
    """Nearest E2M1 value (ties to even), saturating at 6."""
    size = tl.minimum(tl.abs(x), E2M1_MAX)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    inverse = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    size = ((size * inverse + INTEGER_MAGIC) - INTEGER_MAGIC) * step
    return tl.where(x < 0, -size, size)


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
    scale, inverse = power_of_two_at_least(tl.div_rn(largest, tl.full(largest.shape, E2M1_MAX, tl.float32)))
    return tl.reshape(round_e2m1(blocks * inverse) * scale, (M, N))


@triton.jit
def fp4_entry_round_trip(x, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """`formats.fp4_entry_round_trip` of every GROUP columns."""
    blocks, largest = blocks_and_largest(x, ENTRY_SCALE_FLOOR, GROUP, M, N)
    scale = round_e4m3(tl.div_rn(largest, tl.full(largest.shape, E2M1_MAX, tl.float32)))
    quotient = tl.div_rn(blocks, tl.broadcast_to(scale, blocks.shape))
    return tl.reshape(round_e2m1(quotient) * scale, (M, N))


@triton.jit
def hadamard_signs_of(row, column):
    """Elements (row, column), numbers below 256, of the Sylvester Hadamard matrix of +1 and -1, in float32."""
    common = row & column
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    return (1 - 2 * (common & 1)).to(tl.float32)
