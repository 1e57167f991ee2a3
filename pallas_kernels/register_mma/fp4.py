"""A tile of FP4 weights times 8 rows of fp16 activations."""

import triton
import triton.language as tl

from pallas_kernels import tiles
from pallas_kernels.register_mma import lanes, text

GAIN = tl.constexpr(tiles.FP4_GAIN)
_SCALES = tl.constexpr(text.loads(1, 0, ".nc.L1::no_allocate"))
_SCALES_GUARDED = tl.constexpr(text.loads(1, 0, ".nc.L1::no_allocate", guarded=True))
_SCALES_COHERENT = tl.constexpr(text.loads(1, 0, ".L1::no_allocate"))
_SCALES_GUARDED_COHERENT = tl.constexpr(text.loads(1, 0, ".L1::no_allocate", guarded=True))
_LOAD, _LOAD_GUARDED = lanes.signature("4r", "l"), lanes.signature("4r", "l", "r")
_STORE_SCALES = tl.constexpr(text.stores(1, 0))
_STORE_SCALES_GUARDED = tl.constexpr(text.stores(1, 0, guarded=True))
_STORE_4, _STORE_4_GUARDED = lanes.signature("1r", "4r", "l"), lanes.signature("1r", "4r", "l", "r")
_BLOCK_0, _BLOCK_1, _BLOCK_2, _BLOCK_3 = (tl.constexpr(text.fp4_block(i)) for i in range(4))
_OPERANDS = lanes.signature("8f", "12r", "8f")


@triton.jit
def _block(BLOCK: tl.constexpr, words, rows, scales, sums):
    if BLOCK == 0:
        TEXT: tl.constexpr = _BLOCK_0
    elif BLOCK == 1:
        TEXT: tl.constexpr = _BLOCK_1
    elif BLOCK == 2:
        TEXT: tl.constexpr = _BLOCK_2
    else:
        TEXT: tl.constexpr = _BLOCK_3
    return tl.inline_asm_elementwise(
        TEXT, _OPERANDS, words + rows + scales + sums, dtype=(tl.float32,) * 8, is_pure=True, pack=1
    )


@triton.jit
def _load_scales(pointer, blocks, GUARDED: tl.constexpr, COHERENT: tl.constexpr):
    if GUARDED:
        if COHERENT:
            GUARDED_TEXT: tl.constexpr = _SCALES_GUARDED_COHERENT
        else:
            GUARDED_TEXT: tl.constexpr = _SCALES_GUARDED
        return tl.inline_asm_elementwise(
            GUARDED_TEXT, _LOAD_GUARDED, [pointer, blocks], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    elif COHERENT:
        return tl.inline_asm_elementwise(
            _SCALES_COHERENT, _LOAD, [pointer], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _SCALES, _LOAD, [pointer], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )


@triton.jit
def _store_scales(pointer, scales, blocks, GUARDED: tl.constexpr):
    if GUARDED:
        tl.inline_asm_elementwise(
            _STORE_SCALES_GUARDED,
            _STORE_4_GUARDED,
            scales + (pointer, blocks),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _STORE_SCALES, _STORE_4, scales + (pointer,), dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _chunk_rows(rows, peaks, q, row_blocks, TOGETHER: tl.constexpr, GUARDED: tl.constexpr):
    """A lane's activations of a chunk, 16 words, rounded if TOGETHER."""
    near = lanes.load_rows(rows, row_blocks, GUARDED)
    far = lanes.load_rows(rows + 64, row_blocks - 2, GUARDED)
    if TOGETHER:
        peak = lanes.load_peaks(peaks, row_blocks, q)
        both = lanes.rounding_scales(peak, 0, TOGETHER)
        made = ()
        for block in tl.static_range(4):
            if block < 2:
                x = near[4 * block : 4 * block + 4]
            else:
                x = far[4 * block - 8 : 4 * block - 4]
            if TOGETHER == 32 and block > 0:
                both = lanes.rounding_scales(peak, block, TOGETHER)
            x = lanes.rounded_words(x, both)
            made = made + (x[0], x[1], x[2], x[3])
    else:
        made = near + far
    return made


@triton.jit
def add_turn(sums, loaded, rows):
    """Adds a turn of weights from `turn_weights` times rows from `turn_rows`."""
    s, w = loaded
    for block in tl.static_range(4):
        sums = _block(block, w[4 * block : 4 * block + 4], rows[4 * block : 4 * block + 4], s, sums)
    return sums


@triton.jit
def _turn(
    sums,
    words,
    scales,
    rows,
    peaks,
    q,
    chunk,
    blocks,
    row_blocks,
    TOGETHER: tl.constexpr,
    GUARDED: tl.constexpr,
    SPARSE: tl.constexpr,
    FENCED: tl.constexpr,
    COHERENT: tl.constexpr,
):
    """Adds the chunk that lies `chunk` chunks behind the lane's first one."""
    s = _load_scales(scales + chunk * 32, blocks, GUARDED, COHERENT)
    w = lanes.load_weights(words + chunk * 512, blocks, GUARDED, FENCED, COHERENT)
    x = _chunk_rows(
        rows + chunk * 128, peaks + chunk * 16, q, row_blocks, TOGETHER, GUARDED or SPARSE
    )  # fmt: skip
    return add_turn(sums, (s, w), x)


@triton.jit
def turn_weights(words_ptr, scales_ptr, turn: tl.constexpr, WARPS: tl.constexpr):
    """Weights and scales of a tile's turn, a chunk for each warp. Their loads stay where they are, and together."""
    warp, g, q = lanes.position(WARPS)
    chunk: tl.constexpr = turn * WARPS
    s = _load_scales(scales_ptr + warp * 32 + g * 4 + chunk * 32, 4, False, True)
    return s, lanes.load_weights(words_ptr + warp * 512 + (4 * g + q) * 4 + chunk * 512, 4, False, True)


@triton.jit
def turn_rows(
    rows_ptr, peaks_ptr, turn: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr, TOGETHER: tl.constexpr
):
    """The activations of a turn, 16 words, rounded."""
    warp, g, q = lanes.position(WARPS)
    chunk: tl.constexpr = turn * WARPS
    rows = rows_ptr + g * (32 * BLOCKS) + warp * 128 + q * 8 + chunk * 128
    peaks = peaks_ptr + g * (4 * BLOCKS) + warp * 16 + q * 4 + chunk * 16
    return _chunk_rows(rows, peaks, q, 4, TOGETHER, False)


@triton.jit
def _copy(words, scales, to_words, to_scales, chunk, blocks, GUARDED: tl.constexpr):
    """Copies the chunk that lies `chunk` chunks behind the lane's first one."""
    s = _load_scales(scales + chunk * 32, blocks, GUARDED, False)
    w = lanes.load_weights(words + chunk * 512, blocks, GUARDED, False, False)
    _store_scales(to_scales + chunk * 32, s, blocks, GUARDED)
    lanes.store_weights(to_words + chunk * 512, w, blocks, GUARDED)


@triton.jit
def copy_tile(words_ptr, scales_ptr, to_words_ptr, to_scales_ptr, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Copies a packed tile; each thread what it reads itself in `tile_sums`. Padding blocks are left as they are."""
    warp, g, q = lanes.position(WARPS)
    word, scale = warp * 512 + (4 * g + q) * 4, warp * 32 + g * 4
    words, scales = words_ptr + word, scales_ptr + scale
    to_words, to_scales = to_words_ptr + word, to_scales_ptr + scale
    TURNS: tl.constexpr = BLOCKS // (4 * WARPS)
    for turn in range(0, TURNS):
        tl.inline_asm_elementwise(
            lanes.KEEP_LOOPING, lanes.FROM_ONE_TO_ONE, [turn], dtype=tl.int32, is_pure=False, pack=1
        )
        _copy(words, scales, to_words, to_scales, turn * WARPS, 4, False)
    if BLOCKS % (4 * WARPS):
        chunk: tl.constexpr = TURNS * WARPS
        _copy(words, scales, to_words, to_scales, chunk, lanes.blocks_left(chunk + warp, BLOCKS), True)


@triton.jit
def tile_sums(
    words_ptr,
    scales_ptr,
    rows_ptr,
    peaks_ptr,
    row_blocks,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPARSE: tl.constexpr,
    FENCED: tl.constexpr,
    COHERENT: tl.constexpr = False,
):
    """The sums of each lane, divided by GAIN.

    Args:
      words_ptr, scales_ptr: the packed tile.
      rows_ptr: fp16 activations [8, 32 * BLOCKS].
      peaks_ptr: used if TOGETHER, fp16: the largest size of each 8 columns of the activations.
      row_blocks: used if SPARSE, int32: 4 where activation row g counts, 0 where it is taken as zero, unread.
      TOGETHER: columns that share a scale of the activations' rounding, 0 to take them as they are.
      FENCED: keep a turn's weight loads together and loop over turns; otherwise turns are unrolled.
      COHERENT: threads read what they wrote in this kernel themselves (`copy_tile`).
    """
    warp, g, q = lanes.position(WARPS)
    words = words_ptr + warp * 512 + (4 * g + q) * 4
    scales = scales_ptr + warp * 32 + g * 4
    rows = rows_ptr + g * (32 * BLOCKS) + warp * 128 + q * 8
    peaks = peaks_ptr + g * (4 * BLOCKS) + warp * 16 + q * 4
    TURNS: tl.constexpr = BLOCKS // (4 * WARPS)
    sums = lanes.zero_sums(WARPS)
    if FENCED:
        for turn in range(0, TURNS):
            tl.inline_asm_elementwise(
                lanes.KEEP_LOOPING, lanes.FROM_ONE_TO_ONE, [turn], dtype=tl.int32, is_pure=False, pack=1
            )
            sums = _turn(
                sums,
                words,
                scales,
                rows,
                peaks,
                q,
                turn * WARPS,
                4,
                row_blocks,
                TOGETHER,
                False,
                SPARSE,
                True,
                COHERENT,
            )
    else:
        for turn in tl.static_range(TURNS):
            sums = _turn(
                sums,
                words,
                scales,
                rows,
                peaks,
                q,
                turn * WARPS,
                4,
                row_blocks,
                TOGETHER,
                False,
                SPARSE,
                False,
                COHERENT,
            )
    if BLOCKS % (4 * WARPS):
        chunk: tl.constexpr = TURNS * WARPS
        blocks = lanes.blocks_left(chunk + warp, BLOCKS)
        if SPARSE:
            row_blocks = tl.minimum(blocks, row_blocks)
        else:
            row_blocks = blocks
        sums = _turn(
            sums, words, scales, rows, peaks, q, chunk, blocks, row_blocks, TOGETHER, True, SPARSE, False,
            COHERENT,
        )  # fmt: skip
    return sums
