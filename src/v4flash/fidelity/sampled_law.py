"""Did sampled texts follow the target's law? A test that needs nothing but the texts and the target's logits.

Knows: how tokens become numbers that are uniform if, and only if, they follow their laws, and how uniformity is
judged. Does not know: how texts were made.

    place = chance of a likelier token + noise * chance of the token        (noise uniform from 0 to 1)

If token n follows law n given the tokens before it, places are independent and uniform, whatever the laws are: so
thousands of positions with thousands of different laws are judged together. A decoder that favours what its drafter
likes emits likely tokens too often, and its places crowd near zero. Pairs of neighbouring places find what one
position does to the next.

Source: the randomised probability integral transform (Rosenblatt 1952; Brockwell 2007).
"""

import dataclasses

import numpy as np
from jax.scipy import special

# Chances below this are called a wrong law. Seeds are fixed, so a certificate that passes once passes always; of
# a million sound checkpoints one would fail its first.
LEVEL = 1e-6
_MOST_BINS, _EXPECTED = 16, 8


@dataclasses.dataclass(frozen=True)
class LawVerdict:
    """How sampled tokens fit their laws.

    Attributes:
      tokens: how many were judged.
      chance: the smaller of two chances (of places, of pairs of places) that tokens of the right laws look as odd as
        these, doubled because two were looked at; at most 1.
      impossible: how many tokens had no chance at all under their law.
    """

    tokens: int
    chance: float
    impossible: int

    @property
    def sound(self) -> bool:
        return self.impossible == 0 and self.chance > LEVEL


def places(laws: np.ndarray, tokens: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Places [n] of tokens int [n] in laws float [n, V], given noise [n] from 0 to 1; of equal chances, lower ids
    come first."""
    laws = np.asarray(laws, np.float64)
    own = np.take_along_axis(laws, tokens[:, None], axis=1)
    likelier = (laws > own) | ((laws == own) & (np.arange(laws.shape[1]) < tokens[:, None]))
    total = laws.sum(axis=1)
    return (np.where(likelier, laws, 0).sum(axis=1) + noise * own[:, 0]) / total


def uniform_chance(counts: np.ndarray) -> float:
    """Chance that equally likely cells differ from each other at least as much as these counts do (chi-square)."""
    counts = counts.ravel()
    expected = counts.sum() / len(counts)
    statistic = float(np.sum((counts - expected) ** 2) / expected)
    return float(special.gammaincc((len(counts) - 1) / 2, statistic / 2))


def judge(texts: list[tuple[np.ndarray, np.ndarray]], seed: int = 0) -> LawVerdict:
    """Judges texts, each given as laws float [n, V] and the tokens int [n] drawn from them; at least 16 in all."""
    random = np.random.default_rng(seed)
    found, impossible = [], 0
    for laws, tokens in texts:
        impossible += int(np.sum(np.take_along_axis(laws, tokens[:, None], axis=1) == 0))
        found.append(places(laws, tokens, random.random(len(tokens))))
    count = sum(map(len, found))
    if count < 2 * _EXPECTED:
        raise ValueError(f"{count} tokens say nothing about a law; give at least {2 * _EXPECTED}")
    one = uniform_chance(_counted(np.concatenate(found), min(_MOST_BINS, count // _EXPECTED)))
    chances = [one]
    neighbours = np.concatenate([np.stack([text[:-1], text[1:]], axis=1) for text in found])
    side = min(int(_MOST_BINS**0.5), int((len(neighbours) / _EXPECTED) ** 0.5))
    if side > 1:
        cell = np.minimum((neighbours * side).astype(int), side - 1)
        chances.append(uniform_chance(np.bincount(cell[:, 0] * side + cell[:, 1], minlength=side**2)))
    return LawVerdict(count, min(1.0, len(chances) * min(chances)), impossible)


def _counted(values: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount(np.minimum((values * bins).astype(int), bins - 1), minlength=bins)
