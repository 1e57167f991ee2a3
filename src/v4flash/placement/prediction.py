"""How many of a step's cold experts could have been fetched before the step asked for them.

Knows: three guesses from what is there before a step runs, tried on recorded routes: the experts of the previous step,
those that the same tokens chose last time, and a cache of the experts used last. Does not know: models, links, or how
anything is fetched.

A step is a group of consecutive rows of a text. For a layer whose experts come from a table over token ids the guess by
token needs no record: the table says the experts of every drafted token exactly.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass
class Guess:
    """What a guess named and what of it was chosen, in (layer, expert) pairs of cold experts."""

    named: int = 0
    right: int = 0


@dataclasses.dataclass
class _Tally:
    """Sums for one hot set."""

    cold: np.ndarray
    wanted: int = 0
    wanted_hashed: int = 0
    previous: Guess = dataclasses.field(default_factory=Guess)
    same_token: Guess = dataclasses.field(default_factory=Guess)
    recent: np.ndarray | None = None


class Predictions:
    """Guesses tried on routes, text after text, for several hot sets.

    Args:
      hot: hot experts by their number a layer, bool [L, E] each; 0 none of them.
      rows: rows of a step.
      hashed: bool [L], layers whose experts the token id decides.
    """

    def __init__(self, hot: dict[int, np.ndarray], rows: int, hashed: np.ndarray):
        self._rows, self._hashed = rows, hashed
        self._tallies = {count: _Tally(~chosen) for count, chosen in hot.items()}
        for tally in self._tallies.values():
            tally.recent = np.zeros((tally.cold.shape[1],), np.int64)
        shape = next(iter(hot.values())).shape
        self._last_used = np.full(shape, -1, np.int64)
        self._by_token: dict[int, np.ndarray] = {}
        self._steps = 0

    def add(self, tokens: np.ndarray, routes: np.ndarray) -> None:
        """Tries one stretch of text: token ids [N] and expert ids [L, N, K] of its rows; a rest of a step is left out.

        What was used or seen before carries over from the stretch before, but its last step is no previous one.
        """
        previous = np.zeros(self._last_used.shape, bool)
        for start in range(0, routes.shape[1] - self._rows + 1, self._rows):
            part = slice(start, start + self._rows)
            previous = self._step(tokens[part], routes[:, part].astype(np.int64), previous)

    def _step(self, tokens: np.ndarray, routes: np.ndarray, previous: np.ndarray) -> np.ndarray:
        chosen = _named(routes, previous.shape)
        known = [self._by_token[token] for token in tokens.tolist() if token in self._by_token]
        alike = (
            _named(np.stack(known, axis=1).astype(np.int64), previous.shape)
            if known
            else np.zeros_like(previous)
        )
        # Most recently used first; of those used in the same step the first.
        order = np.argsort(-self._last_used, axis=1, kind="stable")
        used, wanted = (np.take_along_axis(found, order, axis=1) for found in (self._last_used >= 0, chosen))
        for tally in self._tallies.values():
            cold = tally.cold
            tally.wanted += int((chosen & cold).sum())
            tally.wanted_hashed += int((chosen & cold)[self._hashed].sum())
            for guess, named in ((tally.previous, previous), (tally.same_token, alike)):
                guess.named += int((named & cold).sum())
                guess.right += int((named & cold & chosen).sum())
            stacked = np.take_along_axis(cold, order, axis=1)
            places = np.cumsum(stacked, axis=1) - 1
            tally.recent += np.bincount(places[stacked & used & wanted], minlength=len(tally.recent))
        self._last_used[chosen] = self._steps
        for row, token in enumerate(tokens.tolist()):
            self._by_token[token] = routes[:, row].astype(
                np.uint16
            )  # a copy: a view would keep the whole step
        self._steps += 1
        return chosen

    def to_json(self) -> list[dict[str, Any]]:
        """Figures of every hot set: cold experts a step, and what each guess would have had ready.

        `ready` is the share of them that was named before, `used` the share of what was named that was chosen; of a
        cache of `slots` a layer only the former.
        """
        return [self._figures(count, tally) for count, tally in self._tallies.items()]

    def _figures(self, count: int, tally: _Tally) -> dict[str, Any]:
        def guess(found: Guess) -> dict[str, Any]:
            return {"ready": _share(found.right, tally.wanted), "used": _share(found.right, found.named)}

        slots = [1 << power for power in range(int(tally.cold.sum(axis=1).max()).bit_length())]
        ready = np.cumsum(tally.recent)
        return {
            "hot": count,
            "steps": self._steps,
            "cold_experts_a_step": _share(tally.wanted, self._steps),
            "in_hash_layers": _share(tally.wanted_hashed, tally.wanted),
            "previous_step": guess(tally.previous),
            "same_token": guess(tally.same_token),
            "recently_used": [
                {"slots": number, "ready": _share(int(ready[number - 1]), tally.wanted)} for number in slots
            ],
        }


def _named(routes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """bool [L, E] of the experts in routes [L, T, K]."""
    found = np.zeros(shape, bool)
    np.put_along_axis(found, routes.reshape(shape[0], -1), True, axis=1)
    return found


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
