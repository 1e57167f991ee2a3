"""Experts in two memories: the definition against an oracle, its launches in Triton's interpreter, and records."""

from pathlib import Path

import expert_cases
import interpreter
import jax
import numpy as np
import pytest
import tier_cases

from pallas_kernels.experts import tiers


@pytest.mark.parametrize("name", tier_cases.CASES)
def test_definition_keeps_what_the_oracle_says(name):
    tier_cases.check_steps(tier_cases.reference_body(), tier_cases.SMALL, *tier_cases.CASES[name])


@pytest.mark.parametrize("name", tier_cases.GUESSED)
def test_definition_fetches_what_the_oracle_says(name):
    *case, guesses = tier_cases.GUESSED[name]
    tier_cases.check_steps(tier_cases.reference_body(), tier_cases.SMALL, *case, guesses=guesses)


def test_interpreted_launches_mean_the_same():
    interpreter.run(Path(__file__).with_name("interpreted_tier_checks.py"))


def test_records_hold_packed_experts():
    routed, _ = expert_cases.packed(tier_cases.SMALL, 0)
    records = tiers.to_records(routed)
    assert records.shape == (tier_cases.SMALL.experts, tiers.record_words(routed))
    back = tiers.from_records(records, routed)
    for found, expected in zip(jax.tree.leaves(back), jax.tree.leaves(routed), strict=True):
        np.testing.assert_array_equal(found, expected)
    offsets = tiers.record_offsets(routed)
    np.testing.assert_array_equal(
        records[3, offsets["down.words"] :][: routed.down.words[3].size], routed.down.words[3].reshape(-1)
    )
