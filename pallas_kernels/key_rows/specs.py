"""Shapes of the cache writes of one layer: the real checkpoints and the demonstration model."""

import dataclasses

import jax.numpy as jnp

FP8_BLOCKS, FP4_GROUPS = "fp8 blocks", "fp4 groups"
ENTRY_GROUP = 16
INDEX_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """Key-value rows and query latents of one model.

    Attributes:
      width: columns of a key-value row; the last `rope` of them are rotated.
      norm_eps: epsilon of all norms.
      rounded, block: the first `rounded` columns are rounded to E4M3 in blocks of `block`.
      latent_block: block of the activation rounding of query latents.
      quantise: whether anything is rounded beyond the model's type at all.
      dtype: name of the model's type.
    """

    width: int
    rope: int
    norm_eps: float
    rounded: int
    block: int
    latent_block: int
    quantise: bool = True
    dtype: str = "bfloat16"

    @property
    def type(self):
        return jnp.dtype(self.dtype)

    @property
    def latent_type(self):
        """Rounded latents are exact in float16, the type in which products read them."""
        return jnp.dtype(jnp.float16) if self.quantise else self.type


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Compressed entries of one kind of layer.

    Attributes:
      ratio: positions per entry.
      overlap: an entry also pools the first halves of the group before its own.
      rounding: how entries are rounded, FP8_BLOCKS (as key-value rows) or FP4_GROUPS (E2M1, E4M3 scales per 16).
      index_width, index_rope: columns of an index key, the last of which are rotated; 0 without an index.
      hadamard: index keys are turned into the Hadamard basis before they are rounded.
    """

    ratio: int
    overlap: bool
    rounding: str
    index_width: int = 0
    index_rope: int = 0
    hadamard: bool = False

    def closing(self, rows: int) -> int:
        """The most entries that a pass of `rows` rows can complete."""
        return -(-rows // self.ratio)


V4_FLASH = RowSpec(width=512, rope=64, norm_eps=1e-6, rounded=448, block=64, latent_block=128)
V41_FLASH = RowSpec(width=512, rope=64, norm_eps=1e-20, rounded=512, block=32, latent_block=32)
DEMO = RowSpec(
    width=64, rope=32, norm_eps=1e-20, rounded=64, block=32, latent_block=32, quantise=False, dtype="float32"
)  # fmt: skip
V4_RATIO_4 = PoolSpec(4, True, FP8_BLOCKS, index_width=128, index_rope=64, hadamard=True)
V4_RATIO_128 = PoolSpec(128, False, FP8_BLOCKS)
V41_RATIO_2 = PoolSpec(2, False, FP4_GROUPS, index_width=128, index_rope=64)
V41_RATIO_1 = PoolSpec(1, False, FP4_GROUPS, index_width=128, index_rope=64)
DEMO_RATIO_2 = PoolSpec(2, False, FP4_GROUPS, index_width=64, index_rope=32)
DEMO_RATIO_1 = PoolSpec(1, False, FP4_GROUPS, index_width=64, index_rope=32)
