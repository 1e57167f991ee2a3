"""Teacher-forced estimates of how well the drafter does, on any sequences.

Knows: acceptance per position, tokens per step, greedy agreement and how well the confidence ranks. Does not
know: the decoding engine. These are estimates along given text: row j is judged after the text's own tokens,
not after the drafter's. On the target's own samples at temperature 1 the two have the same law for accepted
prefixes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.training.drafter import judged_rows, overlap, run_blocks
from v4flash.training.stored_weights import Skeleton, Weights


@dataclasses.dataclass(frozen=True)
class DraftEstimate:
    """Figures of one set of sequences.

    Attributes:
      accepted: per position, mean of sum_v min(p, q) at temperature 1.
      greedy: per position, share of rows whose best tokens agree.
      tau, greedy_tau: expected tokens per step, 1 + expected accepted prefix.
      auc: probability that the confidence of an accepted draft is above that of a refused one, at temperature 1 among
        the rows that decoding by the block rule meets.
      auc_of_chance: the same of the true chance; no confidence ranks better.
    """

    accepted: list[float]
    greedy: list[float]
    tau: float
    greedy_tau: float
    auc: float
    auc_of_chance: float


def make_measure(skeleton: Skeleton) -> Callable:
    """A jitted function (stored weights of target and drafter, tokens [B, T], anchors [B, A]) -> five arrays.

    They are float32 [B, A, K]: probability of being accepted at temperature 1, whether the best tokens agree
    (0 or 1), the confidence logit, and chance and reach of `judged_rows`.
    """

    def measure(stored: Weights, tokens: jax.Array, anchors: jax.Array):
        blocks = run_blocks(skeleton.model(stored), tokens, anchors)
        agreed = jnp.argmax(blocks.drafted, axis=-1) == jnp.argmax(blocks.target, axis=-1)
        return (
            overlap(blocks, jnp.ones(())),
            agreed.astype(jnp.float32),
            blocks.confidence,
            *judged_rows(blocks),
        )

    return jax.jit(measure)


def summarised(measured: Sequence[jax.Array]) -> DraftEstimate:
    """The figures of one call of `make_measure`'s function."""
    accepted, greedy, confidence, chance, reach = (np.asarray(values, np.float64) for values in measured)
    return DraftEstimate(
        accepted=[round(float(value), 4) for value in accepted.mean((0, 1))],
        greedy=[round(float(value), 4) for value in greedy.mean((0, 1))],
        tau=float(1 + np.cumprod(accepted, axis=-1).sum(-1).mean()),
        greedy_tau=float(1 + np.cumprod(greedy, axis=-1).sum(-1).mean()),
        auc=ranking_quality(confidence.ravel(), chance.ravel(), reach.ravel()),
        auc_of_chance=ranking_quality(chance.ravel(), chance.ravel(), reach.ravel()),
    )


def ranking_quality(score: np.ndarray, probability: np.ndarray, weight: np.ndarray | float = 1.0) -> float:
    """Area under the ROC curve of `score` for events of given `probability` (expected counts, ties at half).

    `weight`: how often each event is met.
    """
    order = np.argsort(score, kind="stable")
    score, positive, negative = (
        score[order],
        (weight * probability)[order],
        (weight * (1 - probability))[order],
    )
    values, index = np.unique(score, return_inverse=True)
    positives = np.bincount(index, positive, len(values))
    negatives = np.bincount(index, negative, len(values))
    below = np.cumsum(negatives) - negatives
    total = positives.sum() * negatives.sum()
    return float((positives * (below + 0.5 * negatives)).sum() / total) if total else 0.5
