"""Where a checkpoint's encoding and effort texts come from, and what is said when they are not there."""

import json

import pytest

from v4flash.errors import CheckpointError, UsageError
from v4flash.text import ChatEncoding, find_ladder
from v4flash.text.effort import V4_0731, V4_1, V4_PREVIEW


def write_json(folder, **data):
    (folder / "chat_encoding.json").write_text(json.dumps({"format": 1, **data}), encoding="utf-8")
    return folder


def write_encoder(folder, source, name="encoding.py"):
    (folder / "encoding").mkdir(exist_ok=True)
    (folder / "encoding" / name).write_text(source, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("deepseek_v4", V4_PREVIEW), ("deepseek_v41", V4_1), ("deepseek_v41_text", V4_1)],
)
def test_model_type_alone(tmp_path, model_type, name):
    encoding = ChatEncoding.for_checkpoint(tmp_path, model_type)
    assert (encoding.name, encoding.chosen_by) == (name, f"model_type {model_type}")


def test_without_files_only_the_silent_level_works(tmp_path):
    ladder, _ = find_ladder(tmp_path, "deepseek_v4")
    assert ladder.choices == ("off", "on", "high")
    assert ladder.paragraph("on") == ""
    with pytest.raises(CheckpointError, match="--think max needs .* expected chat_encoding.json"):
        ladder.paragraph("max")


@pytest.mark.parametrize("think", ["on", "max", "60"])
def test_v41_cannot_think_without_its_effort_line(tmp_path, think):
    ladder, _ = find_ladder(tmp_path, "deepseek_v41")
    assert ladder.choices == ("off",)
    with pytest.raises(CheckpointError, match=f"--think {think} needs the effort text of v4.1"):
        ladder.paragraph(think)


@pytest.mark.parametrize("think", ["loud", "60", "", "-1", "²"])
def test_unknown_effort_is_a_usage_error(tmp_path, think):
    with pytest.raises(UsageError, match="use one of off, on, high, max"):
        find_ladder(tmp_path, "deepseek_v4")[0].paragraph(think)


def test_chat_encoding_json(tmp_path):
    effort = {"template": "E{budget}", "levels": {"low": 25, "max": 100}, "default": "low"}
    ladder, chosen_by = find_ladder(write_json(tmp_path, encoding=V4_1, effort=effort), "deepseek_v41")
    assert chosen_by == "chat_encoding.json"
    assert [ladder.paragraph(think) for think in ("on", "max", "1", "99")] == ["E25", "E100", "E1", "E99"]
    assert ladder.choices == ("off", "on", "low", "max")
    for budget in ("0", "101"):
        with pytest.raises(UsageError, match="go from 1 to 100"):
            ladder.paragraph(budget)
    with pytest.raises(CheckpointError, match="--think xhigh needs"):
        ladder.paragraph("xhigh")


def test_level_with_empty_text_needs_no_template(tmp_path):
    ladder, _ = find_ladder(
        write_json(tmp_path, encoding=V4_1, effort={"levels": {"high": ""}}), "deepseek_v41"
    )
    assert ladder.paragraph("on") == ""


def test_authors_encoder_is_read_and_never_run(tmp_path):
    source = 'import os\nos.abort()\nREASONING_EFFORT_MAX = (\n    "Deep: "\n    "yes\\n\\n"\n)\n'
    ladder, chosen_by = find_ladder(write_encoder(tmp_path, source, "encoding_dsv4.py"), "deepseek_v4")
    assert (ladder.encoding, chosen_by) == (V4_PREVIEW, "encoding/encoding_dsv4.py")
    assert (ladder.paragraph("on"), ladder.paragraph("max")) == ("", "Deep: yes\n\n")


def test_encoder_of_0731(tmp_path):
    levels = '{"low": "", "high": "H", "max": "M"}'
    source = f'_REASONING_EFFORT_PROMPTS = {levels}\nDEFAULT_REASONING_EFFORT = "high"\n'
    ladder, _ = find_ladder(write_encoder(tmp_path, source), "deepseek_v4")
    assert ladder.encoding == V4_0731
    assert [ladder.paragraph(think) for think in ("on", "low", "max")] == ["H", "", "M"]


def test_encoder_of_v41(tmp_path):
    source = (
        'REASONING_EFFORT_TEMPLATE: str = "N {budget}\\n\\n"\n'
        'REASONING_EFFORT_MAPPINGS: dict = {"low": 50, "high": 75, "max": 100}\n'
        'DEFAULT_REASONING_EFFORT = "high"\n'
    )
    ladder, _ = find_ladder(write_encoder(tmp_path, source), "deepseek_v41")
    assert ladder.encoding == V4_1
    assert [ladder.paragraph(think) for think in ("on", "max", "3")] == ["N 75\n\n", "N 100\n\n", "N 3\n\n"]


def test_json_beats_encoder_and_override_beats_both(tmp_path):
    write_encoder(tmp_path, 'REASONING_EFFORT_MAX = "P"')
    assert find_ladder(tmp_path, "deepseek_v4", V4_PREVIEW)[0].paragraph("max") == "P"
    write_json(tmp_path, encoding=V4_0731, effort={"levels": {"max": "J"}})
    ladder, _ = find_ladder(tmp_path, "deepseek_v4")
    assert (ladder.encoding, ladder.paragraph("max")) == (V4_0731, "J")
    ladder, chosen_by = find_ladder(tmp_path, "deepseek_v4", V4_1)
    assert (ladder.encoding, ladder.choices, chosen_by) == (V4_1, ("off",), "--encoding")


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--encoding v5 is unknown; use one of v4-preview, v4-0731, v4.1"):
        find_ladder(tmp_path, "deepseek_v4", "v5")
    with pytest.raises(CheckpointError, match="model_type 'qwen3' .* give --encoding"):
        find_ladder(tmp_path, "qwen3")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": 2, "encoding": V4_1}, 'expected an object with "format": 1, found 2'),
        ({"encoding": "v9"}, "one of v4-preview, v4-0731, v4.1, found 'v9'"),
        ({"encoding": V4_1, "effort": []}, "object with an object"),
        (
            {"encoding": V4_1, "effort": {"levels": {"max": 100}}},
            "'max' to be text, or a budget .* found 100",
        ),
        ({"encoding": V4_1, "effort": {"template": "none"}}, "text with {budget}, found 'none'"),
        (
            {"encoding": V4_1, "effort": {"levels": {"low": ""}}},
            "default effort to be one of low, found 'high'",
        ),
        ({"encoding": V4_1, "effort": {"template": "{budget}", "levels": {"max": 101}}}, "found 101"),
        ({"encoding": V4_0731, "effort": {"levels": {"max": None}}}, "found None"),
        ({"encoding": V4_0731, "effort": {"default": ["low"]}}, "one of low, found \\['low'\\]"),
    ],
)
def test_wrong_json_is_refused_with_the_value(tmp_path, data, message):
    with pytest.raises(CheckpointError, match=message):
        find_ladder(write_json(tmp_path, **data), "deepseek_v41")


def test_damaged_files_are_refused(tmp_path):
    write_encoder(tmp_path, "REASONING_EFFORT_MAX = (")
    with pytest.raises(CheckpointError, match="cannot be read as Python"):
        find_ladder(tmp_path, "deepseek_v4")
    write_encoder(tmp_path, "REASONING_EFFORT_MAX = make()")
    with pytest.raises(CheckpointError, match="REASONING_EFFORT_MAX is not a plain literal"):
        find_ladder(tmp_path, "deepseek_v4")
    (tmp_path / "chat_encoding.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        find_ladder(tmp_path, "deepseek_v4")
