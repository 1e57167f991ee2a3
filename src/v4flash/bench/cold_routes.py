"""Routes made up to the published correlation, with a wanted share of them going to cold experts.

Knows: popularity of experts, how rows resemble the row before, which experts are hot, and how cold routes are
redirected to hot experts. Does not know: devices or time.

Rows of one step follow those of the step before as in one text.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from v4flash.config import ModelConfig
from v4flash.profile.floor import POPULARITY, REPEATED

_TRIED, _HALVINGS = 400, 14  # rows a share is counted over, and how often the range of the handicap is halved
_HANDICAPS = (-12.0, 12.0)


@dataclasses.dataclass(frozen=True)
class ColdRoutes:
    """Routes of consecutive steps.

    Attributes:
      ids: int32 [steps, L, rows, K], different experts of each row.
      cold: bool [L, E].
      guesses: int32 [steps, L, G], experts plus one that are guessed before each step, 0 for none; None for no guess.
    """

    ids: np.ndarray
    cold: np.ndarray
    guesses: np.ndarray | None = None

    @property
    def share(self) -> float:
        """The share of routes that go to cold experts."""
        return float(self._is_cold().mean())

    @property
    def distinct(self) -> float:
        """Different experts of a layer and step, on average."""
        return float(np.mean([len(np.unique(rows)) for step in self.ids for rows in step]))

    def redirected(self, seed: int = 0) -> "ColdRoutes":
        """The same with every cold expert of a layer's step replaced by a hot one that the step does not use."""
        random, ids = np.random.default_rng(seed), self.ids.copy()
        for step in ids:
            for rows, cold in zip(step, self.cold, strict=True):
                used = np.unique(rows)
                unused = np.setdiff1d(np.flatnonzero(~cold), used)
                for expert, instead in zip(used[cold[used]], random.permutation(unused), strict=False):
                    rows[rows == expert] = instead
        return dataclasses.replace(self, ids=ids)

    def repeating(self, steps: int) -> "ColdRoutes":
        """As many steps, of which only the first few are different: what a text that repeats itself asks for."""
        return dataclasses.replace(self, ids=np.resize(self.ids[:steps], self.ids.shape))

    def guessed(self, right: float, wrong: float, seed: int = 0) -> "ColdRoutes":
        """With guesses that name each cold expert of a step with the chance `right`, and for each one they name, with
        the chance `wrong`, a cold expert that the step does not choose.
        """
        random, (steps, layers, rows, chosen) = np.random.default_rng(seed), self.ids.shape
        guesses = np.zeros((steps, layers, rows * chosen), np.int32)
        for step, own in zip(self.ids, guesses, strict=True):
            for choices, cold, named in zip(step, self.cold, own, strict=True):
                used = np.unique(choices)
                found = used[cold[used] & (random.random(len(used)) < right)]
                others = random.permutation(np.setdiff1d(np.flatnonzero(cold), used))
                others = others[: np.sum(random.random(len(found)) < wrong)]
                every = np.concatenate([found, others])[: named.size]
                named[: every.size] = every + 1
        return dataclasses.replace(self, guesses=guesses)

    def slots(self, places: np.ndarray) -> np.ndarray:
        """int32 [steps, L, rows, K]: the slots of the experts, by places [L, E, 2] (tier, slot)."""
        return places[np.arange(self.cold.shape[0])[:, None, None], self.ids, 1]

    def _is_cold(self) -> np.ndarray:
        layer = np.arange(self.cold.shape[0])[:, None, None]
        return self.cold[layer, self.ids]


def table(config: ModelConfig, hot: int, seed: int = 0) -> np.ndarray:
    """A table int32 [L, E, 2] of (tier, slot) with other hot experts in every layer."""
    random, experts = np.random.default_rng(seed), config.n_routed_experts
    places = np.zeros((config.num_hidden_layers, experts, 2), np.int32)
    for own in places:
        order = random.permutation(experts)
        own[order] = [(0, slot) if slot < hot else (1, slot - hot) for slot in range(experts)]
    return places


def made_up(
    config: ModelConfig, places: np.ndarray, share: float, rows: int, steps: int, seed: int = 0
) -> ColdRoutes:
    """Routes of `steps` steps of `rows` rows, of which about `share` go to experts outside tier 0 of the table.

    Popularity falls with a layer's slots, so hot experts are the popular ones; cold ones are made more or less popular
    together until their share is the wanted one.
    """
    cold = places[..., 0] > 0
    rank = places[..., 1] + np.where(cold, np.sum(~cold, axis=1, keepdims=True), 0)
    popularity = -POPULARITY * np.log(rank + 1)

    def drawn(handicap: float, count: int) -> np.ndarray:
        return _chain(popularity - handicap * cold, config.num_experts_per_tok, count, seed)

    def share_at(handicap: float) -> float:
        return ColdRoutes(drawn(handicap, _TRIED)[None].swapaxes(1, 2), cold).share

    chosen = _halved(share_at, share)
    ids = drawn(chosen, steps * rows).reshape(steps, rows, *drawn(chosen, 1).shape[1:])
    return ColdRoutes(np.ascontiguousarray(ids.swapaxes(1, 2)), cold)


def _halved(falling: Callable[[float], float], wanted: float) -> float:
    """Where a falling function has the wanted value."""
    low, high = _HANDICAPS
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2


def _chain(popularity: np.ndarray, chosen: int, rows: int, seed: int) -> np.ndarray:
    """Experts int32 [rows, L, K]: popular ones more often, and some of the row before again (`profile.floor`)."""
    random, made, before = np.random.default_rng(seed), [], None
    for _ in range(rows):
        scores = popularity + random.gumbel(size=popularity.shape)
        if before is not None:
            kept = np.take_along_axis(scores, before, axis=1)
            kept[random.random(kept.shape) < REPEATED] = np.inf
            np.put_along_axis(scores, before, kept, axis=1)
        before = np.argpartition(-scores, chosen - 1, axis=1)[:, :chosen]
        made.append(before)
    return np.asarray(made, np.int32)
