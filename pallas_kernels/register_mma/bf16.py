"""32 natural rows of BF16 weights times 8 rows of BF16 activations."""

import triton
import triton.language as tl

from pallas_kernels.register_mma import lanes, text

# A turn is 64 columns, two blocks: 128 bytes of each row, which together fill whole cache lines.
_WEIGHTS = tl.constexpr(text.loads_of_rows(8, lanes.STREAM, guarded=False))
_WEIGHTS_GUARDED = tl.constexpr(text.loads_of_rows(8, lanes.STREAM, guarded=True))
_LOAD, _LOAD_GUARDED = lanes.signature("32r", "8l"), lanes.signature("32r", "8l", "r")
_ROWS = tl.constexpr(text.loads(1, 0, ".ca"))
_ROWS_GUARDED = tl.constexpr(text.loads(1, 0, ".ca", guarded=True))
_LOAD_ROWS, _LOAD_ROWS_GUARDED = lanes.signature("4r", "l"), lanes.signature("4r", "l", "r")
_STEP, _OPERANDS = tl.constexpr(text.bf16_step()), lanes.signature("4f", "12r", "4f")
_PAIR, _TO_PAIR = tl.constexpr(text.bf16_pair()), lanes.signature("r", "2f")
_THIRDS, _TO_THIRDS = tl.constexpr(text.bf16_thirds()), lanes.signature("3r", "2f")


@triton.jit
def _load_weights(p, present, EIGHT_ROWS: tl.constexpr, GUARDED: tl.constexpr):
    """16 bytes of rows g, g + 8, g + 16, g + 24 in one block, then in the next: 32 words."""
    second, third, fourth = p + EIGHT_ROWS, p + 2 * EIGHT_ROWS, p + 3 * EIGHT_ROWS
    pointers = (p, second, third, fourth, p + 32, second + 32, third + 32, fourth + 32)
    if GUARDED:
        return tl.inline_asm_elementwise(
            _WEIGHTS_GUARDED,
            _LOAD_GUARDED,
            pointers + (present,),
            dtype=(tl.int32,) * 32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            _WEIGHTS, _LOAD, pointers, dtype=(tl.int32,) * 32, is_pure=False, pack=1
        )


@triton.jit
def _load_rows(pointer, present, GUARDED: tl.constexpr):
    if GUARDED:
        return tl.inline_asm_elementwise(
            _ROWS_GUARDED,
            _LOAD_ROWS_GUARDED,
            [pointer, present],
            dtype=(tl.int32,) * 4,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            _ROWS, _LOAD_ROWS, [pointer], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )


@triton.jit
def pair(x, y):
    """Two float32 numbers, rounded, as a word of two bf16 numbers."""
    return tl.inline_asm_elementwise(_PAIR, _TO_PAIR, [x, y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pair_of_thirds(x, y):
    """Three words whose bf16 numbers add up to two float32 numbers."""
    return tl.inline_asm_elementwise(_THIRDS, _TO_THIRDS, [x, y], dtype=(tl.int32,) * 3, is_pure=True, pack=1)


@triton.jit
def step(upper, lower, x, d):
    """d plus 16 rows of 32 columns of weights times 8 rows of activations; `text.bf16_step` says which words."""
    parts = (upper, lower, x, d)
    words = ()
    for part in tl.static_range(4):
        words = words + (parts[part][0], parts[part][1], parts[part][2], parts[part][3])
    return tl.inline_asm_elementwise(_STEP, _OPERANDS, words, dtype=(tl.float32,) * 4, is_pure=True, pack=1)


@triton.jit
def _add(sums, w, rows, columns, present, COLUMNS: tl.constexpr, TERMS: tl.constexpr, GUARDED: tl.constexpr):
    """Adds the 64 columns that lie `columns` behind the lane's first ones and whose weights are loaded."""
    upper, lower = sums[0:4], sums[4:8]
    for term in tl.static_range(TERMS):
        x = _load_rows(rows + (term * 8 * COLUMNS + columns), present, GUARDED)
        upper = step(w[0:4], w[4:8], x, upper)
        lower = step(w[8:12], w[12:16], x, lower)
        x = _load_rows(rows + (term * 8 * COLUMNS + columns + 32), present, GUARDED)
        upper = step(w[16:20], w[20:24], x, upper)
        lower = step(w[24:28], w[28:32], x, lower)
    return upper + lower


@triton.jit
def _turn(
    sums,
    weights,
    rows,
    columns,
    present,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Loads and adds these columns; guarded by `present`, 0 or 1."""
    w = _load_weights(weights + columns, present, 8 * COLUMNS, GUARDED)
    return _add(sums, w, rows, columns, present, COLUMNS, TERMS, GUARDED)


@triton.jit
def held_turn(weights_ptr, first, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Weights of the 64 columns at 64 * (first + warp), for `tile_sums` when its rows are there.

    Their loads stay in front of a wait that follows, and together.
    """
    warp, g, q = lanes.position(WARPS)
    weights = weights_ptr + g * COLUMNS + (first + warp) * 64 + q * 8
    return _load_weights(weights, 1, 8 * COLUMNS, False)


@triton.jit
def tile_sums(
    weights_ptr,
    rows_ptr,
    first,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    WARPS: tl.constexpr,
    TERMS: tl.constexpr,
    held=None,
):
    """The sums of each lane over 64 columns at 64 * (first + warp), and every 64 * SPLITS * WARPS further.

    Args:
      weights_ptr: bf16, row 0 of the 32; rows are COLUMNS apart, a multiple of 64.
      rows_ptr: bf16 activations [TERMS, 8, COLUMNS]; the terms' products add up.
      first: int32, the first 64 columns of this program's first warp.
      held: what `held_turn` has loaded of the first turn, which then is a whole one.
    """
    warp, g, q = lanes.position(WARPS)
    column = (first + warp) * 64 + q * 8
    weights = weights_ptr + g * COLUMNS + column
    rows = rows_ptr + g * COLUMNS + column
    STEP: tl.constexpr = SPLITS * WARPS
    TURNS: tl.constexpr = COLUMNS // (64 * STEP)
    sums = lanes.zero_sums(WARPS)
    FIRST: tl.constexpr = 0 if held is None else 1
    if FIRST:
        sums = _add(sums, held, rows, 0, 1, COLUMNS, TERMS, False)
    for turn in range(FIRST, TURNS):
        sums = _turn(sums, weights, rows, turn * (64 * STEP), 1, COLUMNS, TERMS, False)
    if COLUMNS % (64 * STEP):
        present = (TURNS * STEP + first + warp < COLUMNS // 64).to(tl.int32)
        sums = _turn(sums, weights, rows, TURNS * (64 * STEP), present, COLUMNS, TERMS, True)
    return sums
