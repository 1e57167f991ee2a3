"""The dense products of the published models and of the small ones of this repository (configs/models/)."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.tiles import PackedMatrix


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """An FP8 product.

    Attributes:
      rows, columns: N and K of the weight. groups: of rows, each with K columns of its own.
      block: of the weight scales, 128 or 32.
      dtype: name of the input's type, float16 where the model rounds it.
    """

    rows: int
    columns: int
    block: int
    groups: int = 1
    dtype: str = "float16"

    def matrix(self) -> PackedMatrix:
        """Shapes of the packed weight."""
        return tiles.fp8_shape(self.rows, self.columns)

    def input(self) -> jax.ShapeDtypeStruct:
        """Shape of the activations."""
        return jax.ShapeDtypeStruct((tiles.ROWS, self.groups * self.columns), jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class ExactSpec:
    """A BF16 product with an unrounded input; `beside` is an FP8 product of the same rows' rounded form."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    beside: ProductSpec | None = None

    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape of the joined weight."""
        return jax.ShapeDtypeStruct((tiles.padded(self.rows, tiles.TILE), self.columns), jnp.bfloat16)

    def input(self) -> jax.ShapeDtypeStruct:
        """Shape of the activations."""
        return jax.ShapeDtypeStruct((tiles.ROWS, self.columns), jnp.dtype(self.dtype))


# wq_a and wkv; wq_b alone and with the indexer's; wo_a; wo_b.
PRODUCTS = {
    "v4-flash wq_a wkv": ProductSpec(1024 + 512, 4096, 128),
    "v4-flash wq_b": ProductSpec(32768, 1024, 128),
    "v4-flash wq_b index": ProductSpec(32768 + 8192, 1024, 128),
    "v4-flash wo_a": ProductSpec(8192, 4096, 128, groups=8, dtype="bfloat16"),
    "v4-flash wo_b": ProductSpec(4096, 8192, 128),
    "v4.1-flash wq_a wkv": ProductSpec(1280 + 512, 5120, 32),
    "v4.1-flash wq_b": ProductSpec(32768, 1280, 32),
    "v4.1-flash wq_b index": ProductSpec(32768 + 4096, 1280, 32),
    "v4.1-flash wo_a": ProductSpec(8192, 4096, 32, groups=8, dtype="bfloat16"),
    "v4.1-flash wo_b": ProductSpec(5120, 8192, 32),
    "demo wq_a wkv": ProductSpec(128 + 64, 256, 32),
    "demo wq_b index": ProductSpec(512 + 512, 128, 32),
    "demo wo_a": ProductSpec(256, 256, 32, groups=2, dtype="float32"),
    "demo wo_b": ProductSpec(256, 256, 32),
}
# Router; compressor, index compressor and index weights of a source layer, with wq_a and wkv.
EXACT_PRODUCTS = {
    "v4-flash router": ExactSpec(256, 4096),
    "v4-flash ratio 4": ExactSpec(2 * 1024 + 2 * 256 + 64, 4096, beside=PRODUCTS["v4-flash wq_a wkv"]),
    "v4-flash ratio 128": ExactSpec(2 * 512, 4096, beside=PRODUCTS["v4-flash wq_a wkv"]),
    "v4.1-flash router": ExactSpec(384, 5120),
    "v4.1-flash ratio 2": ExactSpec(2 * 512 + 32, 5120, beside=PRODUCTS["v4.1-flash wq_a wkv"]),
    "v4.1-flash ratio 1": ExactSpec(512 + 32, 5120, beside=PRODUCTS["v4.1-flash wq_a wkv"]),
    "demo router": ExactSpec(16, 256, dtype="float32"),
    "demo ratio 2": ExactSpec(2 * 64 + 8, 256, dtype="float32", beside=PRODUCTS["demo wq_a wkv"]),
}
