"""What a person at a terminal sees, and what a pipe gets."""

import io
import sys

import pytest

from v4flash.cli.terminal import Messages, Printer, closing_line, rate, share
from v4flash.engine.statistics import Statistics

RUNNING = dict(
    compile_seconds=12.34, cached=True, peak=1_900_000_000, device="cpu", backend="xla", certified="verified"
)


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def streams(monkeypatch):
    """Puts a terminal or a pipe in place of both streams."""

    def replace(kind):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", kind())
        monkeypatch.setattr(sys, "stderr", kind())
        return sys.stdout, sys.stderr

    return replace


def answer(printer):
    for kind, text in (("reasoning", "why"), ("reasoning", " so"), ("content", "Be"), ("content", "cause")):
        printer.write(kind, text)
    printer.finish()


def test_reasoning_is_dim_on_a_terminal(streams, monkeypatch):
    out, err = streams(Screen)
    answer(Printer())
    assert "\x1b[2mwhy\x1b[0m" in out.getvalue()
    assert out.getvalue().endswith("Because\n") and err.getvalue() == ""
    out, _ = streams(Screen)
    monkeypatch.setenv("NO_COLOR", "1")
    answer(Printer())
    assert out.getvalue() == "why so\n\nBecause\n"


def test_pipe_gets_the_answer_to_the_byte(streams):
    out, err = streams(io.StringIO)
    answer(Printer())
    assert out.getvalue() == "Because"
    assert err.getvalue().startswith("why so")
    out, err = streams(io.StringIO)
    answer(Printer(quiet=True))
    assert (out.getvalue(), err.getvalue()) == ("Because", "")


def test_progress_is_replaced_only_on_a_terminal(streams):
    _, err = streams(Screen)
    messages = Messages()
    messages.progress("loading")
    messages.say("done")
    assert err.getvalue() == "loading ...\r\x1b[Kdone\n"
    _, err = streams(io.StringIO)
    messages = Messages()
    messages.progress("loading")
    messages.say("done")
    assert err.getvalue() == "loading ...\ndone\n"


def test_closing_line_of_a_run():
    statistics = Statistics(k=2, seed=1234, prompt_tokens=812, prefill_seconds=0.41, decode_seconds=1.0)
    statistics.generated, statistics.finish, statistics.step_seconds = 1, "length", [0.02, 0.021, 0.02]
    for accepted in (2, 1, 0):
        statistics.record(accepted + 1, accepted, 2)
    assert closing_line(statistics.to_json(), **RUNNING) == (
        "prompt 812 tok 0.41 s (1980 tok/s) | decode 7 tok 1.00 s (6.0 tok/s) | "
        "2.00 tok/step, accepted .67 .33 (50 %) | step 20.0 ms | compile 12.3 s (cached) | peak 1.9 GB | "
        "seed 1234 | cpu, xla | finish: length | verified"
    )


def test_closing_line_of_nothing():
    line = closing_line(Statistics(k=0, seed=0).to_json(), **RUNNING)
    assert "decode 0 tok 0.00 s (n/a) | n/a tok/step, accepted n/a | step n/a" in line


def test_figures_for_a_person():
    assert [share(value) for value in (0.0, 0.714, 0.994, 0.996, 1.0)] == [".00", ".71", ".99", "1.0", "1.0"]
    assert [rate(value) for value in (None, 5.04, 251.3)] == ["n/a", "5.0 tok/s", "251 tok/s"]
