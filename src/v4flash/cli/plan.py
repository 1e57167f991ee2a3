"""`v4flash plan`: what fits where, and what a step would cost, from a configuration alone.

Knows: options and the printed table. Does not know: bytes and models of routing (profile/plan).
"""

import argparse
import json
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
        metavar="GIB[,GIB[h]]",
        help="memory of a GPU and of what stands behind it, h for a host's: 139 or 139,139 or 139,128h",
    )
    sizes = {"env": False, "metavar": "N"}
    add(parser, "--ctx", help="positions kept", default=65536, type=whole(1), **sizes)
    add(parser, "--k", help="tokens drafted per step", default=5, type=whole(0), **sizes)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints a plan; a budget that cannot hold is an error that says what is short."""
    from v4flash.config import ModelConfig
    from v4flash.profile.budget import configuration
    from v4flash.profile.plan import document, parse_memories

    path = configuration(options.config)
    config, memories = ModelConfig.from_file(path), parse_memories(options.devices)
    found = document(options.config, config, memories, options.ctx, options.k)
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """A plan's document for a person."""
    sizes = " and ".join(
        f"{amount(memory['bytes'])} of {'host' if memory['host'] else 'GPU'} memory"
        for memory in found["memories"]
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
    if found["second_bytes"]:
        tables = found["n_gram_tables"]
        away = tables["bytes"] if tables["on_second"] else 0
        lines += ["", "second memory"]
        if away:
            lines.append(_part("n-gram tables", away, tables["label"]))
        cold = found["second_bytes"] - away
        lines.append(_part(f"{experts - hot} of {experts} experts a layer", cold, found["expert"]["label"]))
    distinct, met = found["distinct_experts"], found["cold_experts"]
    lines += [
        "",
        f"a step reads {amount(found['step_bytes']['value'])} ({found['step_bytes']['label']}): "
        f"{distinct['value']:.1f} different experts a layer, {met['value']:.2f} of them cold "
        f"({amount(met['bytes'])} a step, {met['label']})",
        *(f"{time['milliseconds']:>9.2f} ms  {time['name']} ({time['label']})" for time in found["floors"]),
        "",
        "rates: "
        f"memory {found['rates']['memory']['bytes_per_second'] / 1e12:.1f} TB/s, "
        f"host link {found['rates']['host_link']['bytes_per_second'] / 1e9:.0f} GB/s, "
        f"exchange between GPUs {1e6 * found['rates']['exchange']['seconds_per_layer']:.0f} us a layer "
        "(measured on H200s)",
    ]
    return "\n".join(lines)


def _hot_bytes(found: dict[str, Any]) -> int:
    return found["first_bytes"] - sum(part["bytes"] for part in found["parts"])


def _part(name: str, size: int, note: str) -> str:
    return f"{amount(size):>12}  {name} ({note})"
