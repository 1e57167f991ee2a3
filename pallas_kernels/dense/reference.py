"""What the dense products compute, in plain jax.numpy on the packed weights.

Knows: which columns of the input a group of rows sees. Does not know: who rounded the input, or which matrices
were joined. Source: DeepSeek inference/model.py (`Linear`, and the grouped `wo_a` of `Attention`).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.tiles import PackedMatrix


def product(x: jax.Array, matrix: PackedMatrix, *, groups: int = 1) -> jax.Array:
    """x W^T for a packed FP8 matrix, float32 [1, R, N], N padded to tiles.

    Args:
      x: [R, groups * K], float16 if the model rounds this input, else bfloat16 or float32.
      groups: rows of W that form groups of equal size, each with its own K columns of x.
    """
    weight = tiles.unpack_fp8(matrix)
    x = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    weight = weight.reshape(groups, -1, weight.shape[1])[..., : x.shape[2]]
    result = jnp.einsum("tgk,gnk->tgn", x, weight, precision=jax.lax.Precision.HIGHEST)
    return result.reshape(1, x.shape[0], -1)


def exact_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W^T for a BF16 weight [N, K] with nothing of x [R, K] lost, float32 [1, R, N]."""
    return jnp.einsum(
        "tk,nk->tn", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )[None]
