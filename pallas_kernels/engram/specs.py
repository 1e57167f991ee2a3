"""What distinguishes one Engram layer from another, and the layers of V4.1-Flash and of the demonstration model.

Knows: the numbers an Engram layer needs. Does not know: its primes and multipliers, which follow from a random
generator and are arguments.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class EngramSpec:
    """The constants of one Engram layer.

    Attributes:
      width: D. streams: S.
      ngrams: the largest n-gram; hashes are made for 2 .. ngrams tokens.
      heads: hashes of each n-gram size. head_dim: width of a table row.
      pad: token id that stands before the start of the text.
      block: columns that share a scale when the looked-up row is rounded to E4M3; 0 leaves it unrounded.
      eps: of the norms. dtype: of streams, float32 or bfloat16.
    """

    width: int
    ngrams: int
    heads: int
    head_dim: int
    pad: int
    block: int = 32
    streams: int = 4
    eps: float = 1e-20
    dtype: str = "bfloat16"

    @property
    def columns(self) -> int:
        """Table rows read for a token."""
        return (self.ngrams - 1) * self.heads

    @property
    def type(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


V41_FLASH = EngramSpec(5120, 4, 8, 256, 2)
DEMO = EngramSpec(256, 4, 2, 32, 2, dtype="float32")
SPECS = {"v4.1-flash": V41_FLASH, "demo": DEMO}
