"""`v4flash bench`: the time of one step at a configuration's real shapes, on random weights.

Knows: options, the printed table, where a record is written. Does not know: how time is taken (bench.real_step).
"""

import argparse
import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from v4flash.cli import device
from v4flash.cli.options import add, add_configuration, add_device, whole
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "bench"
HELP = "time one speculative step at a configuration's real shapes, on random weights"
KERNELS_SHOWN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--random-weights", action="store_true", required=True, help="make the weights up, on the device"
    )
    add_configuration(parser)
    listed = {"env": False, "metavar": "LIST"}
    add(parser, "--backend", help="xla, fused, or both with a comma between", default="fused", **listed)
    add(parser, "--k", help="drafts per step", default="0,3,5,7", type=numbers, **listed)
    add(parser, "--context", help="committed positions", default="2048,65536", type=numbers, **listed)
    add(
        parser,
        "--temperature",
        help="of target and drafts; 0 is greedy",
        default="0",
        type=temperatures,
        **listed,
    )
    add(
        parser,
        "--experts-resident",
        help="routed experts a layer that are there; the others are never chosen (default: all)",
        type=whole(1),
        env=False,
        metavar="N",
    )
    add(parser, "--rows", help="rows of a verifying pass", default=8, type=whole(2), env=False, metavar="N")
    add(parser, "--steps", help="steps of one loop", default=20, type=whole(1), env=False, metavar="N")
    add(
        parser,
        "--repeats",
        help="loops, of which the median counts",
        default=5,
        type=whole(1),
        env=False,
        metavar="N",
    )
    parser.add_argument("--no-profile", action="store_true", help="take no profile")
    parser.add_argument("--out", metavar="FILE", help="also write the record here, as JSON")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")
    add_device(parser)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    return tuple(whole(0)(part) for part in text.split(","))


def temperatures(text: str) -> tuple[float, ...]:
    """Numbers from 0 with commas between."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value < math.inf for value in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 with commas between")
    return found


def run(options: argparse.Namespace) -> int:
    """Times the cells and prints them."""
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    device.choose(options.device)
    from v4flash.bench import real_step
    from v4flash.config import ModelConfig
    from v4flash.profile.budget import configuration, installed_versions

    request = real_step.Request(
        config=ModelConfig.from_file(configuration(options.config)),
        backends=tuple(options.backend.split(",")),
        draft_lengths=options.k,
        contexts=options.context,
        resident=options.experts_resident,
        rows=options.rows,
        temperatures=options.temperature,
        steps=options.steps,
        repeats=options.repeats,
        profile=not options.no_profile,
    )
    messages = Messages(options.quiet)
    facts = {
        "config": options.config,
        "command": "v4flash " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        # Random weights say no text that speculation could have changed.
        "certificate": None,
    }
    record = facts | real_step.run(request, messages.say)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if options.json else as_text(record))
    return 0


def as_text(record: dict[str, Any]) -> str:
    """A record for a person."""
    lines = [
        f"{record['config']} on {record['device']['kind']}: {record['layers']} layers, {record['rows']} rows, "
        f"{record['experts_resident']} of {record['experts']} experts resident, {record['dtype']}, {record['mode']}, "
        f"random weights (unverified), copy bandwidth {record['copy_bandwidth'] / 1e12:.2f} TB/s",
        "",
        f"{'backend':<8} {'k':>2} {'T':>4} {'context':>8} {'ms/step':>8} {'floor':>6} {'ratio':>6} {'experts':>8} "
        f"{'kernels':>8} {'idle':>6}",
    ]
    for cell in record["cells"]:
        profile = cell.get("profile") or {}
        kernels = f"{profile['kernels_per_step']:,.0f}" if profile else "-"
        idle = f"{100 * cell['idle']:.1f} %" if profile else "-"
        lines.append(
            f"{cell['backend']:<8} {cell['k']:>2} {cell['temperature']:>4g} {cell['context']:>8,} "
            f"{cell['milliseconds']:>8.2f} "
            f"{cell['floor_milliseconds']:>6.2f} {cell['over_floor']:>6.2f} {cell['experts_per_layer']['mean']:>8.1f} "
            f"{kernels:>8} {idle:>6}"
        )
    for cell in record["cells"]:
        if cell.get("streams"):
            shares = ", ".join(f"{name} {100 * of['share']:.0f} %" for name, of in cell["streams"].items())
            lines.append(f"{title(cell)}: share of the copy bandwidth: {shares}")
    for cell in record["cells"]:
        if cell.get("profile"):
            lines += [
                "",
                f"{title(cell)}: us per step, times, kernel",
            ]
            lines += [
                f"{kernel['microseconds']:>10,.1f} {kernel['per_step']:>7,.0f}  {kernel['name']}"
                for kernel in cell["profile"]["kernels"][:KERNELS_SHOWN]
            ]
    return "\n".join(lines)


def title(cell: dict[str, Any]) -> str:
    """Which cell it is."""
    return f"{cell['backend']}, k = {cell['k']}, T = {cell['temperature']:g}, context {cell['context']:,}"


def _commit() -> str | None:
    """The commit of the source tree, if it is one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
