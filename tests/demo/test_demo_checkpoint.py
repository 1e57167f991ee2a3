"""The checkpoints in the repository: whole, small, and decoding the same text whatever is drafted."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import v4flash
from v4flash.checkpoint.inspection import inspect
from v4flash.checkpoint.loading import load as load_checkpoint
from v4flash.fidelity.logits import TargetPass
from v4flash.fidelity.record_transcripts import main as record_command
from v4flash.fidelity.record_transcripts import read_prompts
from v4flash.fidelity.transcripts import compare, digest, record
from v4flash.model.numerics import Numerics

ROOT = Path(__file__).resolve().parents[2]
DEMO, TWIN = ROOT / "demo", ROOT / "tests" / "data" / "twin"
PROMPTS = DEMO / "prompts.json"
TRANSCRIPTS = DEMO / "golden_transcripts.json"
# The demonstration is part of every clone, so it has to stay small.
LARGEST_DEMO = 24e6
EVERY_DRAFT_LENGTH = range(8)
CONTEXT = 512


def model_of(folder: Path, mode: str) -> v4flash.LanguageModel:
    return v4flash.load(folder, context=CONTEXT, mode=mode, dtype="float32")


def test_demo_is_complete_sharded_and_small():
    found = inspect(DEMO)
    assert found.missing == found.unexpected == found.mismatched == []
    assert len(found.shards) > 1
    assert found.drafter is not None
    size = sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file())
    assert size <= LARGEST_DEMO


def test_demo_is_what_a_newcomer_gets_by_default():
    assert v4flash.demo_path() == DEMO


def test_figures_beside_the_demo_are_of_its_weights():
    weights = digest(DEMO)
    measured = json.loads((DEMO / "acceptance.json").read_text())
    assert measured["checkpoint"] == weights
    assert measured["gates"] and all(measured["gates"].values())
    assert weights in (DEMO / "README.md").read_text(encoding="utf-8")


def test_demo_repeats_its_recorded_text():
    """Ids recorded on another machine; only a pair of tokens that rounding can swap may differ."""
    golden = json.loads(TRANSCRIPTS.read_text())
    prompts = read_prompts(PROMPTS, len(golden["entries"]))
    found = record(model_of(DEMO, golden["mode"]), prompts, golden["draft_lengths"], golden["max_tokens"])

    @functools.cache
    def target() -> TargetPass:
        quantise = golden["mode"] == "qat"
        loaded = load_checkpoint(DEMO, Numerics(jnp.float32, quantise, packed=False))
        return TargetPass(loaded, context=CONTEXT)

    differences = compare(golden, found, lambda ids: target()(ids))
    assert [difference for difference in differences if difference.verdict == "bug"] == []
    assert [entry["differs_for_k"] for entry in found["entries"]] == [[]] * len(prompts)
    assert golden["max_tokens"] >= 32 and len(prompts) >= 2


@pytest.mark.parametrize("mode", ["exact", "qat"])
def test_drafting_never_changes_the_twin(mode):
    found = record(model_of(TWIN, mode), read_prompts(PROMPTS, 8), EVERY_DRAFT_LENGTH, 64)
    assert [entry["differs_for_k"] for entry in found["entries"]] == [[]] * 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "qat"])
def test_drafting_never_changes_the_demo(mode):
    prompts = read_prompts(PROMPTS)
    assert len(prompts) >= 50
    found = record(model_of(DEMO, mode), prompts, EVERY_DRAFT_LENGTH, 200)
    assert [entry["differs_for_k"] for entry in found["entries"]] == [[]] * len(prompts)


def test_prompts_are_spread_over_the_file_and_checked(tmp_path):
    prompts = read_prompts(PROMPTS)
    spread = read_prompts(PROMPTS, 8)
    assert spread[0] == prompts[0] and {prompt["class"] for prompt in spread} == {
        "code",
        "docs",
        "prose",
        "chat",
    }
    assert read_prompts(PROMPTS, 10_000) == prompts
    broken = tmp_path / "prompts.json"
    for text in ('{"text": "a"}', '[{"text": "a"}]', "[", None):
        if text is None:
            broken.unlink()
        else:
            broken.write_text(text)
        with pytest.raises(v4flash.UsageError, match="prompts.json"):
            read_prompts(broken)


def test_recording_command_writes_a_transcript(tmp_path):
    out = tmp_path / "transcript.json"
    arguments = [
        "--ckpt",
        TWIN,
        "--prompts",
        PROMPTS,
        "--out",
        out,
        "--count",
        1,
        "--tokens",
        6,
        "--mode",
        "exact",
    ]
    assert record_command([*map(str, arguments), "--draft-lengths", "0", "3"]) == 0
    written = json.loads(out.read_text())
    assert written["draft_lengths"] == [0, 3] and len(written["entries"][0]["ids"]) == 6
