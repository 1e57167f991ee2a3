"""The experts of the published models and of the small ones of this repository (configs/models/)."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.reference import PEAK_CHANNELS, Hidden, Routes


@dataclasses.dataclass(frozen=True)
class ExpertSpec:
    """What is fixed about one model's experts.

    Attributes:
      width: D. channels: F. experts: how many there are. chosen: how many a row uses.
      block: of the shared expert's weight scales and of the hidden rows' rounding, 128 or 32.
      limit: clamp of the SwiGLU.
      dtype: name of the model's type.
    """

    width: int
    channels: int
    experts: int
    chosen: int
    block: int
    limit: float = 10.0
    dtype: str = "bfloat16"

    @property
    def entries(self) -> int:
        """Length of the expert list of 8 rows."""
        return tiles.ROWS * self.chosen

    def routed(self, experts: int | None = None) -> PackedExperts:
        """Shapes of an arena of `experts` packed experts, by default all."""
        count = experts or self.experts
        return PackedExperts(
            tiles.fp4_shape(2 * self.channels, self.width, count),
            tiles.fp4_shape(self.width, self.channels, count),
        )

    def shared(self) -> PackedExperts:
        """Shapes of the packed shared expert."""
        return PackedExperts(
            tiles.fp8_shape(2 * self.channels, self.width), tiles.fp8_shape(self.width, self.channels)
        )

    def routes(self) -> Routes:
        """Shapes of the expert list."""
        each = (self.entries, tiles.ROWS)
        return Routes(
            jax.ShapeDtypeStruct((self.entries,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct(each, jnp.float32),
            jax.ShapeDtypeStruct(each, jnp.int32),
        )

    def hidden(self) -> Hidden:
        """Shapes of what gate and up hand to down."""
        each = (1 + self.entries, tiles.ROWS, self.channels)
        return Hidden(
            jax.ShapeDtypeStruct(each, jnp.float16),
            jax.ShapeDtypeStruct((*each[:2], self.channels // PEAK_CHANNELS), jnp.float16),
        )


V4_FLASH = ExpertSpec(4096, 2048, 256, 6, 128)
V41_FLASH = ExpertSpec(5120, 2304, 384, 6, 32)
V41_DRAFTER = ExpertSpec(5120, 2304, 128, 3, 32)
DEMO = ExpertSpec(256, 128, 16, 2, 32, dtype="float32")
TWIN = ExpertSpec(128, 96, 8, 2, 128, dtype="float32")
SPECS = {
    "v4-flash": V4_FLASH, "v4.1-flash": V41_FLASH, "v4.1-flash drafter": V41_DRAFTER, "demo": DEMO, "twin": TWIN,
}  # fmt: skip
