"""`v4flash decode` from the outside: what it prints where, and how it ends."""

import io
import json
import re
import types

import numpy as np
import pytest

import v4flash
import v4flash.cli.decode
from v4flash.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from v4flash.cli import build_parser
from v4flash.engine import backends
from v4flash.errors import UsageError

TRAINED_BLOCK, CONTEXT_LIMIT = 3, 512  # of the random checkpoint in conftest.py
CLOSING = re.compile(
    r"^prompt \d+ tok [\d.]+ s \(.+?\) \| decode (?P<tokens>\d+) tok [\d.]+ s \((?P<rate>.+?)\) \| "
    r"(?P<per_step>\S+) tok/step, accepted (?P<accepted>.+?) \| step .+? \| "
    r"compile [\d.]+ s \((?P<compile>cached|new)\) \| "
    r"peak [\d.]+ [GM]B \| seed (?P<seed>\d+) \| cpu, xla \| finish: (?P<finish>.+?) \| (?P<certified>.+)$",
    re.MULTILINE,
)
SAMPLED = ("--prompt", "hello", "--temperature", 1, "--max-tokens", 24)


def parsed(*arguments):
    return build_parser().parse_args(["decode", *arguments])


@pytest.fixture
def document(decode):
    """The JSON document of one successful call."""

    def run(*arguments):
        outcome = decode("--json", *arguments)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return run


def test_text_and_figures_are_kept_apart(decode, document):
    outcome = decode(*SAMPLED)
    assert outcome.code == 0, outcome.err
    reference = document(*SAMPLED)
    assert outcome.out == reference["text"] != ""
    closing = CLOSING.search(outcome.err)
    assert closing and closing["finish"] == "length" and int(closing["tokens"]) == 24
    header = outcome.err.splitlines()[0]
    for part in (
        "deepseek_v4",
        "float32",
        "exact",
        "cpu",
        "xla (auto",
        f"k auto, up to {TRAINED_BLOCK} (all",
        "context 256",
    ):
        assert part in header
    assert reference["schema"] == 1
    assert reference["settings"]["backend"] == "xla" and reference["settings"]["chunk"] == 32
    assert reference["statistics"]["generated"] == len(reference["token_ids"]) == 24
    assert reference["settings"]["seed"] == 0 and reference["device"]["platform"] == "cpu"
    assert reference["compile"]["cached"], "the second call must find the programs of the first"
    assert {"jax", "jaxlib", "python"} <= reference["versions"].keys()


def test_greedy_text_is_the_same_for_every_k(document, decode):
    greedy = ("--prompt", "abc", "--max-tokens", 40)
    expected = document(*greedy, "--k", 0)
    assert expected["statistics"]["acceptance"] is None
    for k in (TRAINED_BLOCK, 7):
        found = document(*greedy, "--k", k)
        assert found["token_ids"] == expected["token_ids"]
        assert len(found["statistics"]["drafted"]) == found["settings"]["k"] == k
    closing = CLOSING.search(decode(*greedy, "--k", 0).err)
    assert closing["accepted"] == "n/a" and closing["per_step"] == "1.00"


def test_k_past_the_trained_block_is_noted(decode):
    outcome = decode("--prompt", "a", "--k", 7, "--max-tokens", 0)
    assert f"k=7 goes past the trained block of {TRAINED_BLOCK}; watch positions 4-7 in" in outcome.err
    assert "watch position 6 in" in v4flash.cli.decode.past_block(6, 5)
    assert "trained block" not in decode("--prompt", "a", "--k", TRAINED_BLOCK, "--max-tokens", 0).err


def test_rows_follow_from_k():
    rows = v4flash.cli.decode.pass_rows
    assert rows("auto", None, True) == (8, None)
    assert [rows(k, None, True) for k in (0, 7, 8, 9)] == [(8, 0), (8, 7), (16, 8), (16, 9)]
    assert rows(2, 4, True) == (4, 2)


def test_seed_decides_the_sampled_text(document):
    first, again = (document(*SAMPLED, "--seed", 1)["token_ids"] for _ in range(2))
    assert first == again
    assert document(*SAMPLED, "--seed", 2)["token_ids"] != first


def test_how_drafts_are_made_and_judged_leaves_a_greedy_text_alone(document):
    greedy = ("--prompt", "abc", "--max-tokens", 24)
    expected = document(*greedy)
    assert expected["settings"]["adaptive"] and expected["settings"]["rule"] == "block"
    options = ("--rule", "token", "--draft-temperature", 1.5, "--lookup", "--stop-repeats", 40, "--k", 2)
    found = document(*greedy, *options)
    assert found["token_ids"] == expected["token_ids"]
    settings = found["settings"]
    assert not settings["adaptive"] and settings["rule"] == "token" and settings["lookup"]
    assert settings["draft_temperature"] == 1.5 and settings["stop_repeats"] == 40


@pytest.mark.parametrize("options", [("--rule", "token"), ("--draft-temperature", 0), ("--k", 0)])
def test_a_sampled_text_repeats_with_its_seed_for_every_way_of_drafting(document, options):
    first, again = (document(*SAMPLED, "--seed", 3, *options)["token_ids"] for _ in range(2))
    assert first == again


def test_one_token_too_often_ends_the_text(document):
    whole = document("--prompt", "abc", "--max-tokens", 40)["token_ids"]
    found = document("--prompt", "abc", "--max-tokens", 40, "--stop-repeats", 2)
    again = [at for at in range(1, len(whole)) if whole[at] == whole[at - 1]]
    expected = whole[: again[0] + 1] if again else whole
    assert found["token_ids"] == expected
    assert found["statistics"]["finish"] == ("repeated" if again else "length")


def test_a_speed_is_called_verified_only_with_a_certificate(decode, document):
    short = ("--prompt", "abc", "--max-tokens", 4)
    unverified = "| unverified (no certificate; `v4flash certify --save` makes one)"
    assert decode(*short).err.rstrip().endswith(unverified)
    assert decode(*short, "--k", 0).err.rstrip().endswith("| plain decoding")
    assert document(*short)["certificate"]["status"] == "unverified"


def test_text_ends_before_the_stop_string(document):
    whole = document(*SAMPLED, "--raw")
    printable = [at for at, character in enumerate(whole["text"]) if character.isascii()]
    at = next(at for at in printable if at >= 4)
    stop = whole["text"][at]
    found = document(*SAMPLED, "--raw", "--stop", stop)
    assert found["text"] == whole["text"].split(stop)[0]
    assert found["statistics"]["finish"] == "stop"
    tokens = found["token_ids"]
    assert tokens == whole["token_ids"][: len(tokens)] and found["statistics"]["generated"] == len(tokens)
    before = document(*SAMPLED, "--raw", "--stop", stop, "--max-tokens", len(tokens) - 1)
    assert before["statistics"]["finish"] == "length" and len(before["token_ids"]) == len(tokens) - 1


def test_no_tokens_still_gives_figures(decode):
    outcome = decode("--prompt", "hello", "--max-tokens", 0)
    assert (outcome.code, outcome.out) == (0, "")
    closing = CLOSING.search(outcome.err)
    assert (closing["tokens"], closing["rate"], closing["per_step"]) == ("0", "n/a", "n/a")


def test_empty_prompts(document):
    raw = document("--raw", "--prompt", "", "--max-tokens", 2)
    assert raw["prompt"]["token_ids"] == [0] and len(raw["token_ids"]) == 2
    chat = document("--prompt", "", "--max-tokens", 2)
    assert len(chat["prompt"]["token_ids"]) == 4


@pytest.mark.parametrize("arguments", [["--prompt", "-"], ["--prompt-file", "FILE"], []])
def test_prompt_from_pipe_and_file_is_taken_to_the_byte(arguments, tmp_path, monkeypatch):
    data = "  naïve\r\n".encode()
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    arguments = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert v4flash.cli.decode.prompt_text(parsed(*arguments)) == data.decode()


def test_prompt_that_is_no_text_is_refused(decode, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"abc\xff")
    for arguments in (["--prompt-file", file], ["--prompt-file", tmp_path / "absent"]):
        outcome = decode(*arguments)
        assert outcome.code == 2 and str(arguments[1]) in outcome.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert decode().code == 2


def test_no_prompt_on_a_terminal_is_wrong_usage(decode, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    outcome = decode()
    assert outcome.code == 2 and "--prompt" in outcome.err


def test_show_prompt_prints_what_is_encoded(decode):
    outcome = decode("--prompt", "<think>", "--system", "s", "--show-prompt", "--max-tokens", 0)
    assert "<｜begin▁of▁sentence｜>s<｜User｜><think><｜Assistant｜></think>\n" in outcome.err
    typed = " ".join(str(3 + sorted_byte(character)) for character in "<think>")
    assert f"12 ids: 0 {3 + sorted_byte('s')} 259 {typed} 260 262\n" in outcome.err


def sorted_byte(character: str) -> int:
    """Place of a printable ASCII character in the fixture's alphabet."""
    return ord(character) - ord("!")


def test_prompt_longer_than_the_context_names_both_numbers(decode):
    outcome = decode("--raw", "--prompt", "x" * 256)
    assert outcome.code == 4
    assert "prompt has 257 tokens, context is 256" in outcome.err and "compiling" not in outcome.err


@pytest.mark.parametrize("room", [0, 1, 3])
def test_generation_ends_where_the_context_does(document, room):
    found = document("--raw", "--prompt", "x" * (255 - room), "--ignore-eos", "--k", 3)
    assert len(found["token_ids"]) == room
    assert found["statistics"]["finish"] == "context"


def test_unfinished_reasoning_is_said(decode, document):
    arguments = ("--prompt", "hi", "--think", "on", "--max-tokens", 5, "--temperature", 1)
    outcome = decode(*arguments)
    assert (outcome.code, outcome.out) == (0, "")
    assert "before the reasoning ended" in outcome.err
    found = document(*arguments)
    assert found["reasoning"] and not found["text"] and not found["reasoning_complete"]


def test_effort_without_its_text_is_refused_before_loading(decode):
    outcome = decode("--prompt", "hi", "--think", "max")
    assert outcome.code == 3 and "compiling" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "triton"], "auto, xla, fused"),
        (["--k", 10], "limit is 9"),
        (["--k", 8, "--rows", 8], "--rows 16"),
        (["--k", -1], "whole number"),
        (["--k", "many"], "whole number"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", -1], "temperature"),
        (["--top-p", 2], "top_p"),
        (["--min-p", "x"], "not a number"),
        (["--seed", -1], "whole number"),
        (["--stop", ""], "stop string"),
        (["--raw", "--system", "s"], "--system"),
        (["--raw", "--think", "on"], "--think"),
        (["--prompt-file", "x"], "both"),
        (["--rule", "both"], "block, token"),
        (["--draft-temperature", -1], "temperature"),
        (["--draft-temperature", "warm"], "not a number"),
        (["--stop-repeats", -1], "whole number"),
        (["--stop-repeats", 1], "2 and more"),
        (["--speculation", "absent.json"], "cannot read"),
        (["--certificate", "absent.json"], "cannot read"),
        (["--encoding", "v9"], "v4-preview"),
    ],
)
def test_options_that_cannot_be_honoured(decode, arguments, words):
    outcome = decode("--prompt", "x", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err and "compiling" not in outcome.err


def test_fused_launches_need_a_gpu_that_they_are_made_for(decode, monkeypatch):
    outcome = decode("--prompt", "x", "--backend", "fused")
    assert (outcome.code, outcome.out) == (4, "")
    assert "needs an NVIDIA GPU of compute capability 9.0 or 10.3, found cpu" in outcome.err
    assert "use --backend xla" in outcome.err and "compiling" not in outcome.err
    gpu = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(backends, "current_device", lambda: gpu)
    outcome = decode("--prompt", "x", "--backend", "fused", "--rows", 16)
    assert outcome.code == 2 and "rows is 16, but passes of backend fused have 8" in outcome.err


def test_header_says_which_backend_and_why():
    shown = v4flash.cli.decode.shown_backend
    assert shown("xla", backends.Backend("xla")) == "xla"
    assert shown("auto", backends.Backend("fused")) == "fused (auto)"
    assert shown("auto", backends.Backend("xla", "found cpu")) == "xla (auto: found cpu)"


def test_drafting_without_a_drafter_is_refused(call, tmp_path, plain_checkpoint):
    outcome = call("decode", "--ckpt", plain_checkpoint, "--prompt", "x", "--k", 2)
    assert outcome.code == 2 and "no drafter" in outcome.err
    outcome = call("decode", "--ckpt", plain_checkpoint, "--prompt", "x", "--lookup")
    assert outcome.code == 2 and "drafter" in outcome.err


def test_cold_experts_write_the_same_text(decode, document):
    outcome = decode(*SAMPLED, "--experts", "host", "--hot-experts", 3)
    assert outcome.code == 0, outcome.err
    assert outcome.out == document(*SAMPLED)["text"]
    assert "experts host, 3 of 4 hot" in outcome.err.splitlines()[0] and "cpu, xla+host" in outcome.err
    found = document(*SAMPLED, "--experts", "host", "--hot-experts", 3)
    settings = found["settings"]
    assert (settings["backend"], settings["experts"], settings["hot_experts"]) == ("xla+host", "host", 3)
    assert found["compile"]["cached"]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--experts", "host"), "--experts host needs --hot-experts"),
        (("--experts", "host", "--hot-experts", 1), "hot experts of a layer are 1, expected 2 to 3"),
        (("--experts", "host", "--hot-experts", 4), "with all 4 hot, use --experts resident"),
        (("--hot-experts", 3), "with --experts resident, where all are hot"),
        (("--experts", "host", "--hot-experts", 3, "--expert-stats", "no-file"), "cannot read no-file"),
        (("--experts", "elsewhere"), "not one of resident, peer, host, sidecar"),
    ],
)
def test_places_for_experts_that_cannot_be(decode, arguments, words):
    outcome = decode("--prompt", "a", *arguments)
    assert outcome.code == UsageError.exit_code and outcome.out == ""
    assert words in outcome.err and outcome.err.count("\n") == 1


def test_command_line_beats_environment_beats_default(call, monkeypatch):
    assert parsed().k == "auto" and parsed().ckpt is None
    monkeypatch.setenv("V4FLASH_K", "2")
    monkeypatch.setenv("V4FLASH_CKPT", "somewhere")
    assert parsed().k == 2 and parsed().ckpt == "somewhere"
    assert parsed("--k", "1", "--ckpt", "here").k == 1
    monkeypatch.setenv("V4FLASH_BACKEND", "nonsense")
    with pytest.raises(UsageError, match="nonsense"):
        parsed()


def test_context_is_cut_to_the_checkpoints_limit_aloud(call, checkpoint):
    outcome = call(
        "decode", "--ckpt", checkpoint, "--prompt", "x" * CONTEXT_LIMIT, "--raw", "--ctx", 10 * CONTEXT_LIMIT
    )
    assert outcome.code == 4
    assert f"using {CONTEXT_LIMIT}" in outcome.err and f"context is {CONTEXT_LIMIT}" in outcome.err


def test_interruption_keeps_the_text_and_the_figures(decode, monkeypatch):
    whole = decode(*SAMPLED).out
    shown = []

    class Stopping(v4flash.cli.decode.Printer):
        def write(self, kind, text):
            super().write(kind, text)
            shown.append(text)
            if len(shown) == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr(v4flash.cli.decode, "Printer", Stopping)
    outcome = decode(*SAMPLED)
    assert outcome.code == 130
    assert outcome.out == "".join(shown) and whole.startswith(outcome.out)
    assert CLOSING.search(outcome.err)["finish"] == "interrupted"


def test_broken_weights_stop_the_run(decode, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(tmp_path.glob("*.safetensors"))
    stored = SafetensorsFile(shard)
    tensors = {name: (info.dtype, np.array(stored.tensor(name))) for name, info in stored.tensors.items()}
    tensors["norm.weight"][1][3] = np.nan
    write_safetensors(shard, tensors)
    outcome = decode("--prompt", "x", "--ckpt", tmp_path)
    assert (outcome.code, outcome.out) == (1, "")
    assert "non-finite logits" in outcome.err


def test_places_without_a_checkpoint(call, tmp_path, monkeypatch):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    for place in (tmp_path / "absent", tmp_path, file):
        outcome = call("decode", "--ckpt", place, "--prompt", "x")
        assert outcome.code == 3 and str(place) in outcome.err
    monkeypatch.setattr(v4flash, "__file__", str(tmp_path / "src" / "v4flash" / "__init__.py"))
    outcome = call("decode", "--prompt", "x")
    assert outcome.code == 3 and "--ckpt" in outcome.err


def test_quiet_says_nothing(decode):
    outcome = decode(*SAMPLED, "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out
