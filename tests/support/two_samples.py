"""Do two sets of texts come from one law? A permutation test that knows nothing of models.

A text is described by which tokens and neighbours it holds, and how many different tokens it has come to by each
place. The distance of two sets is that of their mean descriptions, squared; its chance is the share of random
divisions, within each prompt's texts, whose sets are at least as far apart.
"""

import numpy as np

_FEATURES = 512


def described(texts: np.ndarray) -> np.ndarray:
    """Descriptions float [n, 2 * _FEATURES + length] of texts int [n, length]; tokens and pairs are counted by hash."""
    count, length = texts.shape
    pairs = texts[:, :-1].astype(np.int64) * 1_000_003 + texts[:, 1:]
    counts, row = np.zeros((count, 2, _FEATURES)), np.arange(count)[:, None]
    np.add.at(counts, (row, 0, texts % _FEATURES), 1)
    np.add.at(counts, (row, 1, pairs % _FEATURES), 1)
    fresh = np.array([[token not in text[:at] for at, token in enumerate(text)] for text in texts.tolist()])
    return np.concatenate([counts.reshape(count, -1), np.cumsum(fresh, axis=1) / np.sqrt(length)], axis=1)


def same_law_chance(
    first: list[np.ndarray], second: list[np.ndarray], rounds: int = 2000, seed: int = 0
) -> float:
    """Chance that texts of one law are divided as unevenly as these, at least 1 / (rounds + 1).

    Args: first, second: by prompt, texts int [n, length] of either set.
    """
    random = np.random.default_rng(seed)
    strata = []
    for both in zip(first, second, strict=True):
        found = described(np.concatenate(both))
        strata.append((found @ found.T, len(both[0])))

    def distance(divided: list[np.ndarray]) -> float:
        total = 0.0
        for (products, size), order in zip(strata, divided, strict=True):
            weights = np.full(len(order), -1.0 / (len(order) - size))
            weights[order[:size]] = 1.0 / size
            total += weights @ products @ weights
        return total

    seen = distance([np.arange(len(products)) for products, _ in strata])
    # Sums in another order: a division like the real one is as far as it, but for the last bits.
    farther = sum(
        distance([random.permutation(len(products)) for products, _ in strata]) >= seen * (1 - 1e-9)
        for _ in range(rounds)
    )
    return (1 + farther) / (1 + rounds)
