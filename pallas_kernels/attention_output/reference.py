"""The output projection of attention in plain jax.numpy on packed weights.

Knows: that the first matrix is grouped, and how the model rounds what lies between both. Does not know: where heads
come from. Source: DeepSeek inference/model.py (the grouped `wo_a` of `Attention`, and `wo_b`).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.dense import reference as dense
from pallas_kernels.tiles import PackedMatrix


def latent(heads: jax.Array, first: PackedMatrix, *, groups: int, round_block: int, dtype) -> jax.Array:
    """The first product as the second one reads it: [R, L] rounded to `dtype` and, in blocks, as activations.

    The result is float16 where it is rounded as activations; `round_block` 0 leaves it at `dtype`.
    """
    made = dense.product(heads, first, groups=groups)[0].astype(dtype)
    return formats.fp8_round_trip(made, round_block).astype(jnp.float16) if round_block else made


def project(
    heads: jax.Array, first: PackedMatrix, second: PackedMatrix, *, groups: int, round_block: int, dtype
) -> jax.Array:
    """The output float32 [1, R, D] of heads [R, H * d] in the model's type `dtype`.

    Args:
      first: packed [L, H * d / groups]; its rows form `groups` of equal size, each with its own columns of the heads.
      second: packed [D, L].
      round_block: block of the activation rounding of the latent, 0 where nothing is rounded.
    """
    return dense.product(latent(heads, first, groups=groups, round_block=round_block, dtype=dtype), second)
