"""What every weight format shares: who a thread is, its activations, and sums over warps."""

import triton
import triton.language as tl

from pallas_kernels import tiles
from pallas_kernels.register_mma import text


def signature(outputs: str, *inputs: str) -> tl.constexpr:
    """Constraints of inline assembly: `signature("16r", "l", "4f")` has 16 integer results, a pointer, 4 floats."""

    def spelled(part: str) -> list[str]:
        return [part[-1]] * int(part[:-1] or 1)

    results = [f"=&{kind}" for kind in spelled(outputs)]
    return tl.constexpr(",".join(results + [kind for part in inputs for kind in spelled(part)]))


# At the head of a loop over i: ptxas does not unroll it, so that it needs the registers of one turn only. Not a
# function of its own: its line information would come between the loop and the pragma.
KEEP_LOOPING, FROM_ONE_TO_ONE = tl.constexpr('.pragma "nounroll"; mov.b32 $0, $1;'), signature("1r", "1r")
HIDDEN_GAIN = tl.constexpr(tiles.HIDDEN_GAIN)
# Weights pass by the first-level cache; the second one fetches 128 bytes (256 cost 2 %).
STREAM = ".L1::no_allocate.L2::128B"
_BLOCK_BYTES = 2 * tiles.BLOCK  # of 16-bit activations
_WEIGHTS = tl.constexpr(text.loads(4, 512, ".nc" + STREAM))
_WEIGHTS_FENCED = tl.constexpr(text.loads(4, 512, STREAM, fenced=True))
_WEIGHTS_GUARDED = tl.constexpr(text.loads(4, 512, ".nc" + STREAM, guarded=True))
_WEIGHTS_GUARDED_COHERENT = tl.constexpr(text.loads(4, 512, STREAM, guarded=True))
_LOAD_16, _LOAD_16_GUARDED = signature("16r", "l"), signature("16r", "l", "r")
_FOUR, _LOAD_4 = tl.constexpr(text.loads(1, 0, ".ca")), signature("4f", "l")
_FENCE = tl.constexpr(text.fence())
_STORES = tl.constexpr(text.stores(4, 512))
_STORES_GUARDED = tl.constexpr(text.stores(4, 512, guarded=True))
_STORE_16, _STORE_16_GUARDED = signature("1r", "16r", "l"), signature("1r", "16r", "l", "r")
_ROWS = tl.constexpr(text.loads(2, _BLOCK_BYTES, ".ca"))
_ROWS_GUARDED = tl.constexpr(text.loads(2, _BLOCK_BYTES, ".ca", guarded=True))
_LOAD_8, _LOAD_8_GUARDED = signature("8r", "l"), signature("8r", "l", "r")
_PEAKS = tl.constexpr(text.loads(1, 0, ".ca", words=2, guarded=True))
_LOAD_2_GUARDED = signature("2r", "l", "r")
_SCALES_128 = tl.constexpr(text.rounding_scales(True))
_SCALES_32 = tl.constexpr(text.rounding_scales(False))
_TWO_OF_THREE = signature("2r", "3r")
_ROUND, _ROUNDED = tl.constexpr(text.round_words()), signature("4r", "6r")
_PEAK = tl.constexpr(text.peak_of_channels())
_QUAD, _SUM_OF_QUAD = tl.constexpr(text.sum_of_quad()), signature("1f", "1f")
_TO_HALF, _FOUR_OF_FOUR = tl.constexpr(text.half_from_bfloat(4)), signature("4r", "4r")
_SUM_4, _SUM_8 = tl.constexpr(text.sum_over_warps(4)), tl.constexpr(text.sum_over_warps(8))
_SUM = signature("2f", "8f")


@triton.jit
def position(WARPS: tl.constexpr):
    """Warp, g and q of each thread: three int32 tensors [32 * WARPS]."""
    thread = tl.arange(0, 32 * WARPS)
    return thread // 32, thread % 32 // 4, thread % 4


@triton.jit
def zero_sums(WARPS: tl.constexpr):
    """The eight sums of a lane before anything was added."""
    zero = tl.full((32 * WARPS,), 0.0, tl.float32)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit
def sum_over_warps(sums, WARPS: tl.constexpr):
    """Adds the sums of 4 or 8 warps; each thread receives two. Once per program: its shared memory is not reused."""
    if WARPS == 4:
        TEXT: tl.constexpr = _SUM_4
    else:
        TEXT: tl.constexpr = _SUM_8
    return tl.inline_asm_elementwise(TEXT, _SUM, sums, dtype=(tl.float32,) * 2, is_pure=False, pack=1)


@triton.jit
def places(WARPS: tl.constexpr):
    """Where the two sums of each thread belong.

    Returns the weight row of the first within the tile (the second's is 16 below it), the activation row, and
    which threads hold a sum that no other holds.
    """
    warp, g, q = position(WARPS)
    return warp % 4 // 2 * 8 + g, 2 * q + warp % 2, warp < 4


@triton.jit
def blocks_left(chunk, BLOCKS: tl.constexpr):
    """How many blocks of a chunk exist in a row of BLOCKS blocks: 4, fewer, or none (zero or less)."""
    return tl.minimum(BLOCKS - 4 * chunk, 4)


@triton.jit
def load_weights(
    pointer, blocks, GUARDED: tl.constexpr, FENCED: tl.constexpr, COHERENT: tl.constexpr = False
):
    """Four times 16 bytes of a packed tile, 512 bytes apart: 16 words.

    GUARDED: load i only where `blocks` exceeds i, zeros elsewhere. FENCED: keep the loads together; ptxas else
    spreads them over the arithmetic, which costs gate and up 4 % and gains 3 % for down. COHERENT: see what this thread
    wrote before: kept together too, and not through the read-only path.
    """
    if GUARDED:
        if COHERENT:
            GUARDED_TEXT: tl.constexpr = _WEIGHTS_GUARDED_COHERENT
        else:
            GUARDED_TEXT: tl.constexpr = _WEIGHTS_GUARDED
        return tl.inline_asm_elementwise(
            GUARDED_TEXT,
            _LOAD_16_GUARDED,
            [pointer, blocks],
            dtype=(tl.int32,) * 16,
            is_pure=False,
            pack=1,
        )
    elif FENCED or COHERENT:
        return tl.inline_asm_elementwise(
            _WEIGHTS_FENCED, _LOAD_16, [pointer], dtype=(tl.int32,) * 16, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _WEIGHTS, _LOAD_16, [pointer], dtype=(tl.int32,) * 16, is_pure=True, pack=1
        )


@triton.jit
def load_four(pointer):
    """Four float32 numbers from a multiple of 16 bytes on."""
    return tl.inline_asm_elementwise(
        _FOUR, _LOAD_4, [pointer], dtype=(tl.float32,) * 4, is_pure=False, pack=1
    )


@triton.jit
def fence(word):
    """Keeps the loads in front of it there; ptxas may else make them where they are used. `word` is any int32."""
    tl.inline_asm_elementwise(_FENCE, FROM_ONE_TO_ONE, [word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_weights(pointer, words, blocks, GUARDED: tl.constexpr):
    """The 16 words of `load_weights` to the same places of another tile."""
    if GUARDED:
        tl.inline_asm_elementwise(
            _STORES_GUARDED,
            _STORE_16_GUARDED,
            words + (pointer, blocks),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _STORES, _STORE_16, words + (pointer,), dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_rows(pointer, blocks, GUARDED: tl.constexpr):
    """A lane's 16-bit activations of two blocks, from the pointer to its first: 8 words; guarded like weights."""
    if GUARDED:
        return tl.inline_asm_elementwise(
            _ROWS_GUARDED, _LOAD_8_GUARDED, [pointer, blocks], dtype=(tl.int32,) * 8, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _ROWS, _LOAD_8, [pointer], dtype=(tl.int32,) * 8, is_pure=True, pack=1
        )


@triton.jit
def half_words(x):
    """Four words of bf16 activations as fp16: exact from 2^-17 to 65504, below off by 2^-25 at most."""
    return tl.inline_asm_elementwise(_TO_HALF, _FOUR_OF_FOUR, x, dtype=(tl.int32,) * 4, is_pure=True, pack=1)


@triton.jit
def peak_of_channels(bits):
    """The largest over g of non-negative int32 `bits`, in every lane of the same q."""
    return tl.inline_asm_elementwise(_PEAK, FROM_ONE_TO_ONE, [bits], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of_quad(x):
    """The sum over q of float32 `x`, in every lane of the same g."""
    return tl.inline_asm_elementwise(_QUAD, _SUM_OF_QUAD, [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def load_peaks(pointer, blocks, q):
    """The four peaks (fp16) of a chunk that belong to lane q of a row: 2 words; zeros where block q is missing."""
    present = (blocks > q).to(tl.int32)
    return tl.inline_asm_elementwise(
        _PEAKS, _LOAD_2_GUARDED, [pointer, present], dtype=(tl.int32,) * 2, is_pure=False, pack=1
    )


@triton.jit
def rounding_scales(peaks, block, TOGETHER: tl.constexpr):
    """1 / scale and scale of the FP8 rounding of a block of a chunk, TOGETHER (128 or 32) columns sharing one.

    The activations, and so their peaks, carry HIDDEN_GAIN.
    """
    if TOGETHER == 128:
        TEXT: tl.constexpr = _SCALES_128
    else:
        TEXT: tl.constexpr = _SCALES_32
    return tl.inline_asm_elementwise(
        TEXT, _TWO_OF_THREE, [peaks[0], peaks[1], block], dtype=(tl.int32,) * 2, is_pure=False, pack=1
    )


@triton.jit
def rounded_words(x, scales):
    """FP8 round trip of four words of fp16 activations with the factors of `rounding_scales`."""
    return tl.inline_asm_elementwise(
        _ROUND, _ROUNDED, x + scales, dtype=(tl.int32,) * 4, is_pure=True, pack=1
    )
