"""The frame around all commands: help, exit codes, what is said of a failure, and where it runs."""

import os
import subprocess
import sys
import time

import pytest

import v4flash.cli.inspect
from v4flash.cli import COMMANDS, main
from v4flash.errors import CapacityError, CheckpointError, UsageError, V4FlashError

# A bare interpreter starts in well under this; importing JAX takes seconds.
LIGHT_MODULES_ONLY = "import sys, v4flash.cli; v4flash.cli.build_parser(); sys.exit('jax' in sys.modules)"


def process(*arguments, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("V4FLASH_")}
    return subprocess.run(
        [sys.executable, "-m", "v4flash", *map(str, arguments)],
        capture_output=True, text=True, env=environment | settings,
    )  # fmt: skip


def test_help_names_every_command_and_exit_code(call):
    outcome = call("--help")
    assert outcome.code == 0
    assert all(name in outcome.out for name in COMMANDS)
    assert "130 interrupted" in outcome.out


def test_help_imports_nothing_heavy():
    assert subprocess.run([sys.executable, "-c", LIGHT_MODULES_ONLY]).returncode == 0


def test_module_can_be_run():
    found = process("decode", "--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert "V4FLASH_CKPT" in found.stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["decode", "--nonsense"], ["inspect"]])
def test_wrong_usage_is_one_sentence(call, arguments):
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("v4flash: ") and outcome.err.count("\n") == 1
    assert "--help" in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (V4FlashError("a sentence"), 1),
        (UsageError("a sentence"), 2),
        (CheckpointError("a sentence"), 3),
        (CapacityError("a sentence"), 4),
        (KeyboardInterrupt(), 130),
        (MemoryError("a sentence"), 4),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a page of detail"), 4),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(call, monkeypatch, error, code):
    def fail(options):
        raise error

    monkeypatch.setattr(v4flash.cli.inspect, "run", fail)
    outcome = call("inspect", "anything")
    assert outcome.code == code
    assert outcome.err.startswith("v4flash: ") and outcome.err.count("\n") == 1


def test_unexpected_failure_points_to_debug(call, monkeypatch):
    def fail(options):
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr(v4flash.cli.inspect, "run", fail)
    outcome = call("inspect", "anything")
    assert outcome.code == 1
    assert outcome.err == (
        "v4flash: unexpected ZeroDivisionError: first line; run again with --debug for the traceback\n"
    )
    for arguments in (["--debug", "inspect", "anything"], ["inspect", "anything", "--debug"]):
        outcome = call(*arguments)
        assert outcome.code == 1
        assert "Traceback" in outcome.err and "second line" in outcome.err


def test_reader_that_goes_away_is_not_a_crash(checkpoint):
    read, write = os.pipe()
    os.close(read)
    command = subprocess.Popen(
        [sys.executable, "-m", "v4flash", "inspect", str(checkpoint)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    _, complaint = command.communicate()
    assert (command.returncode, complaint) == (1, "")


def test_absent_gpu_is_refused_with_the_way_to_get_one(checkpoint):
    started = time.monotonic()
    found = process(
        "decode", "--ckpt", checkpoint, "--prompt", "x", "--device", "gpu", CUDA_VISIBLE_DEVICES=""
    )
    assert found.returncode == 4 and found.stdout == ""
    assert "--device gpu" in found.stderr and "pip install" in found.stderr
    assert found.stderr.count("v4flash:") == 1
    assert time.monotonic() - started < 60, "nothing may be compiled before the device is known"


def test_misspelt_platform_is_named(checkpoint):
    found = process("decode", "--ckpt", checkpoint, "--prompt", "x", JAX_PLATFORMS="typo")
    assert found.returncode == 4
    assert "JAX_PLATFORMS=typo" in found.stderr


def test_main_takes_the_command_line_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["v4flash", "--help"])
    assert main() == 0
    assert "decode" in capsys.readouterr().out
