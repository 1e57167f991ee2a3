"""The heads of the published models and of the small ones of this repository (configs/models/)."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tiles


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """A head over `tokens` tokens, for hidden rows of `width` numbers of type `dtype`."""

    tokens: int
    width: int
    dtype: str = "bfloat16"

    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape of the weight."""
        return jax.ShapeDtypeStruct((self.tokens, self.width), jnp.bfloat16)

    def input(self) -> jax.ShapeDtypeStruct:
        """Shape of the hidden rows."""
        return jax.ShapeDtypeStruct((tiles.ROWS, self.width), jnp.dtype(self.dtype))


V4_FLASH, V41_FLASH = HeadSpec(129280, 4096), HeadSpec(129280, 5120)
DEMO, TWIN = HeadSpec(4160, 256, dtype="float32"), HeadSpec(4160, 128, dtype="float32")
SPECS = {"v4-flash": V4_FLASH, "v4.1-flash": V41_FLASH, "demo": DEMO, "twin": TWIN}
