"""What speculation brings the demonstration model, timed by the step times of an H200 (docs/measurements)."""

from pathlib import Path

import pytest

import v4flash
from v4flash.engine import comparison, speculation_file
from v4flash.fidelity.record_transcripts import read_prompts

ROOT = Path(__file__).resolve().parents[2]
DEMO, COSTS = ROOT / "demo", ROOT / "docs" / "measurements" / "2026-11-30-h200-costs.json"
SAMPLING = {"temperature": 1.0, "top_p": 0.95}
# Few texts: what is asked for may be missed by two standard errors.
PROMPTS, TOKENS, LONGEST, ERRORS = 24, 48, 5, 2
LEAST_BLOCK_GAIN, LEAST_AUTO_GAIN = 0.03, -0.02


@pytest.mark.slow
def test_block_rule_and_chosen_depths_pay():
    model = v4flash.load(DEMO, context=384, dtype="float32")
    prompts = {}
    for prompt in read_prompts(DEMO / "prompts.json", PROMPTS):
        prompts.setdefault(prompt["class"], []).append(model.encode(prompt["text"], raw=not prompt["chat"]))
    costs = speculation_file.read(COSTS).costs.milliseconds
    document = comparison.compare(
        model, prompts, costs, sampling=SAMPLING, tokens=TOKENS, longest=LONGEST, say=print
    )

    def least(name: str, compared: str) -> float:
        gain = document["classes"][name]["comparisons"][compared]
        print(f"{name}, {compared}: {100 * gain['gain']:.1f} % +- {100 * gain['standard_error']:.1f}")
        return gain["gain"] + ERRORS * gain["standard_error"]

    assert least("all", "block_rule_over_token_rule") >= LEAST_BLOCK_GAIN
    for name in document["classes"]:
        assert least(name, "auto_over_best_k") >= LEAST_AUTO_GAIN, name
    assert least("all", "auto_over_block") > 0 and least("prose", "auto_over_block") > 0
