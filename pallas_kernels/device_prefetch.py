"""Asking for weights in the second-level cache before they can be used, or reading them into it.

Knows: the one instruction, and that it is a hint: nothing waits for it and no result depends on it; and loads whose
values are dropped. Does not know: which bytes are whose.

A program that waits for rows asks for its weights first, so that memory is busy while small kernels are not.
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import INTERPRETED

# One thread asks, the one whose WHICH is 0. $1: first byte, a multiple of 16; $2: bytes, a multiple of 16 and not zero.
_ASKING = """{
.reg .pred one;
.reg .b32 number;
mov.b32 $0, 0;
mov.u32 number, WHICH;
setp.eq.u32 one, number, 0;
@one cp.async.bulk.prefetch.L2.global [$1], $2;
}"""
_ASK = tl.constexpr(_ASKING.replace("WHICH", "%tid.x"))
_ASK_BY_WARPS = tl.constexpr(_ASKING.replace("WHICH", "%laneid"))  # the first thread of each warp


@triton.jit
def prefetch(pointer, size):
    """Asks for `size` bytes (int32, a positive multiple of 16) from `pointer` on; no work in the interpreter."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(_ASK, "=r,l,r", [pointer, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_by_warps(pointers, size):
    """`prefetch` for each warp of its own: of `pointers`, one for each thread, that of its first thread counts."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            _ASK_BY_WARPS, "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_share(pointer, share, SHARES: tl.constexpr, SIZE: tl.constexpr):
    """Asks for one of SHARES equal shares of the SIZE bytes (a multiple of 16) from `pointer` on."""
    if not INTERPRETED:
        PIECE: tl.constexpr = (SIZE + 128 * SHARES - 1) // (128 * SHARES) * 128
        first = share * PIECE
        if first < SIZE:
            prefetch(pointer.to(tl.pointer_type(tl.int8)) + first, tl.minimum(SIZE - first, PIECE))


AT_ONCE = tl.constexpr(1 << 13)  # words that a program has under way: 32 registers of each of 256 threads


@triton.jit
def read_share(pointer, share, SHARES: tl.constexpr, SIZE: tl.constexpr):
    """Reads one of SHARES equal shares of the SIZE bytes (a multiple of 128) from `pointer` on and drops them.

    The second-level cache holds them then: loads are no hints. An H200 whose cache was asked for 16 MB by `prefetch` in
    pieces of 254 KB read them no faster afterwards.
    """
    if not INTERPRETED:
        WORDS: tl.constexpr = SIZE // 4
        PIECE: tl.constexpr = (WORDS + 32 * SHARES - 1) // (32 * SHARES) * 32
        words = pointer.to(tl.pointer_type(tl.int32)) + share * PIECE
        left = tl.minimum(WORDS - share * PIECE, PIECE)
        for first in range(0, PIECE, AT_ONCE):
            word = first + tl.arange(0, AT_ONCE)
            tl.load(words + word, mask=word < left, volatile=True)
