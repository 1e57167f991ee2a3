"""Asking for weights in the second-level cache before they can be used.

Knows: the one instruction, and that it is a hint: nothing waits for it and no result depends on it. Does not
know: which bytes are whose.

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
