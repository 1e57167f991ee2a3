"""`v4flash advise` and `v4flash certify` from the outside, and decoding with what advise wrote."""

import argparse
import json

import pytest

from v4flash.cli import certify, prompt_files
from v4flash.cli.advise import comparison_table, table
from v4flash.cli.certify import by_rows, draft_lengths
from v4flash.engine import speculation_file
from v4flash.fidelity import certificate_file

MAX_K = 2
PROMPTS = [
    {"class": "code", "text": "def f(x):\n    return x", "chat": False},
    {"class": "prose", "text": "It was a dark night, and ", "chat": False},
    {"class": "prose", "text": "hello", "chat": True},
]
SMALL = ("--tokens", 12)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "some.json"
    file.write_text(json.dumps(PROMPTS))
    return file


@pytest.mark.slow  # compiles and measures for the better part of a minute
def test_advice_is_measured_printed_and_kept(call, decode, checkpoint, prompts, tmp_path):
    out = tmp_path / "costs.json"
    advise = ("advise", "--ckpt", checkpoint, "--prompts", prompts, *SMALL, "--max-k", MAX_K)
    outcome = call(*advise, "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert [row["k"] for row in document["draft_lengths"]] == [0, 1, 2, "auto"]
    assert set(document["classes"]) == {"code", "prose"} and document["prompts"] == 3
    assert all(row["tokens_per_second"] > 0 and row["step_ms"] > 0 for row in document["draft_lengths"])
    assert document["loses"] == (document["best_k"] == 0) and document["verdict"]
    kept = speculation_file.read(out)
    assert len(kept.costs.milliseconds) == MAX_K + 2 and min(kept.costs.milliseconds) > 0
    assert kept.costs.rows == 8 and kept.costs.backend == "xla" and kept.costs.device == document["device"]
    assert kept.costs.milliseconds[1] == document["drafted_unverified_ms"]
    assert [fitted.temperature for fitted in kept.calibrations] == [0.0, 1.0]
    assert all(len(fitted.slope) == len(fitted.pairs) >= 1 for fitted in kept.calibrations)

    again = call(*advise, "--out", out)
    assert again.code == 2 and "--overwrite" in again.err
    shown = table(document).splitlines()
    assert shown[0].split() == "k step ms tok/step tok/s predicted pays below ms".split()
    assert [line.split()[0] for line in shown[1:5]] == ["0", "1", "2", "auto"]
    assert shown[5].startswith("speeds unverified: no certificate")
    assert {row["certificate"]["status"] for row in document["draft_lengths"]} == {
        "plain decoding",
        "unverified",
    }
    assert "fastest" in shown[1 + document["best_k"]] and shown[-1] == document["verdict"]

    used = decode("--prompt", "abc", "--speculation", out, "--max-tokens", 4)
    assert used.code == 0 and "k auto, up to 3 (by measured costs)" in used.err
    wrong = decode("--prompt", "abc", "--speculation", prompts, "--max-tokens", 4)
    assert wrong.code == 2 and "v4flash advise" in wrong.err


@pytest.mark.slow  # compiles two programs more
def test_ways_are_compared_by_step_times_from_elsewhere(call, checkpoint, prompts, tmp_path):
    file = tmp_path / "elsewhere.json"
    there = speculation_file.StepCosts("a GPU", "fused", "bfloat16", "qat", 8, 2048, [5.0, 6.0, 7.0, 8.0])
    speculation_file.SpeculationFile(costs=there).write(file)
    asked = ("advise", "--ckpt", checkpoint, "--prompts", prompts, *SMALL, "--max-k", MAX_K, "--costs", file)
    outcome = call(*asked, "--temperature", 1, "--top-p", 0.9, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["costs"]["device"] == "a GPU" and document["costs"]["milliseconds"] == [
        5.0,
        6.0,
        7.0,
        8.0,
    ]
    assert (document["temperature"], document["top_p"]) == (1.0, 0.9) and len(document["weights"]) == 64
    assert set(document["classes"]) == {"code", "prose", "all"}
    assert list(document["classes"]["all"]["ways"]) == ["0", "1", "2", "auto", "token"]
    shown = comparison_table(document)
    assert "step times of a GPU" in shown and "block rule over token rule: " in shown


def test_certificate_of_a_sound_checkpoint(call, decode, checkpoint, prompts, tmp_path):
    out = tmp_path / "certificate.json"
    certified = ("certify", "--ckpt", checkpoint, "--prompts", prompts, *SMALL, "--k", "0..2,auto")
    outcome = call(*certified, "--out", out)
    assert outcome.code == 0, outcome.err
    expected = (
        "k 1, 2, auto against 0 (xla, 8 rows): identical texts and states, 3 prompts of 12 tokens; sampled"
    )
    assert expected in outcome.out
    kept = certificate_file.read(out)
    (part,) = kept["parts"]
    assert kept["verdict"] == part["verdict"] == "identical" and part["findings"] == []
    assert list(part["laws"]) == ["0", "1", "2", "auto"] and len(part["texts"]) == 64
    assert all(fits["tokens"] == 36 and fits["impossible"] == 0 for fits in part["laws"].values())
    again = call(*certified, "--out", out)
    assert again.code == 2 and "--overwrite" in again.err

    short = ("--prompt", "abc", "--max-tokens", 4, "--certificate", out)
    assert decode(*short).err.rstrip().endswith("| verified")
    assert decode(*short, "--k", 2).err.rstrip().endswith("| verified")
    found = decode(*short, "--k", 3)
    assert found.err.rstrip().endswith("| unverified (the certificate does not cover k 3)")
    document = json.loads(decode(*short, "--k", 1, "--json").out)
    assert document["certificate"]["status"] == "verified" and len(document["certificate"]["digest"]) == 64
    wrong = decode("--prompt", "abc", "--certificate", prompts)
    assert wrong.code == 2 and "v4flash certify" in wrong.err


def test_a_finding_fails_the_certificate(call, checkpoint, prompts, monkeypatch):
    finding = {
        "prompt": 0, "k": 5, "what": "text", "verdict": "bug", "position": 3, "tokens": [4, 6], "gap": 0.5,
        "best_gap": 0.6, "detail": "",
    }  # fmt: skip
    part = {"draft_lengths": [5], "rows": 8, "backend": "xla", "prompts": 1, "tokens": 16, "laws": {}}
    for verdict, code in (("bug", 1), ("tie", 0)):
        found = part | {"verdict": verdict, "findings": [finding | {"verdict": verdict}]}
        monkeypatch.setattr(certify, "certificate", lambda *arguments, found=found: found)
        outcome = call("certify", "--ckpt", checkpoint, "--prompts", prompts, *SMALL, "--k", 5)
        assert outcome.code == code
        assert f"{verdict} at token 3: 4 without drafting, 6 with" in outcome.out


def test_draft_lengths_and_their_programs():
    assert draft_lengths("0..9") == list(range(1, 10)) and draft_lengths("5") == [5]
    assert draft_lengths("4,1") == [1, 4] and draft_lengths("0..2,auto") == [1, 2, "auto"]
    assert draft_lengths("auto") == ["auto"]
    assert by_rows([1, 7, 8, 9, "auto"]) == [(8, [1, 7, "auto"]), (16, [8, 9])]
    assert by_rows([9]) == [(16, [9])]


def test_any_other_file_is_one_prompt_of_its_own_class(checkpoint, prompts, tmp_path):
    (tmp_path / "poems.txt").write_text("Shall I compare thee")
    options = argparse.Namespace(prompts=[str(tmp_path / "poems.txt"), str(prompts)], count=9)
    found = prompt_files.prompts(options, checkpoint)
    assert found[0] == {"class": "poems", "text": "Shall I compare thee", "chat": False}
    assert found[1:] == PROMPTS
    options.count = 2
    assert prompt_files.prompts(options, checkpoint) == [found[0], found[2]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("certify", "--k", "0"), "from 1 to 9"),
        (("certify", "--k", "3..1"), "from 1 to 9"),
        (("certify", "--k", "1..10"), "from 1 to 9"),
        (("certify", "--k", "many"), "from 1 to 9"),
        (("certify",), "--prompts"),
        (("certify", "--prompts", "absent.txt"), "cannot read"),
        (("certify", "--out", "x.json", "--save"), "not allowed with"),
        (("advise",), "--prompts"),
        (("advise", "--max-k", 8), "--rows 16"),
        (("advise", "--max-k", 0), "whole number"),
        (("advise", "--tokens", 2), "whole number"),
        (("advise", "--costs", "absent.json"), "cannot read"),
        (("advise", "--costs", "absent.json", "--save"), "nothing to keep"),
    ],
)
def test_what_cannot_be_done_is_said_before_loading(call, checkpoint, arguments, words):
    command, *rest = arguments
    outcome = call(command, "--ckpt", checkpoint, *rest)
    assert outcome.code == 2 and words in outcome.err and "compiling" not in outcome.err


def test_a_checkpoint_without_a_drafter_has_no_draft_length(call, plain_checkpoint, prompts):
    for command in ("advise", "certify"):
        outcome = call(command, "--ckpt", plain_checkpoint, "--prompts", prompts, *SMALL)
        assert outcome.code == 2 and "no drafter" in outcome.err and "compiling" not in outcome.err
