"""A tile of FP8 weights times 8 rows of 16-bit activations."""

import triton
import triton.language as tl

from pallas_kernels.device_prefetch import prefetch_by_warps
from pallas_kernels.register_mma import lanes, text

_STEP, _OPERANDS = tl.constexpr(text.fp8_step()), lanes.signature("4f", "8r", "4f")


@triton.jit
def _step(w, HALF: tl.constexpr, BLOCK: tl.constexpr, x, d):
    """16 rows (HALF 0 or 1) of block BLOCK of 64 loaded columns, for the activations of that block."""
    FIRST: tl.constexpr = 8 * HALF + 2 * BLOCK
    return tl.inline_asm_elementwise(
        _STEP,
        _OPERANDS,
        w[FIRST : FIRST + 2] + w[FIRST + 4 : FIRST + 6] + x + d,
        dtype=(tl.float32,) * 4,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scaled(sums, scale, BYTE: tl.constexpr, total):
    """total + sums * 2^(byte BYTE of scale - 127), for four sums of a lane."""
    factor = (((scale >> (8 * BYTE)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return (
        total[0] + sums[0] * factor,
        total[1] + sums[1] * factor,
        total[2] + sums[2] * factor,
        total[3] + sums[3] * factor,
    )


@triton.jit
def _half_tile(total, w, HALF: tl.constexpr, scale, near, far, none, SCALED: tl.constexpr):
    """Adds 16 rows of two blocks; SCALED columns share a scale."""
    if SCALED == 128:
        return _scaled(_step(w, HALF, 1, far, _step(w, HALF, 0, near, none)), scale, HALF, total)
    else:
        total = _scaled(_step(w, HALF, 0, near, none), scale, HALF, total)
        return _scaled(_step(w, HALF, 1, far, none), scale, 2 + HALF, total)


@triton.jit
def _activations(
    rows, peak, blocks, block, TOGETHER: tl.constexpr, BFLOAT: tl.constexpr, GUARDED: tl.constexpr
):
    """The activations of two blocks as fp16, four words each."""
    x = lanes.load_rows(rows, blocks - block, GUARDED)
    near, far = x[0:4], x[4:8]
    if BFLOAT:
        near, far = lanes.half_words(near), lanes.half_words(far)
    if TOGETHER:
        scales = lanes.rounding_scales(peak, block, TOGETHER)
        near = lanes.rounded_words(near, scales)
        if TOGETHER == 32:
            scales = lanes.rounding_scales(peak, block + 1, TOGETHER)
        far = lanes.rounded_words(far, scales)
    return near, far


@triton.jit
def _load(words, scales, chunk, second, blocks, GUARDED: tl.constexpr, FENCED: tl.constexpr):
    """Words and scale of 64 columns: half `second` (0 or 1) of the chunk that lies `chunk` behind the lane's first."""
    if GUARDED:
        w = lanes.load_weights(
            words + (chunk * 1024 + second * 512), tl.where(blocks > 0, 4, 0), GUARDED, FENCED
        )
        return w, tl.load(scales + (chunk * 2 + second), mask=blocks > 0, other=0)
    else:
        w = lanes.load_weights(words + (chunk * 1024 + second * 512), blocks, GUARDED, FENCED)
        return w, tl.load(scales + (chunk * 2 + second))


@triton.jit
def _add(
    sums,
    loaded,
    rows,
    peaks,
    q,
    chunk,
    second,
    blocks,
    WARPS: tl.constexpr,
    SCALED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    TERM_STRIDE: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Adds the 64 columns that were loaded."""
    w, scale = loaded
    none = lanes.zero_sums(WARPS)[0:4]
    peak = none
    if TOGETHER:
        peak = lanes.load_peaks(peaks + chunk * 16, blocks, q)
    for term in tl.static_range(TERMS):
        place = rows + (term * TERM_STRIDE + chunk * 128 + second * 64)
        near, far = _activations(place, peak, blocks, 2 * second, TOGETHER, BFLOAT, GUARDED)
        first = _half_tile(sums[0:4], w, 0, scale, near, far, none, SCALED)
        sums = first + _half_tile(sums[4:8], w, 1, scale, near, far, none, SCALED)
    return sums


@triton.jit
def held_turn(words_ptr, scales_ptr, first, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Weights and scales of the chunks first + warp, all there must be, for `tile_sums` when its rows are there.

    Their loads stay in front of a wait that follows, and together. With HALVES 1 a second half is not loaded (half the
    registers), but asked for in the second-level cache.
    """
    warp, g, q = lanes.position(WARPS)
    words = words_ptr + (first + warp) * 1024 + (4 * g + q) * 4
    scales = scales_ptr + (first + warp) * 2
    near = _load(words, scales, 0, 0, 4, False, True)
    if HALVES == 2:
        return near, _load(words, scales, 0, 1, 4, False, True)
    else:
        prefetch_by_warps(words + 512, 2048)
        return (near,)


@triton.jit
def half_turn(words_ptr, scales_ptr, first, half: tl.constexpr, there, WARPS: tl.constexpr):
    """Weights and scales of half (0 or 1) of the chunks first + warp of a tile; loads stay where they are.

    Nothing is read, and zeros stand for it, unless `there` is above 0.
    """
    warp, g, q = lanes.position(WARPS)
    words = words_ptr + (first + warp) * 1024 + (4 * g + q) * 4
    return _load(words, scales_ptr + (first + warp) * 2, 0, half, there, True, True)


@triton.jit
def add_half_turn(
    sums, loaded, rows_ptr, first, half: tl.constexpr, ROW_STRIDE: tl.constexpr, WARPS: tl.constexpr,
    SCALED: tl.constexpr, BFLOAT: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Adds what `half_turn` has loaded, as `tile_sums` would."""
    warp, g, q = lanes.position(WARPS)
    rows = rows_ptr + g * ROW_STRIDE + (first + warp) * 128 + q * 8
    return _add(
        sums, loaded, rows, rows, q, 0, half, 4,
        WARPS, SCALED, 0, BFLOAT, TERMS, 8 * ROW_STRIDE, False,
    )  # fmt: skip


@triton.jit
def tile_sums(
    words_ptr,
    scales_ptr,
    rows_ptr,
    peaks_ptr,
    first,
    ROW_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    WARPS: tl.constexpr,
    SCALED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    FENCED: tl.constexpr,
    LOOP: tl.constexpr,
    held=None,
):
    """The sums of each lane over the chunks first + warp, and every SPLITS * WARPS chunks further.

    Args:
      words_ptr, scales_ptr: the packed tile.
      rows_ptr: 16-bit activations [TERMS, 8, ROW_STRIDE], of which columns 0 .. 32 * BLOCKS are used; the terms'
        products add up.
      peaks_ptr: used if TOGETHER, fp16 [8, 4 * BLOCKS]: the largest size of each 8 columns of the activations.
      first: int32, the first chunk of this program's first warp.
      SCALED: columns that share a weight scale, 128 or 32.
      TOGETHER: columns that share a scale of the activations' rounding, 0 to take them as they are.
      BFLOAT: activations are bf16 and become fp16 when loaded.
      FENCED: keep weight loads together, see `lanes.load_weights`.
      LOOP: loop over turns; otherwise they are unrolled, each loading the next one's weights before it multiplies.
      held: what `held_turn` has loaded of the first turn, if it was called; without LOOP.
    """
    warp, g, q = lanes.position(WARPS)
    words = words_ptr + (first + warp) * 1024 + (4 * g + q) * 4
    scales = scales_ptr + (first + warp) * 2
    rows = rows_ptr + g * ROW_STRIDE + (first + warp) * 128 + q * 8
    peaks = peaks_ptr + g * (4 * BLOCKS) + (first + warp) * 16 + q * 4
    STEP: tl.constexpr = SPLITS * WARPS
    TURNS: tl.constexpr = BLOCKS // (4 * STEP)
    TERM_STRIDE: tl.constexpr = 8 * ROW_STRIDE
    sums = lanes.zero_sums(WARPS)
    if LOOP:
        for half in range(0, 2 * TURNS):
            tl.inline_asm_elementwise(
                lanes.KEEP_LOOPING, lanes.FROM_ONE_TO_ONE, [half], dtype=tl.int32, is_pure=False, pack=1
            )
            loaded = _load(words, scales, half // 2 * STEP, half % 2, 4, False, FENCED)
            sums = _add(
                sums, loaded, rows, peaks, q, half // 2 * STEP, half % 2, 4,
                WARPS, SCALED, TOGETHER, BFLOAT, TERMS, TERM_STRIDE, False,
            )  # fmt: skip
    else:
        if held is not None:
            loaded = held[0]
        elif TURNS:
            loaded = _load(words, scales, 0, 0, 4, False, FENCED)
        for half in tl.static_range(2 * TURNS):
            now = loaded
            if held is not None and half + 1 < len(held):
                loaded = held[half + 1]
            elif half + 1 < 2 * TURNS:
                loaded = _load(words, scales, (half + 1) // 2 * STEP, (half + 1) % 2, 4, False, FENCED)
            sums = _add(
                sums, now, rows, peaks, q, half // 2 * STEP, half % 2, 4,
                WARPS, SCALED, TOGETHER, BFLOAT, TERMS, TERM_STRIDE, False,
            )  # fmt: skip
    if BLOCKS % (4 * STEP):
        blocks = lanes.blocks_left(TURNS * STEP + first + warp, BLOCKS)
        for half in tl.static_range(2):
            loaded = _load(words, scales, TURNS * STEP, half, blocks, True, False)
            sums = _add(
                sums, loaded, rows, peaks, q, TURNS * STEP, half, blocks,
                WARPS, SCALED, TOGETHER, BFLOAT, TERMS, TERM_STRIDE, True,
            )  # fmt: skip
    return sums
