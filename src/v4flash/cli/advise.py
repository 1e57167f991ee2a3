"""`v4flash advise`: which draft length pays on this machine for given prompts, and the file that --k auto reads; or,
with step times from elsewhere, what each way of speculating would bring there.

Knows: options, and how the tables look. Does not know: how anything is measured (engine/advice.py) or compared
(engine/comparison.py).
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from v4flash.cli import options as shared
from v4flash.cli import prompt_files
from v4flash.cli.options import add, number, whole
from v4flash.cli.terminal import Messages, share
from v4flash.errors import UsageError, V4FlashError

NAME = "advise"
HELP = "measure step times and acceptance, and say which k is the fastest"
FILE_NAME = "speculation.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_checkpoint(parser)
    prompt_files.add_prompts(parser, count=12, tokens=96)
    parser.add_argument(
        "--max-k",
        type=whole(1, 9),
        default=7,
        metavar="N",
        help="longest draft to try (default 7; 8 and 9 take --rows 16)",
    )
    add(parser, "--rows", help="rows of a verifying pass", default=8, type=whole(2), metavar="N")
    add(parser, "--temperature", help="0 is greedy", default=0.0, type=number, metavar="T")
    add(parser, "--top-p", help="1 is off", default=1.0, type=number, metavar="P")
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="take step times from a file of --out instead of this machine, and compare every k, k auto and the usual "
        "rule by them",
    )
    prompt_files.add_result(parser, "costs and calibration for --k auto", FILE_NAME)
    shared.add_backend(parser)
    shared.add_experts(parser)
    shared.add_numbers(parser, None)
    shared.add_device(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def run(options: argparse.Namespace) -> int:
    """Measures and advises; 0 also where speculation loses, which is an answer."""
    if options.max_k > options.rows - 1:
        raise UsageError(
            f"--max-k is {options.max_k}, a program with {options.rows} rows verifies {options.rows - 1}; use --rows 16"
        )
    if options.costs and (options.out or options.save):
        raise UsageError(
            "--costs measures no step times, so there is nothing to keep; leave --out and --save out"
        )
    path = prompt_files.drafting_checkpoint(options)
    table_of = given_costs(options.costs)
    prompts = prompt_files.prompts(options, path)
    out = prompt_files.result_file(options, path, FILE_NAME)
    messages = Messages(options.quiet)
    from v4flash.cli import device as devices

    device = devices.choose(options.device)
    from v4flash.engine import advice, comparison, language_model
    from v4flash.fidelity import certificate_file

    sampling = {"temperature": options.temperature, "top_p": options.top_p}
    model = prompt_files.load(options, path, prompts, options.rows, messages)
    messages.say(
        f"{path}: {model.config.family}, {model.mode} | {device} | backend {model.backend} | "
        f"k 0 to {options.max_k} and auto, {len(prompts)} prompts of up to {options.tokens} tokens, "
        f"temperature {options.temperature:g}, top-p {options.top_p:g}"
    )
    encoded: dict[str, list[language_model.Prompt]] = {}
    for prompt in prompts:
        encoded.setdefault(prompt["class"], []).append(model.encode(prompt["text"], raw=not prompt["chat"]))
    facts = {
        "checkpoint": str(path),
        "device": device.kind,
        "backend": model.backend,
        "dtype": model.numerics.dtype.__name__,
        "mode": model.mode,
        "rows": options.rows,
        **sampling,
        "prompts": len(prompts),
        "tokens": options.tokens,
    }
    if table_of:
        compared = comparison.compare(
            model,
            encoded,
            table_of.milliseconds,
            sampling=sampling,
            tokens=options.tokens,
            longest=options.max_k,
            say=messages.progress,
        )
        messages.clear()
        document = {
            "schema": comparison.SCHEMA,
            "weights": certificate_file.fingerprint(path),
            **facts,
            "costs": dataclasses.asdict(table_of),
            **compared,
        }
        print(json.dumps(document, indent=1) if options.json else comparison_table(document))
        return 0
    found = advice.measure(
        model,
        encoded,
        range(options.max_k + 1),
        tokens=options.tokens,
        sampling=sampling,
        say=messages.progress,
    )
    messages.clear()
    document = {
        "schema": advice.SCHEMA,
        **facts,
        "drafted_unverified_ms": model.speculation.costs.milliseconds[1],
        **advice.advice(found, model.config.draft.block_size),
    }
    for row in document["draft_lengths"]:
        row["certificate"] = dataclasses.asdict(certificate_file.standing(path, row["k"], facts))
    if out:
        try:
            model.speculation.write(out)
        except OSError as error:
            raise V4FlashError(f"writing {out} failed ({error.strerror}); check disk and rights") from None
        use = "`v4flash decode` uses it" if options.save else f"`v4flash decode --speculation {out}` uses it"
        messages.say(f"wrote {out}; {use}")
    print(json.dumps(document, indent=1) if options.json else table(document))
    return 0


def given_costs(file: str | None):
    """The costs in the file of --costs; None without one. Raises UsageError where it holds none."""
    if file is None:
        return None
    from v4flash.engine import speculation_file

    found = speculation_file.read(Path(file).expanduser()).costs
    if found is None:
        raise UsageError(f"{file} holds no step times; make it with `v4flash advise --out`")
    return found


def comparison_table(document: dict[str, Any]) -> str:
    """A comparison for a person: every class, then all."""
    costs = document["costs"]
    lines = [
        f"step times of {costs['device']}, {costs['backend']}, {costs['dtype']}; expected tokens per step, and tok/s "
        "by these times"
    ]
    for name, found in document["classes"].items():
        lines += ["", f"{name}:", f"{'k':>6}  {'tok/step':>8}  {'tok/s':>8}  steps by verified drafts"]
        for way, figures in found["ways"].items():
            depths = " ".join(f"{steps:.0f}" for steps in figures["depths"])
            lines.append(
                f"{way:>6}  {figures['tokens_per_step']:>8.3f}  {figures['tokens_per_second']:>8.1f}  {depths}"
            )
        for compared, gain in found["comparisons"].items():
            of = f" (k = {gain['best_k']})" if "best_k" in gain else ""
            error = gain["standard_error"]
            noise = "" if error is None else f", standard error {100 * error:.1f}"
            lines.append(f"  {compared.replace('_', ' ')}{of}: {100 * gain['gain']:+.1f} %{noise}")
    lines += ["", f"token: k = {document['block']} judged token by token, drafts drawn without filters"]
    return "\n".join(lines)


def table(document: dict[str, Any]) -> str:
    """The advice for a person."""

    def shown(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [
        f"{'k':>4}  {'step ms':>8}  {'tok/step':>8}  {'tok/s':>8}  {'predicted':>9}  {'pays below ms':>13}"
    ]
    for row in document["draft_lengths"]:
        mark = "  <- fastest" if row["k"] == document["best_k"] else ""
        lines.append(
            f"{row['k']:>4}  {shown(row['step_ms'], 2):>8}  {shown(row['tokens_per_step'], 2):>8}  "
            f"{shown(row['tokens_per_second']):>8}  {shown(row['predicted_tokens_per_second']):>9}  "
            f"{shown(row['break_even_ms'], 2):>13}{mark}"
        )
    unverified = {
        row["certificate"]["reason"]
        for row in document["draft_lengths"]
        if row["certificate"]["status"] == "unverified"
    }
    lines += [f"speeds unverified: {reason}" for reason in sorted(unverified)]
    lines += ["", "accepted with all drafts before them, by position, and the fastest k:"]
    width = max(len(name) for name in document["classes"])
    for name, found in document["classes"].items():
        positions = " ".join(share(value) for value in found["survival"])
        lines.append(f"  {name:<{width}}  {positions or 'nothing drafted'}  k = {found['best_k']}")
    return "\n".join([*lines, "", document["verdict"]])
