"""`v4flash kernels tune`: the fastest tile choices on this GPU, written where the launches look them up.

Knows: options and printed lines. Does not know: how choices are tried and judged (bench.kernel_tuning).
"""

import argparse
import json
from pathlib import Path

from v4flash.cli import device, kernel_cases
from v4flash.cli.options import add_device
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "tune"
HELP = "time every operation's tile choices on a GPU, and record those that win by more than noise"
RECORD_NAME = "record.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kernel_cases.add_choice(parser)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"write choices (OPERATION/tuning/GPU.json) and the figures ({RECORD_NAME}) into this folder, and leave "
        "pallas_kernels as it is",
    )
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Tunes and prints a line for each name of choices; 1 if what is recorded now could not run or is wrong."""
    out = Path(options.out) if options.out else None
    if out is not None and not out.is_dir():
        raise UsageError(f"--out {out}: there is no such folder")
    from pallas_kernels import registry

    cases = registry.tuned_with(kernel_cases.chosen(options))
    if not cases:
        raise UsageError("none of these cases has tile choices to try")
    device.choose(options.device)
    from v4flash.bench import kernel_tuning

    messages = Messages(options.quiet)
    heard = messages.say if options.json else print
    facts = kernel_cases.run_facts()

    def keep(record: dict) -> list[Path]:
        if out is not None:
            text = json.dumps(facts | record, indent=1)
            (out / RECORD_NAME).write_text(text + "\n", encoding="utf-8")
        return kernel_tuning.write_choices(record, out)

    record = facts | kernel_tuning.tune(cases, heard, keep)
    files = keep(record)
    if options.json:
        print(json.dumps(record, indent=1))
    for file in files:
        messages.say(f"wrote {file}")
    return 1 if any(row["candidates"][0].get("problem") for row in record["trials"]) else 0
