"""What distinguishes one router from another, and the routers of the published models.

Knows: the numbers a router needs and their values for V4-Flash, V4.1-Flash and the small models of this repository
(configs/models/). Does not know: how a router is computed.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The constants of one router.

    Attributes:
      width: D. experts: E. chosen: K, experts a row is sent to.
      scaling: factor of the normalised weights.
      sum_eps: added to the sum they are divided by.
    """

    width: int
    experts: int
    chosen: int
    scaling: float = 1.5
    sum_eps: float = 0.0


V4_FLASH = RouterSpec(4096, 256, 6)
V41_FLASH = RouterSpec(5120, 384, 6, sum_eps=1e-20)
V41_DRAFTER = RouterSpec(5120, 128, 3, sum_eps=1e-20)
DEMO = RouterSpec(256, 16, 2, sum_eps=1e-20)
DEMO_DRAFTER = RouterSpec(256, 8, 2, sum_eps=1e-20)
TWIN = RouterSpec(128, 8, 2)
SPECS = {
    "v4-flash": V4_FLASH, "v4.1-flash": V41_FLASH, "v4.1-flash drafter": V41_DRAFTER, "demo": DEMO,
    "demo drafter": DEMO_DRAFTER, "twin": TWIN,
}  # fmt: skip
