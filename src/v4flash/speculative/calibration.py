"""Making a drafter's confidence honest: a logistic map fitted from what was accepted.

Knows: the fit, and how far confidences are from what happened. Does not know: how pairs are gathered, or what
the map is used for (depth.py applies it).

Raw confidences are trained against one temperature and one text, and are overconfident elsewhere. The map keeps
their order (its slope is never negative) and moves their level: chance = sigmoid(slope * log-odds + bias).
Source: Platt 1999; one map for each draft position, as the DSpark paper fits one temperature for each.
"""

from typing import NamedTuple

import numpy as np

# Pull towards the identity: eight pairs of even odds bend the loss as much, so a few pairs cannot lead far away.
_PULL = 2.0
_NEWTON_STEPS = 50
_LEAST_DOUBT = 1e-6


class Fit(NamedTuple):
    """The map of one draft position."""

    slope: float
    bias: float


def log_odds(confidence: np.ndarray) -> np.ndarray:
    """log(c / (1 - c)), finite for all c from 0 to 1."""
    sure = np.clip(np.asarray(confidence, np.float64), _LEAST_DOUBT, 1 - _LEAST_DOUBT)
    return np.log(sure) - np.log1p(-sure)


def fit(confidence: np.ndarray, accepted: np.ndarray) -> Fit:
    """Slope and bias of the likeliest map, drawn a little towards the identity; the identity without pairs.

    Args: confidence float [n], from 0 to 1; accepted bool [n], what became of those drafts.
    """
    odds, outcome = log_odds(confidence), np.asarray(accepted, np.float64)
    found = _likeliest(odds, outcome, fixed_slope=None)
    return found if found.slope >= 0 else _likeliest(odds, outcome, fixed_slope=0.0)


def _likeliest(odds: np.ndarray, outcome: np.ndarray, fixed_slope: float | None) -> Fit:
    """Newton's method on a convex loss: log-loss of the pairs, and a parabola around the identity."""
    parameters = np.array([1.0 if fixed_slope is None else fixed_slope, 0.0])
    inputs = np.stack([odds, np.ones_like(odds)], axis=1)
    free = np.array([fixed_slope is None, True])
    centre = np.array([1.0, 0.0])

    def loss(at: np.ndarray) -> float:
        value = inputs @ at
        return float(
            np.sum(np.logaddexp(0, value) - outcome * value) + _PULL / 2 * np.sum((at - centre) ** 2)
        )

    for _ in range(_NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-(inputs @ parameters)))
        slope = inputs.T @ (chance - outcome) + _PULL * (parameters - centre)
        bend = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + _PULL * np.eye(2)
        move = np.zeros(2)
        move[free] = np.linalg.solve(bend[np.ix_(free, free)], slope[free])
        while loss(parameters - move) > loss(parameters) and np.abs(move).max() > 1e-12:
            move = move / 2
        parameters = parameters - move
        if np.abs(move).max() < 1e-10:
            break
    return Fit(float(parameters[0]), float(parameters[1]))


def chance(confidence: np.ndarray, found: Fit) -> np.ndarray:
    """The fitted chance of each confidence."""
    return 1 / (1 + np.exp(-(found.slope * log_odds(confidence) + found.bias)))


def calibration_error(predicted: np.ndarray, accepted: np.ndarray, groups: int = 10) -> float:
    """Mean gap between predicted and seen acceptance over `groups` equally large groups of similar predictions."""
    order = np.argsort(predicted, kind="stable")
    parts = np.array_split(order, min(groups, len(order)))
    gaps = [
        len(part) * abs(float(np.mean(predicted[part])) - float(np.mean(accepted[part]))) for part in parts
    ]
    return sum(gaps) / len(order)
