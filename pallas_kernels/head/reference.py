"""What the head computes, in plain jax.numpy.

Source: DeepSeek inference/model.py (`ParallelHead`); logits are float32.
"""

import jax
import jax.numpy as jnp


def logits_argmax(x: jax.Array, weight: jax.Array, *, logits: bool = False):
    """Each row's best token int32 [R] (ties to the lowest id) and its logit float32 [R].

    Args:
      x: normed hidden rows [R, D], bfloat16 or float32.
      weight: bfloat16 [V, D].
      logits: return the logits float32 [R, V] as a third array.
    """
    full = jnp.einsum(
        "rk,vk->rv", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    best = jnp.argmax(full, axis=1).astype(jnp.int32), jnp.max(full, axis=1)
    return (*best, full) if logits else best
