"""`v4flash kernels gate`: what it asks for, prints and returns; what it compares is tests/fidelity/test_gate.py's."""

import json
from pathlib import Path

import pytest

from v4flash.cli import kernel_gate
from v4flash.fidelity import gate, gate_sides
from v4flash.model.fused.bodies import ReferenceBodies

TWIN = Path(__file__).parents[1] / "data" / "twin"
SIDE = {
    "layers": [1e-3, 2e-3],
    "divergence": 1e-4,
    "worst": None,
    "flips": 0.01,
    "shift": 0.5,
    "texts": [None, [3, 0.7]],
}
RECORD = {
    "right": True, "problems": [], "positions": 60, "texts": 2, "tokens": 8, "margin": 4.0, "fused": SIDE, "noise": SIDE
}  # fmt: skip


@pytest.mark.parametrize("right", [True, False])
def test_the_verdict_is_the_exit_code(call, monkeypatch, tmp_path, right):
    asked = {}

    def open_sides(path, numerics, bodies, context, cache, say):
        asked.update(path=path, dtype=numerics.dtype.__name__, bodies=bodies, context=context)
        return {"fused": None}

    def run(sides, prompts, tokens, rounded, say):
        asked.update(prompts=prompts, tokens=tokens, rounded=rounded)
        return RECORD | {"right": right, "problems": [] if right else ["layer 1: relative error 1, noise 0"]}

    monkeypatch.setattr(gate_sides, "open_sides", open_sides)
    monkeypatch.setattr(gate, "run", run)
    (tmp_path / "words.txt").write_text("def main():")
    out = tmp_path / "record.json"
    outcome = call(
        "kernels", "gate", "--ckpt", TWIN, "--prompts", tmp_path / "words.txt", "--tokens", "8", "--mode", "exact",
        "--out", out,
    )  # fmt: skip
    assert outcome.code == (0 if right else 1)
    assert asked["path"] == TWIN and asked["bodies"] is ReferenceBodies and asked["context"] == 512
    assert (asked["dtype"], asked["tokens"], asked["rounded"], len(asked["prompts"])) == (
        "float32",
        8,
        False,
        1,
    )
    assert "computed by the operations' definitions" in outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith("deepseek_v4, float32, exact, definitions: 2 texts, 60 positions")
    assert lines[-1] == ("right" if right else "WRONG: further from the reference than noise explains")
    assert right or lines[-2] == "layer 1: relative error 1, noise 0"
    record = json.loads(out.read_text())
    assert record["schema"] == gate.SCHEMA and record["right"] is right and record["bodies"] == "definitions"


def test_table():
    lines = kernel_gate.gate_text(
        RECORD | {"family": "deepseek_v4", "dtype": "bfloat16", "mode": "qat", "bodies": "launches"}
    ).splitlines()
    assert lines[3].split() == "layer 0, relative error 1.00e-03 1.00e-03".split()
    assert lines[6].split() == "largest divergence, nats infinite infinite".split()
    assert lines[9].split() == "greedy texts alike 1/2 1/2".split()


def test_a_checkpoint_without_prompts_asks_for_some(call):
    outcome = call("kernels", "gate", "--ckpt", TWIN)
    assert outcome.code == 2 and "pass --prompts FILE" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "qat"])
def test_a_checkpoint_on_the_definitions_is_right(call, mode):
    prompts = Path(__file__).parents[2] / "demo" / "prompts.json"
    outcome = call(
        "kernels", "gate", "--ckpt", TWIN, "--prompts", prompts, "--count", "2", "--tokens", "8", "--mode", mode,
        "--json",
    )  # fmt: skip
    record = json.loads(outcome.out)
    assert outcome.code == 0 and record["right"] and record["texts"] == 2
    assert len(record["fused"]["layers"]) == 4 and record["fused"]["texts"] == [None, None]
