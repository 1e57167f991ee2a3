"""How figures and text look to a person.

Knows: streams that are terminals and streams that are not, NO_COLOR, and the one closing line. Does not know:
where figures come from.
"""

import os
import sys
from typing import Any, TextIO

NOT_KNOWN = "n/a"
_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches this stream directly."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def has_colour(stream: TextIO) -> bool:
    """Whether escape sequences are welcome: on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Messages:
    """Everything that goes to standard error; `quiet` leaves out all but warnings."""

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._in_place = has_colour(sys.stderr)
        self._open = False

    def say(self, sentence: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.clear()
            print(sentence, file=sys.stderr, flush=True)

    def warn(self, sentence: str) -> None:
        """A line that is shown even when quiet."""
        self.clear()
        print(f"v4flash: {sentence}", file=sys.stderr, flush=True)

    def progress(self, sentence: str) -> None:
        """What happens now; on a terminal the next line replaces it."""
        if self._quiet:
            return
        if not self._in_place:
            return self.say(f"{sentence} ...")
        self.clear()
        print(f"{sentence} ...", end="", file=sys.stderr, flush=True)
        self._open = True

    def clear(self) -> None:
        """Takes back the line that says what happens now."""
        if self._open:
            print(_CLEAR_LINE, end="", file=sys.stderr)
            self._open = False


class Printer:
    """Streams an answer: content to standard output; reasoning dimmed before it on a terminal.

    Where standard output is no terminal it carries the content alone, and reasoning goes to standard error.
    """

    def __init__(self, quiet: bool = False):
        self._terminal, self._colour = is_terminal(sys.stdout), has_colour(sys.stdout)
        self._quiet = quiet
        self._last: str | None = None
        self._ends_line = True

    def write(self, kind: str, text: str) -> None:
        """Shows a piece; `kind` is 'reasoning' or 'content'."""
        if not text:
            return
        if self._last == "reasoning" and kind == "content":
            self._reasoning("\n\n")
        if kind == "reasoning":
            self._reasoning(text)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._ends_line = text.endswith("\n")
        self._last = kind

    def finish(self) -> None:
        """Ends the line that a person sees; a pipe or file gets the text to its last byte and no more."""
        if self._last == "reasoning":
            self._reasoning("\n")
        elif not self._ends_line and self._terminal:
            print(flush=True)
        elif not self._ends_line and not self._quiet:
            print(file=sys.stderr, flush=True)

    def _reasoning(self, text: str) -> None:
        if not self._terminal:
            if not self._quiet:
                print(text, end="", file=sys.stderr, flush=True)
            return
        print(f"{_DIM}{text}{_PLAIN}" if self._colour else text, end="", flush=True)


def rate(value: float | None, unit: str = "tok/s") -> str:
    """A rate for a person, or n/a."""
    if value is None:
        return NOT_KNOWN
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def share(value: float) -> str:
    """A share with two digits and no leading zero: .71, 1.0."""
    return f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"


def amount(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def closing_line(
    figures: dict[str, Any],
    *,
    compile_seconds: float,
    cached: bool,
    peak: int,
    device: str,
    backend: str,
    certified: str,
) -> str:
    """One line that says what a generation did; `figures` as from `Statistics.to_json`, `certified` whether a
    certificate covers it."""
    steps, drafted = figures["steps"], figures["acceptance"] is not None
    positions = " ".join(share(value) for value in figures["acceptance_by_position"])
    accepted = f"{positions} ({100 * figures['acceptance']:.0f} %)" if drafted else NOT_KNOWN
    per_step = f"{figures['tokens_per_step']:.2f}" if steps else NOT_KNOWN
    step_time = f"{figures['step_milliseconds']:.1f} ms" if steps else NOT_KNOWN
    parts = [
        f"prompt {figures['prompt_tokens']} tok {figures['prefill_seconds']:.2f} s"
        f" ({rate(figures['prefill_rate'])})",
        f"decode {figures['generated']} tok {figures['decode_seconds']:.2f} s ({rate(figures['decode_rate'])})",
        f"{per_step} tok/step, accepted {accepted}",
        f"step {step_time}",
        f"compile {compile_seconds:.1f} s ({'cached' if cached else 'new'})",
        f"peak {amount(peak)}",
        f"seed {figures['seed']}",
        f"{device}, {backend}",
        f"finish: {figures['finish'] or 'nothing run'}",
        certified,
    ]
    return " | ".join(parts)
