"""`v4flash experts profile` from the outside: texts in, figures and a file of counts out, and what is refused."""

import json

import pytest

from v4flash.cli.expert_profile import as_text
from v4flash.placement import statistics

LAYERS, EXPERTS, CHOSEN = 2, 4, 2  # of the random checkpoint in conftest.py


@pytest.fixture
def texts(tmp_path):
    contents = {"prose": "It was a dark and stormy night. ", "code": "def f(x):\n    return x + 1\n"}
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content * 4)
    return [tmp_path / f"{name}.txt" for name in contents]


@pytest.fixture
def profile(call, checkpoint, texts):
    def run(*arguments, text=texts):
        return call("experts", "profile", "--ckpt", checkpoint, "--ctx", 128, "--text", *text, *arguments)

    return run


def test_counts_are_kept_and_figures_printed(profile, tmp_path):
    out = tmp_path / "stats.json"
    outcome = profile("--out", out, "--json", "--hot", "3,2", "--k", 3)
    assert outcome.code == 0, outcome.err
    found, kept = json.loads(outcome.out), statistics.read(out)
    rows = {text["name"]: text["rows"] for text in found["texts"]}
    # One token a byte; 128 bytes and 108 make pieces of 127 behind the begin token.
    assert rows == {"prose.txt": 128 + 2, "code.txt": 108 + 1}
    assert kept.all.routes.sum(axis=1).tolist() == [CHOSEN * sum(rows.values())] * LAYERS, "no padding"
    assert found["step_rows"] == 4 and [entry["hot"] for entry in found["hot"]] == [2, 3]
    for entry in found["hot"]:
        assert entry["share"]["in"] == pytest.approx(kept.decide.share(kept.hot(entry["hot"])), abs=1e-5)
        assert entry["share"]["out"] == pytest.approx(kept.judge.share(kept.hot(entry["hot"])), abs=1e-5)
    again = profile("--out", out)
    assert again.code == 2 and "--overwrite" in again.err


def test_figures_look_like_this(profile):
    outcome = profile("--quiet")
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].startswith(
        "2 texts, measured: 130 rows decide what is hot, 109 judge it; 2 layers choose 2 of 4"
    )
    bars = [line.split() for line in lines[4 : 4 + EXPERTS]]
    assert [bar[0] for bar in bars] == ["1", "2", "3", "4"]
    longest = max(bars, key=lambda bar: float(bar[3]))
    assert longest[-1] == "#" * 40
    assert any(line.split()[:1] == ["3/4"] for line in lines)


def test_a_single_text_says_that_nothing_judged_it(profile, texts):
    outcome = profile("--json", text=texts[:1])
    figures = json.loads(outcome.out)
    assert outcome.code == 0 and figures["hot"][0]["share"]["out"] is None
    said = as_text(figures)
    assert "no second text to judge it" in said and "n/a" in said and "in sample)" in said


def test_what_cannot_be_counted_is_refused_in_one_sentence(profile, texts, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    outcome = profile(text=[*texts, empty])
    assert outcome.code == 2 and "holds no text" in outcome.err and outcome.err.count("\n") == 1
    outcome = profile("--hot", EXPERTS + 1)
    assert outcome.code == 2 and "has 4 experts" in outcome.err
    outcome = profile("--hot", "many")
    assert outcome.code == 2 and "whole number" in outcome.err


def test_text_needs_a_tokenizer(call, plain_checkpoint, texts):
    outcome = call("experts", "profile", "--ckpt", plain_checkpoint, "--ctx", 128, "--text", *texts)
    assert outcome.code == 3 and "no tokenizer.json" in outcome.err
