"""Matrices that share their input as one packed matrix, and activations as terms that matrix units multiply exactly.

Knows: how rows of several matrices follow each other. Does not know: the bits of a tile (`pallas_kernels.tiles`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.tiles import PackedMatrix


def pack_fp8(
    matrices: Sequence[tuple[jax.Array, jax.Array]], block: int, name: str = "weight"
) -> PackedMatrix:
    """E4M3 weights [N_i, K] with scale bytes per block x block as one packed matrix [sum of N_i, K].

    Every N_i must be a multiple of 32, the last may be any. Raises ValueError for shapes that do not fit.
    """
    for weight, _ in matrices[:-1]:
        if weight.shape[0] % tiles.TILE:
            raise ValueError(
                f"{name} has {weight.shape[0]} rows, expected a multiple of {tiles.TILE} to join others"
            )
    packed = [tiles.pack_fp8(weight, scale, block, name) for weight, scale in matrices]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *packed)


def join_bf16(matrices: Sequence[jax.Array]) -> jax.Array:
    """BF16 weights [N_i, K] as one [N, K], N padded with zero rows to a multiple of 32; K a multiple of 64."""
    joined = jnp.concatenate([matrix.astype(jnp.bfloat16) for matrix in matrices])
    if joined.shape[1] % 64:
        raise ValueError(f"BF16 weights have {joined.shape[1]} columns, expected a multiple of 64")
    return jnp.pad(joined, ((0, -joined.shape[0] % tiles.TILE), (0, 0)))


def bfloat_terms(x: jax.Array) -> jax.Array:
    """x [R, K] as bf16 [terms, R, K] whose sum is x exactly: one term of bf16 x, three of float32 x."""
    if x.dtype == jnp.bfloat16:
        return x[None]
    first = _upper_bits(x, 0xFFFF0000)
    second = _upper_bits(x - first, 0xFFFF0000)
    return jnp.stack([first, second, x - first - second]).astype(jnp.bfloat16)


def half_terms(x: jax.Array) -> jax.Array:
    """x [R, K] as terms [terms, R, K]: fp16 and bf16 as they are, float32 as two of fp16 (off by 2^-24 at most).

    Exact meaning for bf16: the kernel reads it as fp16, see `register_mma.lanes.half_words`.
    """
    if x.dtype != jnp.float32:
        return x[None]
    first = _upper_bits(x, 0xFFFFE000)
    return jnp.stack([first, x - first]).astype(jnp.float16)


def _upper_bits(x: jax.Array, mask: int) -> jax.Array:
    """float32 x cut to the masked bits (a conversion there and back could be optimised away)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(mask)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
