"""Which expert lives where: a table (layer, expert) -> (tier, slot).

Knows: how a table is made from routed counts or without any, that every slot holds one expert, and how experts change
places. Does not know: arrays of weights, devices, or what a tier is to a model. A table is data of a program: another
one of the same shapes never compiles anything.

Tier 0 is the first device ("hot"), tier 1 the other memory ("cold"). Every layer has the same number of hot experts.
"""

import dataclasses

import numpy as np

from v4flash.errors import UsageError

HOT, COLD = 0, 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """The tier and the slot of every routed expert of every backbone layer.

    Attributes:
      tier: int32 [L, E], HOT or COLD.
      slot: int32 [L, E], the expert's place in its layer's stack of that tier, counted from 0.
    """

    tier: np.ndarray
    slot: np.ndarray

    def __post_init__(self):
        self._check()

    @classmethod
    def from_counts(cls, counts: np.ndarray, hot: int, *, chosen: int = 1) -> "Placement":
        """The `hot` experts of each layer that were routed to most often, of two alike the one of lower index.

        Args: counts [L, E], how often each expert was chosen; chosen, experts per token, which a tier must hold.
        Raises UsageError where `hot` is not from `chosen` to E - 1.
        """
        counts = np.asarray(counts)
        if counts.ndim != 2:
            raise UsageError(f"routed counts of shape {counts.shape}, expected [layers, experts]")
        experts = counts.shape[1]
        if not chosen <= hot < experts:
            many = f"; with all {experts} hot, use --experts resident" if hot >= experts else ""
            raise UsageError(f"hot experts of a layer are {hot}, expected {chosen} to {experts - 1}{many}")
        order = np.argsort(-counts, axis=1, kind="stable")
        tier = np.full(counts.shape, COLD, np.int32)
        np.put_along_axis(tier, order[:, :hot], HOT, axis=1)
        # Slots of a tier follow the experts' own order.
        is_hot = tier == HOT
        slot = np.where(is_hot, np.cumsum(is_hot, axis=1), np.cumsum(~is_hot, axis=1)) - 1
        return cls(tier, slot.astype(np.int32))

    @classmethod
    def in_order(cls, layers: int, experts: int, hot: int, *, chosen: int = 1) -> "Placement":
        """The first `hot` experts of each layer: what is known without any counts."""
        return cls.from_counts(np.zeros((layers, experts), np.int64), hot, chosen=chosen)

    @property
    def layers(self) -> int:
        return self.tier.shape[0]

    @property
    def experts(self) -> int:
        return self.tier.shape[1]

    @property
    def hot(self) -> int:
        """Hot experts of each layer."""
        return int(np.sum(self.tier[0] == HOT))

    def held(self, layer: int, tier: int) -> np.ndarray:
        """Expert ids int32 [slots] of a layer's tier, by slot."""
        here = np.flatnonzero(self.tier[layer] == tier)
        return here[np.argsort(self.slot[layer, here])].astype(np.int32)

    def swapped(self, layer: int, first: int, second: int) -> "Placement":
        """The table with two experts of a layer in each other's places."""
        tier, slot = self.tier.copy(), self.slot.copy()
        for table in (tier, slot):
            table[layer, [first, second]] = table[layer, [second, first]]
        return Placement(tier, slot)

    def towards(self, wanted: "Placement") -> tuple["Placement", list[tuple[int, int, int]]]:
        """This table with the hot set of `wanted`, by the fewest swaps, and those: (layer, hot expert, cold expert).

        Experts that need not change tier stay where they are. Raises UsageError for a table of other shapes.
        """
        if (wanted.tier.shape, wanted.hot) != (self.tier.shape, self.hot):
            raise UsageError(
                f"a placement of {wanted.hot} hot experts in {wanted.tier.shape} (layers, experts) cannot follow one "
                f"of {self.hot} in {self.tier.shape}; load the model again"
            )
        swaps = [
            (layer, int(leaving), int(coming))
            for layer in range(self.layers)
            for leaving, coming in zip(
                np.flatnonzero((self.tier[layer] == HOT) & (wanted.tier[layer] == COLD)),
                np.flatnonzero((self.tier[layer] == COLD) & (wanted.tier[layer] == HOT)),
                strict=True,
            )
        ]
        found = self
        for swap in swaps:
            found = found.swapped(*swap)
        return found, swaps

    def cold_share(self, counts: np.ndarray) -> float:
        """Share of the routes in counts [L, E] that go to cold experts; 0 of no routes."""
        counts = np.asarray(counts)
        return float(np.sum(counts * (self.tier == COLD)) / max(np.sum(counts), 1))

    def _check(self) -> None:
        """Raises UsageError where a table names no place, or one place twice."""
        for name, table in (("tiers", self.tier), ("slots", self.slot)):
            if table.dtype != np.int32 or table.ndim != 2:
                raise UsageError(
                    f"placement: {name} are {table.dtype} {list(table.shape)}, expected int32 [layers, experts]"
                )
        if self.tier.shape != self.slot.shape:
            raise UsageError(
                f"placement: {self.tier.shape} tiers for {self.slot.shape} slots, expected as many"
            )
        unknown = self.tier[(self.tier != HOT) & (self.tier != COLD)]
        if unknown.size:
            raise UsageError(f"placement: an expert is in tier {unknown[0]}, expected {HOT} or {COLD}")
        hot = np.sum(self.tier == HOT, axis=1)
        uneven = np.flatnonzero(hot != hot[0])
        if uneven.size:
            layer = int(uneven[0])
            raise UsageError(
                f"placement: layer {layer} has {hot[layer]} hot experts, layer 0 has {hot[0]}; expected as many in each"
            )
        for layer in range(self.tier.shape[0]):
            for tier, count in ((HOT, int(hot[0])), (COLD, self.tier.shape[1] - int(hot[0]))):
                slots = np.sort(self.slot[layer, self.tier[layer] == tier])
                if not np.array_equal(slots, np.arange(count)):
                    raise UsageError(
                        f"placement: layer {layer} has slots {slots.tolist()} in tier {tier}, expected 0 to "
                        f"{count - 1}, each once"
                    )
