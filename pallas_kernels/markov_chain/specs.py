"""What distinguishes one drafter's Markov chain from another, and the chains of the published and small models.

Knows: vocabulary and rank. Does not know: how many tokens are drafted, which is data.
"""

import dataclasses

from pallas_kernels.sampling_law.specs import block_of


@dataclasses.dataclass(frozen=True)
class ChainSpec:
    """Vocabulary V and the rank of the bias."""

    vocabulary: int
    rank: int

    @property
    def block(self) -> int:
        """Tokens of one block of the two-level draw: about the square root of V, a power of two."""
        return block_of(self.vocabulary)

    @property
    def blocks(self) -> int:
        return -(-self.vocabulary // self.block)


V4_FLASH = ChainSpec(129280, 256)
V41_FLASH = ChainSpec(129280, 256)
DEMO = ChainSpec(4160, 64)
TWIN = ChainSpec(4160, 8)
SPECS = {"v4-flash": V4_FLASH, "v4.1-flash": V41_FLASH, "demo": DEMO, "twin": TWIN}
