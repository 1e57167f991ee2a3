"""`v4flash kernels list`, `check` and `bench`: the hand-fused operations one by one.

Knows: options and printed lines. Does not know: operations (pallas_kernels.registry), comparing and timing
(bench.kernel_cases).
"""

import argparse
import json
import platform
import sys
import types
from pathlib import Path
from typing import Any

from v4flash.cli import device
from v4flash.cli.options import add_device
from v4flash.cli.terminal import Messages, amount
from v4flash.errors import UsageError

LIST_SCHEMA = "v4flash.kernels.list/1"


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", metavar="TEXT", help="cases with this text in their name, operation or kernels"
    )
    parser.add_argument("--model", metavar="NAME", help="cases of v4-flash, v4.1-flash or demo")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def _add_running(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--out", metavar="FILE", help="also write the record here, as JSON")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")
    add_device(parser)


def _add_timing(parser: argparse.ArgumentParser) -> None:
    _add_running(parser)
    parser.add_argument(
        "--no-reference", action="store_true", help="do not time the definitions as XLA compiles them"
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="do not time public kernels that are installed here"
    )


def chosen(options: argparse.Namespace) -> tuple:
    """The cases that the options choose; there is at least one."""
    from pallas_kernels import registry
    from pallas_kernels.bench_case import MODELS

    if options.model is not None and options.model not in MODELS:
        raise UsageError(f"--model {options.model}: expected one of {', '.join(MODELS)}")
    cases = registry.chosen(options.only, options.model)
    if not cases:
        of = f" of {options.model}" if options.model else ""
        raise UsageError(f"no case{of} has {options.only!r} in its name; `v4flash kernels list` names them")
    return cases


def run_list(options: argparse.Namespace) -> int:
    """Prints the cases; needs neither Triton nor a GPU."""
    record = {
        "schema": LIST_SCHEMA,
        "cases": [
            {
                "name": case.name,
                "operation": case.operation,
                "model": case.model,
                "kernels": list(case.kernels),
                "bytes": case.bytes,
                "interpreted": case.interpreted,
                "capability": case.capability,
            }
            for case in chosen(options)
        ],
    }
    print(json.dumps(record, indent=1) if options.json else list_text(record))
    return 0


def list_text(record: dict[str, Any]) -> str:
    """The list for a person."""
    lines = [f"{'reads':>8}  {'operation':<18} {'case':<52} kernels"]
    lines += [
        f"{amount(case['bytes']) if case['bytes'] >= 1e6 else f'{case["bytes"] / 1e3:.0f} kB':>8}  "
        f"{case['operation']:<18} {case['name']:<52} {', '.join(case['kernels'])}"
        for case in record["cases"]
    ]
    return "\n".join(lines)


def run_check(options: argparse.Namespace) -> int:
    """Prints a verdict for each case; 1 if one is wrong."""
    out, cases = _out(options), chosen(options)
    device.choose(options.device)
    from v4flash.bench import kernel_cases

    messages = Messages(options.quiet)
    cases = kernel_cases.runnable(cases)
    messages.say(f"cases to compare: {len(cases)}")

    def heard(verdict: dict[str, Any]) -> None:
        if not options.json:
            print(verdict_line(verdict), flush=True)

    record = run_facts() | kernel_cases.check(cases, heard)
    _write(out, record)
    wrong = [case["name"] for case in record["cases"] if not case["right"]]
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        print(f"{len(cases) - len(wrong)} right, {len(wrong)} wrong")
    return 1 if wrong else 0


def verdict_line(case: dict[str, Any]) -> str:
    """One case's verdict: its worst output, by error over tolerance."""
    mark = "right" if case["right"] else "WRONG"
    if "problem" in case:
        return f"{mark}  {case['name']:<52} {case['problem']}"

    def excess(name: str) -> float:
        error, tolerance = case["outputs"][name]["error"], case["outputs"][name]["tolerance"]
        if error is None or (error and not tolerance):
            return float("inf")
        return error / tolerance if tolerance else 0.0

    worst = max(case["outputs"], key=excess)
    error, tolerance = case["outputs"][worst]["error"], case["outputs"][worst]["tolerance"]
    told = "numbers that are not finite" if error is None else f"relative error {error:.1e}"
    differs = "" if case["repeats"] else "; ANOTHER CALL GIVES OTHER BITS"
    return f"{mark}  {case['name']:<52} {told} ({worst}; at most {tolerance:.0e}){differs}"


def run_bench(options: argparse.Namespace) -> int:
    """Times the cases and prints them."""
    out, cases = _out(options), chosen(options)
    device.choose(options.device)
    from v4flash.bench import kernel_cases

    messages, facts = Messages(options.quiet), run_facts()
    record = facts | kernel_cases.bench(
        cases, messages.say, lambda unfinished: _write(out, facts | unfinished), not options.no_reference,
        not options.no_peers,
    )  # fmt: skip
    _write(out, record)
    print(json.dumps(record, indent=1) if options.json else bench_text(record))
    return 1 if any("problem" in case for case in record["cases"]) else 0


def bench_text(record: dict[str, Any]) -> str:
    """A record of times for a person."""
    lines = [
        f"{record['device']['kind']}: copy bandwidth {record['copy_bandwidth'] / 1e12:.2f} TB/s; us of one call, "
        "medians of kernel durations; rates over what a call has to read",
        "",
        f"{'us':>8} {'GB/s':>6} {'copy':>6} {'span':>8} {'XLA':>9}  {'case':<52} kernels",
    ]
    for case in record["cases"]:
        if "problem" in case:
            lines.append(
                f"{'-':>8} {'-':>6} {'-':>6} {'-':>8} {'-':>9}  {case['name']:<52} {case['problem']}"
            )
            continue
        reference = case.get("reference_microseconds")
        each = ", ".join(f"{name} {value:.1f}" for name, value in case["kernel_microseconds"].items())
        lines.append(
            f"{case['microseconds']:8.1f} {case['rate'] / 1e9:6.0f} {100 * case['share']:4.0f} % "
            f"{case['span_microseconds']:8.1f} {'-' if reference is None else f'{reference:.1f}':>9}  "
            f"{case['name']:<52} {each}"
        )
        lines += [_peer_line(peer) for peer in case.get("peers", ())]
    lines += [_package_line(name, package) for name, package in record.get("packages", {}).items()]
    return "\n".join(lines)


def _peer_line(peer: dict[str, Any]) -> str:
    """A public kernel's time stands under the span: gaps are in it."""
    if "problem" in peer:
        return f"{'':44} {peer['peer']}: {peer['problem']}"
    return (
        f"{'':8} {peer['rate'] / 1e9:6.0f} {'':6} {peer['microseconds']:8.1f} {'':9}    "
        f"{peer['peer']}, {amount(peer['bytes'])}"
    )


def _package_line(name: str, package: dict[str, Any]) -> str:
    if package["version"] is None:
        return f"{name} is absent: {package['kernels']} not compared"
    compared = "compared" if package["timed"] else "found, but this bench does not call them"
    return f"{name} {package['version']}: {package['kernels']} {compared}"


def _out(options: argparse.Namespace) -> Path | None:
    """Where the record goes; its folder must be there."""
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    return out


def run_facts() -> dict[str, Any]:
    from v4flash.profile.budget import installed_versions

    command = "v4flash " + " ".join(sys.argv[1:])
    return {"command": command, "python": platform.python_version(), "versions": installed_versions()}


def _write(out: Path | None, record: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


ACTIONS = (
    types.SimpleNamespace(
        NAME="list",
        HELP="name every hand-fused operation with its kernels and what one call has to read",
        add_arguments=add_choice,
        run=run_list,
    ),
    types.SimpleNamespace(
        NAME="check",
        HELP="compare every hand-fused operation with its definition, on a GPU or in Triton's interpreter",
        add_arguments=_add_running,
        run=run_check,
    ),
    types.SimpleNamespace(
        NAME="bench",
        HELP="time every hand-fused operation on a GPU, and its definition as XLA compiles it",
        add_arguments=_add_timing,
        run=run_bench,
    ),
)
