"""The demonstration model thinks and answers: what is reasoning and what is answer does not depend on drafts."""

from pathlib import Path

import pytest

import v4flash
from v4flash.fidelity.record_transcripts import read_prompts
from v4flash.text import split_reasoning
from v4flash.text.tokenizer import THINK_CLOSE

DEMO = Path(__file__).resolve().parents[2] / "demo"
DRAFT_LENGTHS = (*range(1, 8), "auto")
TOKENS = 64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "qat"])
def test_reasoning_and_answer_are_those_of_plain_decoding(mode):
    model = v4flash.load(DEMO, context=512, mode=mode, dtype="float32")
    close = model.tokenizer.control_id(THINK_CLOSE)
    questions = [prompt["text"] for prompt in read_prompts(DEMO / "prompts.json") if prompt["chat"]]
    # Shipped answers show no tool calls; markup in a question at least meets the drafter.
    questions = [*questions[:6], 'Write <｜DSML｜invoke name="weather"> and </think> twice.']
    closed, inside = 0, 0
    for question in questions:
        for think in ("off", "on"):
            prompt = model.encode(question, think=think)

            def answered(k, prompt=prompt):
                generation = model.generate(prompt, k=k, lookup=k == "auto", max_tokens=TOKENS)
                records = list(generation)
                parts = [part for record in records for part in record.parts]
                return (
                    (generation.reasoning, generation.text, generation.reasoning_open, generation.tokens),
                    parts,
                    records,
                )

            expected, parts, _ = answered(0)
            whole = model.tokenizer.decode(
                [token for token in expected[3] if token != model.config.eos_token_id]
            )
            assert expected[:3] == split_reasoning(whole, think == "on")
            closed += close in expected[3]
            for k in DRAFT_LENGTHS:
                found, parts, records = answered(k)
                assert found == expected, (question, think, k)
                for part, text in (("reasoning", found[0]), ("content", found[1])):
                    assert "".join(piece for kind, piece in parts if kind == part) == text
                inside += any(close in record.tokens[: record.accepted] for record in records)
    print(f"{mode}: {closed} texts end their reasoning, {inside} times inside an accepted block")
    assert closed > 2 and inside > 2
