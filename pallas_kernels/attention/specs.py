"""Shapes of the attention core: the real checkpoints and the demonstration model."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is fixed about one model's attention.

    Attributes:
      heads, width: query heads, and the width of a head, a key and a value.
      rope: how many of the last columns are rotated.
      window: positions a query sees of the ring, its own included.
      norm_eps: epsilon of the unweighted norm of each query head; None means that there is none.
      dtype: name of the model's type.
    """

    heads: int
    width: int
    rope: int
    window: int
    norm_eps: float | None
    dtype: str = "bfloat16"

    @property
    def type(self):
        return jnp.dtype(self.dtype)

    @property
    def padded(self) -> int:
        """Columns of a tile: the power of two at or above `width`."""
        return 1 << (self.width - 1).bit_length()


V4_FLASH = AttentionSpec(heads=64, width=512, rope=64, window=128, norm_eps=1e-6)
V41_FLASH = AttentionSpec(heads=64, width=512, rope=64, window=128, norm_eps=None)
DEMO = AttentionSpec(heads=8, width=64, rope=32, window=128, norm_eps=None, dtype="float32")
