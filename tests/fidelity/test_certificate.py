"""The certificate on a scripted decoder: what counts as identical, as a tie, and as a bug."""

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.fidelity import certificate
from v4flash.fidelity.certificate import Finding, Plan, certify

TEXT = [3, 1, 4, 1, 5, 9]
TOKENS = len(TEXT)
VOCABULARY = 12
# Sampled texts: the logits of every position, their law, and how many tokens a sampled text has.
SAMPLED_LOGITS = np.linspace(0.0, 3.0, VOCABULARY).astype(np.float32)
LAW = np.exp(SAMPLED_LOGITS) / np.exp(SAMPLED_LOGITS).sum()
SAMPLED_TOKENS = 400


class Scripted:
    """Sessions that say TEXT, with chosen faults by draft length; sampled texts are drawn from `laws`."""

    def __init__(self, faults=(), states=(), after_rewinding=(), laws=()):
        self.faults, self.states = dict(faults), dict(states)
        self.after_rewinding, self.laws = dict(after_rewinding), dict(laws)

    def decoded(self, model, prompt, k, tokens, temperature=0.0, seed=0):
        if temperature > 0:
            random = np.random.default_rng([seed, [0, 1, 4].index(k)])
            return None, random.choice(VOCABULARY, size=tokens, p=self.laws.get(k, LAW)).tolist()
        return SimpleNamespace(k=k, state=k, rewind=lambda length: None), list(self.faults.get(k, TEXT))

    def continued(self, model, session, k, tokens, prompt=()):
        return self.after_rewinding.get(k, TEXT)[len(TEXT) - tokens :]

    def state(self, config, k):
        value = np.array([0.0, np.nan]) if k in self.states else np.array([0.0, 1.0])
        return {"window 0": value, "entries 2": np.array([5.0])}


def favouring(gap):
    """Logits that favour token 1 by `gap` over token 2."""

    def logits(ids):
        rows = np.zeros((len(ids), VOCABULARY), np.float32)
        rows[-1, 1], rows[-1, 2] = 5.0, 5.0 - gap
        return rows

    return logits


def sampled_logits(ids):
    return np.tile(SAMPLED_LOGITS, (len(ids), 1))


@pytest.fixture
def certified(monkeypatch):
    """Runs `certify` with scripted sessions."""
    model = SimpleNamespace(
        config=None,
        path=Path("nowhere"),
        programs=SimpleNamespace(shapes=SimpleNamespace(rows=8, context=64)),
        backend="xla",
        mode="exact",
        numerics=SimpleNamespace(dtype=np.float32),
    )

    def run(scripted, gap=1.0, temperature=0.0, dtype=np.float32):
        model.numerics.dtype = dtype
        monkeypatch.setattr(certificate, "_decoded", scripted.decoded)
        monkeypatch.setattr(certificate, "_continued", scripted.continued)
        monkeypatch.setattr(certificate, "visible_state", scripted.state)
        plan = Plan([1, 4], SAMPLED_TOKENS if temperature else TOKENS, temperature)
        logits = sampled_logits if temperature else favouring(gap)
        return certify(model, [[7, 8], [9]], plan, logits, lambda sentence: None)

    return run


def test_identical_runs(certified):
    found = certified(Scripted())
    assert found["verdict"] == "identical" and found["findings"] == []
    assert found["prompts"] == 2 and found["draft_lengths"] == [1, 4] and len(found["texts"]) == 64
    other = certified(Scripted(faults={0: TEXT[:5] + [8], 1: TEXT[:5] + [8], 4: TEXT[:5] + [8]}))
    assert other["texts"] != found["texts"]


@pytest.mark.parametrize(("gap", "verdict"), [(1e-4, "tie"), (0.5, "bug")])
def test_first_difference_is_judged_by_its_logits(certified, gap, verdict):
    found = certified(Scripted(faults={4: [3, 2, 4, 1, 5, 9]}), gap)
    assert found["verdict"] == verdict
    first, second = (Finding(**finding) for finding in found["findings"])
    assert (first.prompt, second.prompt, first.k, first.what) == (0, 1, 4, "text")
    assert first.position == 1 and first.tokens == (1, 2)
    assert first.gap == pytest.approx(gap, rel=1e-2) == first.best_gap
    assert "token 1: 1 without drafting, 2 with" in str(first)


def test_a_tie_is_as_wide_as_the_number_type_is_coarse(certified):
    faults = {4: [3, 2, 4, 1, 5, 9]}
    assert certified(Scripted(faults), 0.05)["verdict"] == "bug"
    assert certified(Scripted(faults), 0.05, dtype=jnp.bfloat16)["verdict"] == "tie"
    assert certified(Scripted(faults), 0.5, dtype=jnp.bfloat16)["verdict"] == "bug"


def test_a_tie_does_not_hide_a_bug(certified):
    found = certified(Scripted(faults={1: [3, 2, 4, 1, 5, 9]}, states=[(4, True)]), 1e-4)
    assert found["verdict"] == "bug"
    assert [finding["what"] for finding in found["findings"]] == ["text", "state"] * 2
    assert found["findings"][1]["detail"] == "differs in window 0"
    assert "bug, differs in window 0" in str(Finding(**found["findings"][1]))


def test_rewinding_is_part_of_it(certified):
    found = certified(Scripted(after_rewinding={4: [3, 1, 4, 1, 5, 2]}))
    assert found["findings"][0]["what"] == "text after rewinding"
    assert found["findings"][0]["position"] == 5


def test_a_text_that_ends_early_is_a_bug(certified):
    found = certified(Scripted(faults={1: TEXT[:3]}))
    assert found["verdict"] == "bug" and "number of tokens" in found["findings"][0]["detail"]


# The scripted decoder says TEXT whatever it is asked for; sampled runs ask for more tokens than it has, so rewinding
# is left out of what is scripted there.
@pytest.fixture
def sampled(certified, monkeypatch):
    def run(laws=()):
        monkeypatch.setattr(certificate, "_compared", lambda *arguments: [])
        return certified(Scripted(laws=laws), temperature=1.0)

    return run


def test_sampled_texts_of_the_right_law_pass(sampled):
    found = sampled()
    assert found["verdict"] == "identical" and list(found["laws"]) == ["0", "1", "4"]
    assert all(fits["tokens"] == 2 * SAMPLED_TOKENS for fits in found["laws"].values())
    assert len({fits["chance"] for fits in found["laws"].values()}) == 3


@pytest.mark.parametrize("k", [0, 4])
def test_a_law_that_is_bent_is_a_bug(sampled, k):
    bent = LAW**1.4 / (LAW**1.4).sum()
    found = sampled({k: bent})
    assert found["verdict"] == "bug"
    (finding,) = (Finding(**finding) for finding in found["findings"])
    assert (finding.k, finding.what, finding.prompt) == (k, "law", None)
    assert f"k = {k}, law: bug, texts of the right law look as odd with chance" in str(finding)
