"""`v4flash certify`: does speculation change anything? Texts, states and laws of every k against plain decoding.

Knows: options, which programs the draft lengths need, and how the verdict looks. Does not know: how anything is
compared (fidelity/certificate.py).
"""

import argparse
import json
from typing import Any

from v4flash.cli import options as shared
from v4flash.cli import prompt_files
from v4flash.cli.decode import DEFAULT_ROWS, MAX_DRAFT, MORE_ROWS
from v4flash.cli.options import add, number
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "certify"
HELP = "compare every k with plain decoding: same text, state and law, or where and why not"
FILE_NAME = "certificate.json"
AUTO = "auto"


def draft_lengths(text: str) -> list[int | str]:
    """'0..9,auto', '1,4' or '5' as draft lengths, auto last; plain decoding is always compared with."""
    found: set[int] = set()
    auto = False
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            if part == AUTO:
                auto = True
            else:
                found |= set(range(int(first), int(last if dots else first) + 1)) or {-1}
    except ValueError:
        found = {-1}
    if any(not 0 <= k <= MAX_DRAFT for k in found) or not (found - {0} or auto):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no draft lengths from 1 to {MAX_DRAFT}; write 0..{MAX_DRAFT}, 1,4,5 or auto"
        )
    return [*sorted(found - {0}), *[AUTO] * auto]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_checkpoint(parser)
    parser.add_argument(
        "--k",
        type=draft_lengths,
        metavar="A..B,C,auto",
        help=f"draft lengths to compare with k = 0; auto also copies (default 0..{MAX_DRAFT},auto; 8 and 9 run "
        f"programs of {MORE_ROWS} rows, which backend fused has not)",
    )
    prompt_files.add_prompts(parser, count=8, tokens=128)
    add(
        parser,
        "--temperature",
        help="of sampled texts, whose law is compared; 0 leaves them out",
        default=1.0,
        type=number,
        metavar="T",
    )
    prompt_files.add_result(parser, "the certificate", FILE_NAME)
    shared.add_backend(parser)
    shared.add_experts(parser)
    shared.add_numbers(parser, None)
    shared.add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the certificate instead of a sentence")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def run(options: argparse.Namespace) -> int:
    """Certifies; 1 where something differs that rounding does not explain."""
    path = prompt_files.drafting_checkpoint(options)
    prompts = prompt_files.prompts(options, path)
    if options.temperature and min(options.count, len(prompts)) * options.tokens < 16:
        raise UsageError("fewer than 16 sampled tokens say nothing; raise --tokens, or pass --temperature 0")
    out = prompt_files.result_file(options, path, FILE_NAME)
    messages = Messages(options.quiet)
    from v4flash.cli import device as devices

    device = devices.choose(options.device)
    from v4flash.fidelity import certificate_file
    from v4flash.speculative.filters import SamplingParams

    SamplingParams.make(temperature=options.temperature)
    fused = options.backend == "fused"
    wanted = options.k or draft_lengths(f"0..{DEFAULT_ROWS - 1 if fused else MAX_DRAFT},{AUTO}")
    parts = []
    for rows, lengths in by_rows(wanted):
        model = prompt_files.load(options, path, prompts, rows, messages)
        messages.say(
            f"{path}: {model.config.family}, {model.mode} | {device} | backend {model.backend} | {rows} rows, "
            f"k {', '.join(map(str, lengths))} against 0, {len(prompts)} prompts of {options.tokens} tokens"
        )
        parts.append(certificate(model, prompts, lengths, options, messages))
        del model  # before the next program's weights are read: both together may not fit
    messages.clear()
    found = certificate_file.document(certificate_file.fingerprint(path), parts)
    if out:
        certificate_file.write(out, found)
        messages.say(f"wrote {out}")
    print(json.dumps(found, indent=1) if options.json else "\n".join(map(summary, parts)))
    return 1 if found["verdict"] == certificate_file.BUG else 0


def by_rows(lengths: list[int | str]) -> list[tuple[int, list[int | str]]]:
    """Rows of the verifying pass with the draft lengths that decoding would run in it."""
    many = [k for k in lengths if k != AUTO and k >= DEFAULT_ROWS]
    few = [k for k in lengths if k not in many]
    return [(rows, found) for rows, found in ((DEFAULT_ROWS, few), (MORE_ROWS, many)) if found]


def certificate(
    model, prompts: list, lengths: list[int | str], options: argparse.Namespace, messages: Messages
) -> dict[str, Any]:
    """The certificate of one program; logits are compiled for only where they are asked for."""
    import functools

    from v4flash.engine import programs
    from v4flash.fidelity.certificate import Plan, certify
    from v4flash.fidelity.model_logits import ModelLogits

    cache = None if options.no_compile_cache else programs.cache_folder()
    logits = functools.cache(lambda: ModelLogits(model, cache))
    ids = [model.encode(prompt["text"], raw=not prompt["chat"]).ids for prompt in prompts]
    plan = Plan(lengths, options.tokens, options.temperature)
    return certify(model, ids, plan, lambda text: logits()(text), messages.progress)


def summary(found: dict[str, Any]) -> str:
    """A certificate in a line, and a line for each finding."""
    from v4flash.fidelity.certificate import Finding

    compared = f"k {', '.join(map(str, found['draft_lengths']))} against 0 ({found['backend']}, {found['rows']} rows)"
    heads = {
        "identical": "identical texts and states",
        "tie": "identical but for ties that rounding decided",
        "bug": "NOT the same as plain decoding",
    }
    said = f"{compared}: {heads[found['verdict']]}, {found['prompts']} prompts of {found['tokens']} tokens"
    laws = {k: fits["chance"] for k, fits in found["laws"].items()}
    if laws:
        least = min(laws, key=laws.get)
        said += f"; sampled at temperature {found['temperature']:g}: the oddest, k {least}, has chance "
        said += f"{laws[least]:.2g}"
    return "\n".join([said, *(f"  {Finding(**finding)}" for finding in found["findings"])])
