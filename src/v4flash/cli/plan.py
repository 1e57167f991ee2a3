"""`v4flash plan`: what fits where, and what a step would cost, from a configuration alone.

Knows: options and the printed table. Does not know: bytes and models of routing (profile/plan),
or machines (profile/machines).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from v4flash.cli.options import add, add_configuration, whole
from v4flash.cli.terminal import amount

NAME = "plan"
HELP = "say which experts fit one or two memories, the floor of a step there, and the largest context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_configuration(parser)
    parser.add_argument(
        "--devices",
        required=True,
        metavar="NAME|GIB[,GIB[h]]",
        help="a file of configs/devices (h200, h200-x2, gb300, gb300-rtx-pro-6000, cpu), or memory of a GPU and of "
        "what stands behind it, h for a host's: 139 or 139,139 or 139,128h or 139,139,256h",
    )
    sizes = {"env": False, "metavar": "N"}
    add(parser, "--ctx", help="positions kept", default=65536, type=whole(1), **sizes)
    add(parser, "--k", help="tokens drafted per step", default=5, type=whole(0), **sizes)
    parser.add_argument(
        "--stats",
        metavar="FILE",
        help="counts of `v4flash experts profile --out` instead of a modelled popularity of experts",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints a plan; a budget that cannot hold is an error that says what is short."""
    from v4flash.config import ModelConfig
    from v4flash.profile.budget import configuration
    from v4flash.profile.machines import machine
    from v4flash.profile.plan import document

    path = configuration(options.config)
    config, chosen = ModelConfig.from_file(path), machine(options.devices)
    counted = statistics_for(options.stats, config, path) if options.stats else None
    found = document(options.config, config, chosen, options.ctx, options.k, counted)
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def statistics_for(file: str, config, path: Path):
    """The counts in a file. Raises UsageError where they are of another model, or of other weights than in `path`."""
    from v4flash.fidelity.certificate_file import fingerprint
    from v4flash.placement import statistics

    found = statistics.read(Path(file).expanduser())
    weights = fingerprint(path) if path.is_dir() and any(path.glob("*.safetensors")) else None
    found.require(config, file, weights)
    return found


def as_text(found: dict[str, Any]) -> str:
    """A plan's document for a person."""
    sizes = " and ".join(
        f"{memory['name']} ({amount(memory['bytes'])}, {memory['label']})" for memory in found["memories"]
    )
    hot, experts = found["hot_experts"], found["experts"]
    lines = [
        f"{found['config']} on {sizes}, k = {found['k']}, context {found['context']:,} "
        f"(at most {found['largest_context']:,})",
        "",
        "first device",
        *(_part(part["name"], part["bytes"], part["label"]) for part in found["parts"]),
        _part(f"{hot} of {experts} experts a layer", _hot_bytes(found), found["expert"]["label"]),
        _part("together", found["first_bytes"], f"{amount(found['reserved']['bytes'])} kept free"),
    ]
    tables = found["n_gram_tables"]
    for place, name in ((1, "second"), (2, "third")):
        used = found[f"{name}_bytes"]
        lines += ["", f"{name} memory"] if used else []
        if tables["memory"] == place:
            lines.append(_part("n-gram tables", tables["bytes"], tables["label"]))
            used -= tables["bytes"]
        if used:
            lines.append(
                _part(f"{experts - hot} of {experts} experts a layer", used, found["expert"]["label"])
            )
    distinct, met, routes = found["distinct_experts"], found["cold_experts"], found["cold_routes"]
    lines += [
        "",
        f"a step reads {amount(found['step_bytes']['value'])} ({found['step_bytes']['label']}): "
        f"{distinct['value']:.1f} different experts a layer, {met['value']:.2f} of them cold "
        f"({amount(met['bytes'])} a step, {met['label']}); {routes['value']:.0f} routes, "
        f"{100 * routes['share']:.1f} %, go to cold ones ({routes['label']}: {found['routing']['source']})",
        *(f"{time['milliseconds']:>9.2f} ms  {time['name']} ({time['label']})" for time in found["floors"]),
        "",
        *(_rate(name, rate) for name, rate in found["rates"].items()),
    ]
    return "\n".join(lines)


def _hot_bytes(found: dict[str, Any]) -> int:
    return found["first_bytes"] - sum(part["bytes"] for part in found["parts"])


def _part(name: str, size: int, note: str) -> str:
    return f"{amount(size):>12}  {name} ({note})"


def _rate(name: str, rate: dict[str, Any]) -> str:
    """A rate with its label and source."""
    if "seconds_per_layer" in rate:
        value = f"{1e6 * rate['seconds_per_layer']:.0f} us a layer"
    else:
        speed = rate["bytes_per_second"]
        value = f"{speed / 1e12:.1f} TB/s" if speed >= 1e12 else f"{speed / 1e9:.0f} GB/s"
    return f"{name.replace('_', ' ')}: {value} ({rate['label']}: {rate['source']})"
