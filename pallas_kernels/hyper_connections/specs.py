"""What distinguishes one model's sublayer boundaries from another's, and the boundaries of the published models.

Knows: the numbers a boundary needs, and their values for V4-Flash, V4.1-Flash and the small models of this
repository (configs/models/). Does not know: how a boundary is computed.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class BoundarySpec:
    """The constants of every boundary of one model.

    Attributes:
      width: D.
      streams: S.
      delayed: the collapse uses the weights that the boundary before computed (V4.1).
      block: columns that share a scale when activations are rounded to E4M3; 0 leaves them unrounded.
      norm_eps: inside the RMS norms, and inside the mean square of the projection.
      mix_eps: added to sigmoids, softmax and the sums of the Sinkhorn steps.
      iterations: Sinkhorn steps.
      dtype: of streams and normed rows, float32 or bfloat16.
    """

    width: int
    streams: int = 4
    delayed: bool = False
    block: int = 128
    norm_eps: float = 1e-6
    mix_eps: float = 1e-6
    iterations: int = 20
    dtype: str = "bfloat16"

    @property
    def mixes(self) -> int:
        """Rows of the projection: pre [S], post [S], comb [S, S]."""
        return (2 + self.streams) * self.streams

    @property
    def type(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


V4_FLASH = BoundarySpec(4096)
V41_FLASH = BoundarySpec(5120, delayed=True, block=32, norm_eps=1e-20)
DEMO = BoundarySpec(256, delayed=True, block=32, norm_eps=1e-20, dtype="float32")
TWIN = BoundarySpec(128, streams=2, dtype="float32")
SPECS = {"v4-flash": V4_FLASH, "v4.1-flash": V41_FLASH, "demo": DEMO, "twin": TWIN}
