"""The certificate of a real decoder, sound and with faults put into its rule, its state and its noise."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine import programs
from v4flash.engine.language_model import LanguageModel
from v4flash.fidelity.certificate import Plan, certify
from v4flash.fidelity.model_logits import ModelLogits
from v4flash.model.drafter import Drafter
from v4flash.speculative import step

K, TOKENS = 3, 40
PROMPTS = [np.random.default_rng(seed).integers(2, 95, 12 + seed).tolist() for seed in range(6)]


def certified(greedy_only=False):
    """A certificate of the smallest toy, its programs made anew from the code as it now is."""
    tiny = toy("mini")
    shapes = programs.Shapes(rows=8, chunk=32, context=80)
    pinned = programs.build(tiny.graphdef, tiny.params, tiny.config, tiny.numerics, shapes, None)
    model = LanguageModel(
        LoadedModel(tiny.config, tiny.numerics, tiny.graphdef, tiny.params, Path("no-files")), pinned
    )
    plan = Plan([K], TOKENS, 0.0 if greedy_only else 1.0)
    return certify(model, PROMPTS, plan, ModelLogits(model), lambda sentence: None)


@pytest.mark.slow
def test_a_sound_decoder_is_identical():
    found = certified()
    assert found["verdict"] == "identical" and not found["findings"]
    assert found["laws"]["3"]["tokens"] == len(PROMPTS) * TOKENS


@pytest.mark.slow
def test_a_draft_accepted_without_looking_is_a_bug_in_text_and_law(monkeypatch):
    def credulous(ids, laws, logits, live, *rest):
        verdict = right(ids, laws, logits, live, *rest)
        return verdict._replace(accepted=jnp.minimum(jnp.maximum(verdict.accepted, 1), live))

    right = step.verify
    monkeypatch.setattr(step, "verify", credulous)
    found = certified()
    assert found["verdict"] == "bug"
    whats = {finding["what"] for finding in found["findings"]}
    assert whats == {"text", "law"}
    assert all(finding["gap"] > 0 for finding in found["findings"] if finding["what"] == "text")
    assert found["laws"]["0"]["chance"] > 1e-3 > found["laws"]["3"]["chance"]


@pytest.mark.slow
def test_a_rejected_row_kept_in_the_drafters_window_is_a_bug_in_the_state(monkeypatch):
    def misplaced(self, decode, taps, start, count):
        return right(self, decode, jnp.roll(taps, -1, axis=0), start, count)

    right = Drafter.commit
    monkeypatch.setattr(Drafter, "commit", misplaced)
    found = certified(greedy_only=True)
    assert found["verdict"] == "bug"
    assert {finding["what"] for finding in found["findings"]} == {"state"}
    assert all(finding["detail"] == "differs in draft window 0" for finding in found["findings"])
