"""`v4flash kernels budget`: what a step launches, without a GPU.

Knows: options and the printed table. Does not know: compilers and counting (profile).
"""

import argparse
import json
from typing import Any

from v4flash.cli.options import add, add_configuration, one_of, whole
from v4flash.cli.terminal import Messages, amount

NAME = "budget"
HELP = "compile the whole step at a configuration's real shapes and count it (takes minutes, 3 GB of memory)"
BACKENDS = ("xla", "fused")
EXPERTS = ("resident", "peer")


def add_arguments(budget: argparse.ArgumentParser) -> None:
    add_configuration(budget)
    budget.add_argument(
        "--target",
        required=True,
        metavar="NAME",
        help="GPU to compile for: a file of configs/devices (h200, gb300)",
    )
    sizes = {"env": False, "metavar": "N"}
    add(budget, "--backend", env=False, help="bodies of the operations", default="xla", **one_of(*BACKENDS))
    add(
        budget,
        "--experts",
        env=False,
        help="resident: one device; peer: one program for two devices with half of the routed experts each",
        default="resident",
        **one_of(*EXPERTS),
    )
    add(budget, "--k", help="tokens drafted per step (default: the trained block)", type=whole(0), **sizes)
    add(budget, "--rows", help="rows of a verifying pass", default=8, type=whole(2), **sizes)
    add(budget, "--context", help="positions kept", default=65536, type=whole(2), **sizes)
    budget.add_argument("--json", action="store_true", help="one JSON document instead of text")
    budget.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def run(options: argparse.Namespace) -> int:
    """Compiles and prints a budget."""
    from v4flash.profile.budget import Request, budget

    messages = Messages(options.quiet)
    messages.progress(f"compiling {options.config} for {options.target}, backend {options.backend}")
    request = Request(
        config=options.config, target=options.target, backend=options.backend, experts=options.experts,
        k=options.k, rows=options.rows, context=options.context,
    )  # fmt: skip
    try:
        found = budget(request)
    finally:
        messages.clear()
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """A budget's document for a person."""
    target = found["target"]
    memory = f"{amount(found['weight_bytes'])} of weights, {amount(found['temp_bytes'])} of temporaries"
    room = f"the device's {amount(target['memory'])}"
    both = f"2 times, {found['experts_each']} experts a layer each, " if found["devices"] == 2 else ""
    per_layer = f"{found['graph_cuts'] / found['layers']:.2f} a layer"
    lines = [
        f"{found['config']} on {target['product']} (sm_{target['capability']}, {target['cores']} cores), "
        f"{both}backend {found['backend']}, {found['rows']} rows, context {found['context']:,}, {found['dtype']}, "
        f"{found['mode']}",
        f"kernels per step      {found['kernels_per_step']:,} at most, {found['kernels_at_least']:,} at least "
        f"({found['kernels']:,} in the program, {found['layers']} layers)",
        f"host launches         {found['host_launches_per_step']:,} per step; {found['command_buffers']:,} graphs "
        f"in the program, {found['graph_cuts']:,} cuts between them",
        *(
            [f"sums over devices     {found['collectives_per_step']:,} per step; graph cuts {per_layer}"]
            if found["devices"] == 2
            else []
        ),
        f"copies, fills         {found['copies_per_step']:,} and {found['memsets_per_step']:,} per step",
        f"weights copied        {found['weight_copies']:,} per step, {amount(found['weight_copies_bytes'])} written",
        f"state copied          {found['state_copies']:,} per step, {amount(found['state_copies_bytes'])}",
        f"state in place        {found['aliased_bytes']:,} of {found['state_bytes']:,} bytes",
        f"argument leaves       {found['argument_leaves']:,}",
        f"Triton kernels        {found['triton_kernels']:,} different, {found['spills']:,} spill registers",
        f"memory                {memory}; {'fits' if found['fits'] else 'does not fit'} in {room}",
        "",
        "  kernels  part",
        *(f"{count:9,}  {part}" for part, count in found["kernels_by_part"].items()),
    ]
    for floor in found["floor"]:
        times = ", ".join(
            f"{time['milliseconds']:.2f} ms at {time['bandwidth'] / 1e12:.2f} TB/s ({time['bandwidth_label']})"
            for time in floor["times"]
        )
        routing = floor["routing"]
        lines += [
            "",
            f"floor at k = {floor['k']}, {routing['model']} routing ({routing['label']}: {routing['target']:.1f} "
            f"experts a layer): {amount(floor['bytes'])}, {times}",
        ]
    spent = found["compile"]
    seconds = sum(spent[phase] for phase in ("trace", "lower", "compile"))
    lines += [
        "",
        f"compiled in {seconds:.0f} s ({spent['processor']:.0f} s of processors), peak {amount(spent['peak_bytes'])}",
    ]
    return "\n".join(lines)
