"""`v4flash bench`: the time of one step at a configuration's real shapes, on random weights.

Knows: options, the printed table, where a record is written. Does not know: how time is taken (bench.real_step).
"""

import argparse
import functools
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from v4flash.cli import device
from v4flash.cli.options import add, add_configuration, add_device, number, one_of, whole
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "bench"
_K, _K_COLD = "0,3,5,7", "5"
_CONTEXT, _CONTEXT_COLD = "2048,65536", "2048"
_LAYERS_SIDECAR = 4  # of V4-Flash, each kind of attention
HELP = "time one speculative step at a configuration's real shapes, on random weights"
KERNELS_SHOWN = 16
Timed = Callable[[Callable[[str], None]], dict[str, Any]]
Shown = Callable[[dict[str, Any]], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--random-weights", action="store_true", required=True, help="make the weights up, on the device"
    )
    add_configuration(parser)
    listed = {"env": False, "metavar": "LIST"}
    add(
        parser,
        "--backend",
        help="xla, fused, or both with a comma between (default fused; with --experts sidecar xla)",
        **listed,
    )
    add(
        parser,
        "--k",
        help=f"drafts per step (default {_K}; with --experts host or sidecar {_K_COLD})",
        type=numbers,
        **listed,
    )
    add(
        parser,
        "--context",
        help=f"committed positions (default {_CONTEXT}; with --experts host or sidecar {_CONTEXT_COLD})",
        type=numbers,
        **listed,
    )
    add(
        parser,
        "--experts",
        help="where routed experts lie: all on the device; the cold ones, with made-up routes, in host memory, or on a "
        "second device that computes them (sidecar, a few layers); or one half on each of two GPUs, which is also "
        "timed without the sum over both",
        default="resident",
        env=False,
        **one_of("resident", "host", "sidecar", "peer"),
    )
    whole_number = {"env": False, "metavar": "N"}
    add(
        parser,
        "--hot-experts",
        help="of --experts host or sidecar, experts a layer on the device",
        type=whole(1),
        **whole_number,
    )
    add(parser, "--cold-share", help="of --experts host or sidecar, %% of the routes that go to cold experts",
        default="1.2,5", type=shares, **listed)  # fmt: skip
    add(parser, "--layers", help="of --experts host or sidecar, backbone layers that are there (default: all; with "
        f"sidecar {_LAYERS_SIDECAR})",
        type=whole(1), **whole_number)  # fmt: skip
    add(parser, "--spare-slots", help="of --experts host, device slots a layer for cold experts", default=8,
        type=whole(1), **whole_number)  # fmt: skip
    add(
        parser,
        "--temperature",
        help="of target and drafts; 0 is greedy",
        default="0",
        type=temperatures,
        **listed,
    )
    add(
        parser, "--top-p", help="of target and drafts, where they are drawn", default=1.0, type=number,
        env=False, metavar="P",
    )  # fmt: skip
    add(
        parser,
        "--depth",
        help="verified drafts of steps that choose them; they stop there whatever the confidence (default: all k, "
        "without choosing)",
        type=numbers,
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


def shares(text: str) -> tuple[float, ...]:
    """Percentages with commas between, as shares of one."""
    try:
        return tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentages") from None


def run(options: argparse.Namespace) -> int:
    """Times the cells and prints them."""
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    device.choose(options.device)
    from v4flash.profile.budget import installed_versions

    cold = options.experts in ("host", "sidecar")
    if options.layers is not None and not cold:
        raise UsageError("--layers needs --experts host or sidecar")
    timed, shown = _cold(options) if cold else _resident(options)
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
    record = facts | timed(messages.say)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if options.json else shown(record))
    return 0


def _resident(options: argparse.Namespace) -> tuple[Timed, Shown]:
    """What times a step with all experts on the device, and what shows its record."""
    from v4flash.bench import real_step
    from v4flash.config import ModelConfig
    from v4flash.profile.budget import configuration

    if options.hot_experts is not None:
        raise UsageError("--hot-experts needs --experts host or sidecar")
    request = real_step.Request(
        config=ModelConfig.from_file(configuration(options.config)),
        backends=tuple((options.backend or "fused").split(",")),
        draft_lengths=options.k or numbers(_K),
        contexts=options.context or numbers(_CONTEXT),
        resident=options.experts_resident,
        peer=options.experts == "peer",
        rows=options.rows,
        temperatures=options.temperature,
        top_p=options.top_p,
        depths=options.depth,
        steps=options.steps,
        repeats=options.repeats,
        profile=not options.no_profile,
    )
    return functools.partial(real_step.run, request), as_text


def _cold(options: argparse.Namespace) -> tuple[Timed, Shown]:
    """What times a step with cold experts in host memory or on a second device, and what shows its record."""
    from v4flash.bench import cold_cells, cold_step, plain_cold_step, random_weights, sidecar_step
    from v4flash.config import ModelConfig
    from v4flash.profile.budget import configuration

    way, sidecar = f"--experts {options.experts}", options.experts == "sidecar"
    k, context = options.k or numbers(_K_COLD), options.context or numbers(_CONTEXT_COLD)
    if options.hot_experts is None:
        raise UsageError(f"{way} needs --hot-experts")
    bodies = {"xla": sidecar_step.run} if sidecar else {"fused": cold_step.run, "xla": plain_cold_step.run}
    timed = bodies.get(options.backend or next(iter(bodies)))
    if timed is None or options.experts_resident or options.rows != cold_cells.ROWS:
        raise UsageError(
            f"{way} times one backend, {' or '.join(sorted(bodies, reverse=True))}, passes of {cold_cells.ROWS} rows, "
            "and all experts"
        )
    config = ModelConfig.from_file(configuration(options.config))
    layers = options.layers or (_LAYERS_SIDECAR if sidecar else config.num_hidden_layers)
    if layers != config.num_hidden_layers:
        config = random_weights.first_layers(config, layers)
    if len(k) != 1 or len(context) != 1:
        raise UsageError(f"{way} takes one draft length and one context")
    request = cold_cells.Request(
        config=config,
        hot=options.hot_experts,
        shares=options.cold_share,
        slots=options.spare_slots,
        draft_length=k[0],
        context=context[0],
        steps=options.steps,
        repeats=options.repeats,
        profile=not options.no_profile,
    )
    return functools.partial(timed, request), sidecar_text if sidecar else cold_text


def sidecar_text(record: dict[str, Any]) -> str:
    """A record of experts that a second device computes for a person."""
    second = record["second_device"]
    cores = f" with {second['cores']} cores" if second["cores"] else ""
    lines = [
        cold_text(record, ("WRONG", "right")),
        "",
        f"second device: {second['kind']}{cores}",
        "rows decoded at a time: ms of so many experts",
    ]
    for alone in record["second_device_alone"]:
        times = ", ".join(f"{count}: {taken:.2f}" for count, taken in alone["milliseconds"].items())
        lines.append(f"{alone['rows_decoded']:>6}  {times}")
    lines += [f"{taken:>10,.1f} us  {name}" for name, taken in record["exchange_microseconds"].items()]
    lines += [
        f"{100 * cell['asked_share']:g} % {cell['cell']}: {cell['exposed_microseconds_per_layer']:,.1f} us a layer"
        for cell in record["cells"]
    ]
    return "\n".join(lines)


def cold_text(record: dict[str, Any], verdicts: tuple[str, str] = ("OTHER BITS", "same bits")) -> str:
    """A record of experts in two memories for a person."""
    checks = ", ".join(f"{name} {verdicts[found]}" for name, found in record["checks"].items())
    lines = [
        f"{record['config']} on {record['device']['kind']}: {record['layers']} layers, {record['hot_experts']} of "
        f"{record['experts']} experts a layer on the device ({record['device_gigabytes']} GB), the others beside it "
        f"({record['host_gigabytes']} GB), {record['spare_slots']} spare slots a layer, random weights (unverified), "
        f"copy bandwidth {record['copy_bandwidth'] / 1e12:.2f} TB/s, link {record['link_bandwidth'] / 1e9:.1f} GB/s",
        checks,
        "",
        f"{'share':>6} {'cell':<11} {'ms/step':>8} {'spread':>15} {'floor':>6} {'experts':>8} {'cold':>6} "
        f"{'missed':>7} {'early':>6} {'used':>6} {'GB':>7} {'link ms':>8} {'exposed':>8} {'ratio':>6}",
    ]
    for cell in record["cells"]:
        spread = "{:.3f}-{:.3f}".format(*cell["spread"])
        lines.append(
            f"{100 * cell['asked_share']:>4g} % {cell['cell']:<11} {cell['milliseconds']:>8.3f} {spread:>15} "
            f"{cell['floor_milliseconds']:>6.2f} {cell['experts_per_layer']['mean']:>8.1f} "
            f"{cell['cold_per_step']:>6.1f} "
            f"{cell['missed_per_step']:>7.1f} {cell.get('fetched_per_step', 0):>6.1f} "
            f"{cell.get('used_per_step', 0):>6.1f} {cell['gigabytes_moved']:>7.3f} {cell['link_milliseconds']:>8.2f} "
            f"{cell['exposed_milliseconds']:>8.3f} {cell['over_resident']:>6.3f}"
        )
    for cell in record["cells"]:
        if cell.get("profile"):
            lines += ["", f"{100 * cell['asked_share']:g} % {cell['cell']}: us per step, times, kernel"]
            lines += _kernel_lines(cell)
    return "\n".join(lines)


def as_text(record: dict[str, Any]) -> str:
    """A record for a person."""
    lines = [
        f"{record['config']} on {record['device']['kind']}: {record['layers']} layers, {record['rows']} rows, "
        f"{record['experts_resident']} of {record['experts']} experts resident, {record['dtype']}, {record['mode']}, "
        f"random weights (unverified), top-p {record['top_p']:g}, copy bandwidth "
        f"{record['copy_bandwidth'] / 1e12:.2f} TB/s",
        "",
        f"{'backend':<8} {'k':>2} {'depth':>5} {'T':>4} {'context':>8} {'ms/step':>8} {'floor':>6} "
        f"{'ratio':>6} {'experts':>8} {'kernels':>8} {'idle':>6}",
    ]
    for cell in record["cells"]:
        profile = cell.get("profile") or {}
        kernels = f"{profile['kernels_per_step']:,.0f}" if profile else "-"
        idle = f"{100 * cell['idle']:.1f} %" if profile else "-"
        lines.append(
            f"{cell['backend']:<8} {cell['k']:>2} {'all' if cell['depth'] is None else cell['depth']:>5} "
            f"{cell['temperature']:>4g} {cell['context']:>8,} "
            f"{cell['milliseconds']:>8.2f} "
            f"{cell['floor_milliseconds']:>6.2f} {cell['over_floor']:>6.2f} {cell['experts_per_layer']['mean']:>8.1f} "
            f"{kernels:>8} {idle:>6}"
        )
    for cell in record["cells"]:
        if "exposed_microseconds_per_layer" in cell:
            lines.append(
                f"{title(cell)}: {cell['without_sum_milliseconds']:.2f} ms without the sum over devices, which costs "
                f"{cell['exposed_microseconds_per_layer']:.1f} us a layer"
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
            lines += _kernel_lines(cell)
    return "\n".join(lines)


def _kernel_lines(cell: dict[str, Any]) -> list[str]:
    return [
        f"{kernel['microseconds']:>10,.1f} {kernel['per_step']:>7,.0f}  {kernel['name']}"
        for kernel in cell["profile"]["kernels"][:KERNELS_SHOWN]
    ]


def title(cell: dict[str, Any]) -> str:
    """Which cell it is."""
    depth = "" if cell["depth"] is None else f" stopped at {cell['depth']}"
    return (
        f"{cell['backend']}, k = {cell['k']}{depth}, T = {cell['temperature']:g}, context {cell['context']:,}"
    )


def _commit() -> str | None:
    """The commit of the source tree, if it is one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
