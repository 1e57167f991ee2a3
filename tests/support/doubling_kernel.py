"""A Triton kernel for tests of what surrounds kernels: y = 2 x. Triton reads its source, so it lives in a file."""

import triton
import triton.language as tl


@triton.jit
def doubling_kernel(x, y, n: tl.constexpr):
    place = tl.arange(0, n)
    tl.store(y + place, tl.load(x + place) * 2.0)
