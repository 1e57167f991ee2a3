"""Number formats of the published checkpoints and of their simulated quantisation, in plain jax.numpy.

Knows: E4M3, E8M0 and packed E2M1 payloads, block scales, and the rounding round trips applied to activations,
cached rows and index vectors. Does not know: tensors' names, shapes of a model, or when a rounding applies.

Every round trip is a step function; its derivative here is the identity (straight-through), so that the same
functions serve inference and training. Source of the rules: DeepSeek inference/model.py and its kernels.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E4M3_NORMAL = 2.0**-6  # smallest normal number; below it numbers are whole multiples of 1 / _E4M3_STEPS
_E4M3_STEPS = 2.0**9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_GROUP = 32
ACTIVATION_FLOOR = 1e-4  # smallest block maximum the activation rounding scales to
_ENTRY_SCALE_FLOOR = 6 * 2.0**-9  # smallest maximum whose sixth is an E4M3 subnormal
_INDEX_FLOOR = 6 * 2.0**-126


def e8m0_to_float(payload: jax.Array) -> jax.Array:
    """Scale bytes [...] uint8 to float32: 2^(byte - 127); byte 0 is 2^-127 and byte 255 is NaN."""
    bits = payload.astype(jnp.uint32) << 23
    bits = jnp.where(payload == 0, jnp.uint32(1 << 22), bits)
    bits = jnp.where(payload == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e2m1_to_float(packed: jax.Array) -> jax.Array:
    """Packed FP4 [..., K/2] uint8 to float32 [..., K]; the low nibble is the even element.

    By arithmetic on the bits: a processor looks up one entry of a table after the other.
    """
    half = jnp.uint32(126 << 23)  # the bits of 0.5

    def value(nibble: jax.Array) -> jax.Array:
        # Exponent and mantissa stand side by side in both formats; E2M1 has one subnormal number, 0.5.
        nibble = nibble.astype(jnp.uint32)
        size = nibble & 7
        bits = jnp.where(size > 1, (size << 22) + half, size * half)
        return jax.lax.bitcast_convert_type(bits | ((nibble & 8) << 28), jnp.float32)

    return jnp.stack([value(packed & 0xF), value(packed >> 4)], axis=-1).reshape(*packed.shape[:-1], -1)


def decode_fp8(payload: jax.Array, scale: jax.Array, block: int) -> jax.Array:
    """Block-scaled E4M3 weight [..., N, K] with scale bytes [..., ceil(N/block), ceil(K/block)] to float32."""
    rows, columns = payload.shape[-2:]
    wide = jnp.repeat(jnp.repeat(e8m0_to_float(scale), block, axis=-2), block, axis=-1)
    return payload.astype(jnp.float32) * wide[..., :rows, :columns]


def decode_fp4(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Packed FP4 weight [..., N, K/2] with one scale byte per row and 32 columns [..., N, K/32] to float32."""
    return e2m1_to_float(packed) * jnp.repeat(e8m0_to_float(scale), FP4_GROUP, axis=-1)


def power_of_two_at_least(x: jax.Array) -> jax.Array:
    """The smallest power of two not below positive normal float32 `x`, from its bits (log2 would misround)."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Nearest E4M3 value (ties to even) of float32 `x`, saturating at 448.

    Not a conversion there and back: XLA removes that pair where it allows itself excess precision, as on GPUs.
    """
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    subnormal = jnp.round(x * _E4M3_STEPS) / _E4M3_STEPS
    return jnp.where(jnp.abs(x) < _E4M3_NORMAL, subnormal, jax.lax.reduce_precision(x, 8, 3))


def round_e2m1(x: jax.Array) -> jax.Array:
    """Nearest E2M1 value (ties to even) of float32 `x`, saturating at 6."""
    size = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step


def _straight_through(function):
    """Gives a rounding function `f(x, *static)` the derivative of the identity."""

    @functools.wraps(function)
    def call(x, *static):
        @jax.custom_jvp
        def rounded(value):
            return function(value, *static)

        rounded.defjvps(lambda tangent, answer, value: tangent)
        return rounded(x)

    return call


def _scaled_round_trip(
    x: jax.Array, block: int, floor: float, largest: float, round_scale: Callable, round_value: Callable
) -> jax.Array:
    """Rounds each `block` of the last axis on a scale of its own: round_scale(max(|x|, floor) / largest)."""
    if x.shape[-1] % block:
        raise ValueError(f"last axis is {x.shape[-1]}, expected a multiple of the block {block}")
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), axis=-1, keepdims=True), floor)
    scale = round_scale(amax / largest)
    return (round_value(grouped / scale) * scale).reshape(x.shape).astype(x.dtype)


@_straight_through
def fp8_round_trip(x: jax.Array, block: int) -> jax.Array:
    """Activation and window-row rounding: E4M3 with one power-of-two scale per `block` of the last axis.

    `x` [..., K] of any float type; result has its shape and type. Per block: a = max(|x|, 1e-4), scale =
    2^ceil(log2(a / 448)).
    """
    return _scaled_round_trip(x, block, ACTIVATION_FLOOR, E4M3_MAX, power_of_two_at_least, round_e4m3)


@_straight_through
def fp4_index_round_trip(x: jax.Array, block: int) -> jax.Array:
    """Index query and key rounding: E2M1 with one power-of-two scale per `block` of the last axis."""
    return _scaled_round_trip(x, block, _INDEX_FLOOR, E2M1_MAX, power_of_two_at_least, round_e2m1)


@_straight_through
def fp4_entry_round_trip(x: jax.Array, group: int) -> jax.Array:
    """Compressed-entry rounding of V4.1: E2M1 with an E4M3 scale per `group` of the last axis."""
    return _scaled_round_trip(x, group, _ENTRY_SCALE_FLOOR, E2M1_MAX, round_e4m3, round_e2m1)


def hadamard_transform(x: jax.Array) -> jax.Array:
    """Orthonormal Sylvester-order Hadamard transform of the last axis (a power of two)."""
    matrix = jnp.asarray(hadamard_matrix(x.shape[-1]))
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
    """Sylvester Hadamard matrix [size, size] scaled by size^-0.5, float32; size must be a power of two."""
    if size & (size - 1):
        raise ValueError(f"Hadamard size is {size}, expected a power of two")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix * np.float32(1 / math.sqrt(size))).astype(np.float32)


def encode_fp8(weight: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Float weight [..., N, K] to (E4M3 payload, scale bytes), the inverse of `decode_fp8`.

    N and K must be multiples of `block` or smaller than it.
    """
    rows, columns = weight.shape[-2:]
    br, bc = min(block, rows), min(block, columns)
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-2], rows // br, br, columns // bc, bc)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), axis=(-3, -1), keepdims=True), 2.0**-100)
    scale = power_of_two_at_least(amax / E4M3_MAX)
    payload = jnp.clip(grouped / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).reshape(weight.shape)
    return payload, _scale_bytes(scale[..., 0, :, 0])


def encode_fp4(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float weight [..., N, K] to (packed FP4 [..., N, K/2], scale bytes [..., N, K/32])."""
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, FP4_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), axis=-1, keepdims=True), 2.0**-100)
    scale = power_of_two_at_least(amax / E2M1_MAX)
    values = round_e2m1(grouped / scale).reshape(weight.shape)
    # Eight values are compared at once: a search would be a loop of launches for every weight that is trained.
    values_of_magnitude = jnp.asarray(E2M1_VALUES, jnp.float32)
    magnitude = jnp.searchsorted(values_of_magnitude, jnp.abs(values), method="compare_all").astype(jnp.uint8)
    nibble = magnitude | (jnp.signbit(values).astype(jnp.uint8) << 3)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4), _scale_bytes(scale[..., 0])


@_straight_through
def fp8_weight_round_trip(weight: jax.Array, block: int) -> jax.Array:
    """The weight as its block FP8 form would decode, in the same type (training with stored precision)."""
    return decode_fp8(*encode_fp8(weight, block), block).astype(weight.dtype)


@_straight_through
def fp4_weight_round_trip(weight: jax.Array) -> jax.Array:
    """The weight as its FP4 form would decode, in the same type."""
    return decode_fp4(*encode_fp4(weight)).astype(weight.dtype)


def _scale_bytes(scale: jax.Array) -> jax.Array:
    """Powers of two (float32) to their E8M0 bytes."""
    return (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
