"""The command line: `v4flash COMMAND ...`, `python -m v4flash COMMAND ...`, `python run_decode.py ...`.

Knows: the list of commands, exit codes, and what a person sees of a failure. Does not know: what commands do;
each is one module of this package with `NAME`, `HELP`, `add_arguments(parser)` and `run(options) -> int`, which
imports what is heavy only when it runs.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from v4flash.cli import device
from v4flash.cli.options import Parser
from v4flash.errors import CapacityError, V4FlashError

COMMANDS = (
    "decode",
    "inspect",
    "convert",
    "logits",
    "draft",
    "kernels",
    "bench",
    "plan",
    "experts",
    "advise",
    "certify",
)
INTERRUPTED = 130
_EPILOG = """exit codes: 0 done, 1 the run failed, 2 wrong usage, 3 checkpoint missing or damaged,
4 does not fit, or the device is not there, 130 interrupted"""


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="v4flash",
        description="Single-stream speculative decoding of DeepSeek-V4-Flash and V4.1-Flash.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"v4flash.cli.{name}")
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's) and returns its exit code. Nothing escapes but bugs here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    device.default_platform()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader went away; the interpreter must not complain again when it flushes at exit.
        if sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except V4FlashError as error:
        return _failed(str(error), error.exit_code, debug)
    except Exception as error:  # the last line of defence: a person gets a sentence, not a traceback
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            sentence = f"out of memory ({_first_line(error)}); try a smaller --ctx, fewer --rows or a smaller --chunk"
            return _failed(sentence, CapacityError.exit_code, debug)
        sentence = f"unexpected {type(error).__name__}: {_first_line(error)}"
        return _failed(sentence + ("" if debug else "; run again with --debug for the traceback"), 1, debug)


def _run(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no failure
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as exit:  # argparse ends the process after --help
        return exit.code if isinstance(exit.code, int) else 0
    return options.run(options)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _failed(sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"v4flash: {sentence}", file=sys.stderr)
    return code
