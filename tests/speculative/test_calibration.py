"""The fitted map of confidences: it finds a known distortion, keeps order, and stays calm without data."""

import numpy as np
import pytest

from v4flash.speculative.calibration import Fit, calibration_error, chance, fit, log_odds


def pairs(slope, bias, count, seed=0):
    """Confidences, and outcomes whose chance is the map of them."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(0.01, 0.99, count)
    return confidence, random.random(count) < chance(confidence, Fit(slope, bias))


@pytest.mark.parametrize(("slope", "bias"), [(1.0, 0.0), (0.5, -0.7), (1.6, 0.4), (0.0, 1.0)])
def test_fit_finds_the_distortion(slope, bias):
    found = fit(*pairs(slope, bias, 20_000))
    # The standard error of both is about 0.02 at this count.
    assert abs(found.slope - slope) < 0.1 and abs(found.bias - bias) < 0.1


def test_fit_makes_overconfidence_honest():
    confidence, accepted = pairs(0.5, -0.7, 5_000)
    other, outcome = pairs(0.5, -0.7, 5_000, seed=1)
    found = fit(confidence, accepted)
    before, after = calibration_error(other, outcome), calibration_error(chance(other, found), outcome)
    assert before > 0.1 and after < 0.03


def test_order_is_never_reversed():
    confidence, accepted = pairs(1.0, 0.0, 500)
    found = fit(confidence, ~accepted)
    assert found.slope == 0.0
    assert abs(chance(np.array([0.5]), found)[0] - np.mean(~accepted)) < 0.02


def test_few_pairs_stay_close_to_the_identity():
    assert fit(np.zeros(0), np.zeros(0, bool)) == Fit(1.0, 0.0)
    for outcome in (True, False):
        found = fit(np.full(3, 0.5), np.full(3, outcome))
        assert found.slope == 1.0 and abs(found.bias) < 1.0
    certain = fit(np.array([0.0, 1.0] * 50), np.array([False, True] * 50))
    assert np.isfinite(certain).all() and certain.slope > 0.5


def test_extreme_confidences_have_finite_odds():
    assert np.isfinite(log_odds(np.array([0.0, 1.0, 0.5]))).all()


def test_calibration_error_of_known_groups():
    predicted = np.array([0.2] * 10 + [0.8] * 10)
    accepted = np.array([True] * 2 + [False] * 8 + [True] * 5 + [False] * 5)
    assert abs(calibration_error(predicted, accepted, groups=2) - 0.15) < 1e-12
