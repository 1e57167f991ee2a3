"""`v4flash kernels budget`: what it refuses, what it prints, and one small budget from end to end."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny_step import LAYERS, tiny_json

from v4flash.cli import kernel_budget
from v4flash.profile import budget

RECORDED = Path(budget.__file__).resolve().parents[3] / "docs" / "budgets"
PROMISED = (
    "kernels_per_step", "layers", "graph_cuts", "weight_copies", "argument_leaves", "spills", "aliased_bytes",
    "kernels_by_scope",
)  # fmt: skip


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.json"
    path.write_text(json.dumps(tiny_json(drafter=True)))
    return path


@pytest.fixture
def answering(monkeypatch):
    """Stands in for the compiling process: `answering(text, code)` is all it says."""

    def stand_in(text: str, code: int = 0, complaint: str = ""):
        done = subprocess.CompletedProcess([], code, text, complaint)
        monkeypatch.setattr(budget.subprocess, "run", lambda *arguments, **settings: done)

    return stand_in


def test_small_budget_from_end_to_end(call, config_file):
    """A process of its own compiles for the H200; nothing but the document is on standard output."""
    outcome = call(
        "kernels", "budget", "--config", config_file, "--target", "h200", "--backend", "xla", "--k", 3,
        "--context", 256, "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert all(name in found for name in PROMISED)
    assert (found["config"], found["layers"], found["draft_stages"], found["k"]) == ("tiny", LAYERS, 1, 3)
    assert sum(found["kernels_by_scope"].values()) == found["kernels_per_step"]
    assert {"draft/draft_stage_0/ffn", "draft/markov_chain"} <= set(found["kernels_by_scope"])
    assert found["kernels_at_least"] < found["kernels_per_step"]
    assert found["aliased_bytes"] == found["state_bytes"] and found["not_in_place"] == []
    assert found["fits"] is True and found["weight_bytes"] < found["argument_bytes"]
    assert found["compile"]["compile"] > 0 and found["compile"]["peak_bytes"] > 1e8
    assert kernel_budget.as_text(found).startswith("tiny on NVIDIA H200 (sm_90, 132 cores)")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["--config", "absent", "--target", "h200"],
            2,
            "expected a config.json, a checkpoint folder, or one of demo",
        ),
        (["--config", "demo", "--target", "b300"], 2, "no device description"),
        (["--config", "demo", "--target", "h200", "--backend", "auto"], 2, "not one of xla, fused"),
        (["--config", "demo", "--target", "h200", "--rows", "1"], 2, "from 2"),
        (["--config", "demo"], 2, "--target"),
        (["--target", "h200"], 2, "--config"),
    ],
)
def test_wrong_usage_is_one_sentence(call, arguments, code, said):
    outcome = call("kernels", "budget", "--quiet", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err and outcome.err.count("\n") == 1


def test_an_action_is_needed(call):
    assert call("kernels").code == 2


def test_errors_of_the_compiling_process_keep_their_kind(call, answering):
    answering(json.dumps({"error": "k is 9, this program takes 0 to 7", "kind": "UsageError"}))
    outcome = call("kernels", "budget", "--config", "demo", "--target", "h200", "--k", 9, "--quiet")
    assert (outcome.code, outcome.err) == (2, "v4flash: k is 9, this program takes 0 to 7\n")


def test_a_compiling_process_that_dies_is_reported(call, answering):
    answering("", -9, "a page of detail\nKilled")
    outcome = call("kernels", "budget", "--config", "demo", "--target", "h200", "--quiet")
    assert outcome.code == 4
    assert "ended with code -9 (Killed)" in outcome.err and outcome.err.count("\n") == 1


def test_too_many_drafts_are_refused_before_compiling():
    with pytest.raises(budget.UsageError, match="k is 8, this program takes 0 to 7; give more rows"):
        budget.compiled_budget(budget.Request("demo", "h200", k=8))


@pytest.mark.parametrize("name", ["v4-flash-0731-h200-xla"])
def test_recorded_budget_reads_well(call, answering, name):
    text = (RECORDED / f"{name}.json").read_text()
    answering(text)
    outcome = call("kernels", "budget", "--config", "demo", "--target", "h200", "--quiet")
    found = json.loads(text)
    assert f"{found['kernels_per_step']:,} at most" in outcome.out
    assert f"{found['graph_cuts']:,} cuts" in outcome.out
    assert "verify/layer/attention" in outcome.out
    assert "does not fit" in outcome.out if not found["fits"] else "fits in" in outcome.out
    assert outcome.out.count("floor at k = 5") == 2
