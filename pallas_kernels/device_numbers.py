"""Number formats inside Triton kernels: the device forms of pallas_kernels/formats.py.

Knows: how float32 values become those a bfloat16 array holds, the activation rounding (E4M3 on a power-of-two scale
per block), decoding of E4M3 and E8M0 bytes, and float32 numbers in three parts. Does not know: any operation of the
model.

The functions give the same bits compiled and interpreted, as far as the arithmetic of both agrees. Triton's
interpreter truncates where the hardware rounds to bfloat16, hence the two bodies of `rounded`.
"""

import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import launch
from pallas_kernels.formats import ACTIVATION_FLOOR as _ACTIVATION_FLOOR
from pallas_kernels.formats import E4M3_MAX as _E4M3_MAX

INTERPRETED = tl.constexpr(launch.INTERPRETED)
E4M3_MAX = tl.constexpr(_E4M3_MAX)
ACTIVATION_FLOOR = tl.constexpr(_ACTIVATION_FLOOR)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


def triton_type(dtype) -> tl.dtype:
    """Triton's name of float32 or bfloat16, as a kernel's constant."""
    return {jnp.dtype(jnp.float32): tl.float32, jnp.dtype(jnp.bfloat16): tl.bfloat16}[jnp.dtype(dtype)]


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` as an array of `dtype` (float32 or bfloat16) would hold it, still float32."""
    if dtype == tl.bfloat16:
        if INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            return bits.to(tl.float32, bitcast=True)
        else:
            # Two at once: a conversion of a single number takes as long as those of sixteen.
            return tl.inline_asm_elementwise(
                "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16;"
                " and.b32 $1, both, 0xFFFF0000; }",
                "=r,=r,r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
    else:
        return x


@triton.jit
def inverse_rms(sum_of_squares, count: tl.constexpr, eps: tl.constexpr):
    """rsqrt(mean + eps), finite for all-zero rows."""
    return tl.rsqrt(tl.maximum(sum_of_squares / count + eps, SMALLEST_NORMAL))


@triton.jit
def round_activations(x, axis: tl.constexpr):
    """`formats.fp8_round_trip` with one block along `axis` of float32 `x`; the values returned fit float16."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=axis, keep_dims=True), ACTIVATION_FLOOR)
    bits = tl.div_rn(largest, E4M3_MAX).to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return round_e4m3(x * inverse) * scale


@triton.jit
def round_e4m3(x):
    """Nearest E4M3 value, ties to even, saturating; NaN stays NaN.

    Adding and removing a number whose last bit is one step of E4M3 rounds to that step.
    """
    x = tl.maximum(x, -E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^23 steps of an eighth of the power of two
    return (x + anchor) - anchor


@triton.jit
def decode_e4m3(payload):
    """E4M3 bytes (uint8) to float32."""
    wide = payload.to(tl.uint32)
    magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(wide >= 128, -magnitude, magnitude)


@triton.jit
def decode_e8m0(payload):
    """Scale bytes (uint8) to float32 powers of two; byte 255, which no checkpoint holds, is infinity."""
    wide = payload.to(tl.uint32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def settled(x):
    """32-bit `x` itself, computed where its loads put it.

    Triton likes to carry the layout of a product's operand, which every warp holds whole, back to all the loads that
    the operand comes from; one layout change per load is far dearer than one for the operand.
    """
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def thirds(x):
    """Three float32 numbers that bfloat16 holds and whose sum is `x`, the largest first.

    A float32 has 24 bits and a bfloat16 8; each remainder is exact. (The last may underflow below |x| = 2^-110.)
    """
    high = rounded(x, tl.bfloat16)
    rest = x - high
    middle = rounded(rest, tl.bfloat16)
    return high, middle, rest - middle
