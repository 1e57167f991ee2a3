"""Shapes of the index selection: the real checkpoints and the demonstration model."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class IndexSpec:
    """One layer's index.

    Attributes:
      heads, width: index query heads, and the width of an index vector; the last `rope` columns are rotated.
      ratio: positions per entry.
      topk: entries chosen for a row.
      role: None; 'source' also publishes the best `kept` blocks of `block` entries; 'member' chooses among them.
      block, kept: see `role`. Without a role, `block` only says how the search is cut.
      hadamard: queries are turned into the Hadamard basis before they are rounded.
      quantise: whether queries are rounded beyond the model's type.
      dtype: name of the model's type.
    """

    heads: int
    width: int
    rope: int
    ratio: int
    topk: int
    role: str | None = None
    block: int = 8
    kept: int = 0
    hadamard: bool = False
    quantise: bool = True
    dtype: str = "bfloat16"

    @property
    def type(self):
        return jnp.dtype(self.dtype)


V4_FLASH = IndexSpec(heads=64, width=128, rope=64, ratio=4, topk=512, hadamard=True)
V41_RATIO_2 = IndexSpec(heads=32, width=128, rope=64, ratio=2, topk=512)
V41_SOURCE = IndexSpec(heads=32, width=128, rope=64, ratio=1, topk=512, role="source", kept=2048)
V41_MEMBER = IndexSpec(heads=32, width=128, rope=64, ratio=1, topk=512, role="member", kept=2048)
DEMO_RATIO_2 = IndexSpec(heads=8, width=64, rope=32, ratio=2, topk=64, quantise=False, dtype="float32")
DEMO_SOURCE = IndexSpec(
    heads=8, width=64, rope=32, ratio=1, topk=64, role="source", kept=32, quantise=False, dtype="float32"
)  # fmt: skip
DEMO_MEMBER = IndexSpec(
    heads=8, width=64, rope=32, ratio=1, topk=64, role="member", kept=32, quantise=False, dtype="float32"
)  # fmt: skip
