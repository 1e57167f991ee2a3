"""`v4flash kernels gate`: a whole checkpoint by the hand-fused step against plain modules in float32.

Knows: options and printed lines. Does not know: what is compared and what is too much (fidelity.gate).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from v4flash.cli import device, kernel_cases, prompt_files
from v4flash.cli import options as shared
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

NAME = "gate"
HELP = "compare the hand-fused step of a checkpoint with float32 plain modules: blocks, laws of tokens, greedy texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_checkpoint(parser)
    prompt_files.add_prompts(parser, count=4, tokens=32)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument("--out", metavar="FILE", help="also write the record here, as JSON")
    shared.add_numbers(parser, None)
    shared.add_device(parser)
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; 1 where the hand-fused step is further from the reference than noise explains."""
    path = shared.checkpoint_folder(options.ckpt)
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    prompts = prompt_files.prompts(options, path)
    where = device.choose(options.device)
    from v4flash.config import ModelConfig
    from v4flash.engine import backends, programs
    from v4flash.engine.language_model import choose_numerics, encode_prompt
    from v4flash.fidelity import gate, gate_sides
    from v4flash.fidelity.id_lists import rounded_context
    from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
    from v4flash.text import Tokenizer

    messages, config = Messages(options.quiet), ModelConfig.from_file(path)
    numerics, tokenizer = choose_numerics(path, config, options.mode, options.dtype), Tokenizer.from_dir(path)
    ids = [
        encode_prompt(tokenizer, path, config, prompt["text"], raw=not prompt["chat"]).ids
        for prompt in prompts
    ]
    launched = backends.can_launch()
    facts = {
        "schema": gate.SCHEMA,
        "family": config.family,
        "dtype": numerics.dtype.__name__,
        "mode": "qat" if numerics.quantise else "exact",
        "device": str(where),
        "bodies": "launches" if launched else "definitions",
    }
    messages.say(f"{path}: {config.family}, {facts['dtype']}, {facts['mode']} | {where}")
    if not launched:
        messages.say(
            "no GPU that the launches are made for: packed weights are computed by the operations' definitions"
        )
    sides = gate_sides.open_sides(
        path,
        numerics,
        FusedBodies if launched else ReferenceBodies,
        rounded_context([len(prompt) + options.tokens for prompt in ids]),
        None if options.no_compile_cache else programs.cache_folder(),
        messages.progress,
    )
    record = (
        kernel_cases.run_facts()
        | facts
        | gate.run(sides, ids, options.tokens, numerics.quantise, messages.progress)
    )
    messages.clear()
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if options.json else gate_text(record))
    return 0 if record["right"] else 1


def gate_text(record: dict[str, Any]) -> str:
    """A record for a person."""
    found, noise = record["fused"], record["noise"]
    lines = [
        f"{record['family']}, {record['dtype']}, {record['mode']}, {record['bodies']}: {record['texts']} texts, "
        f"{record['positions']} positions; at most {record['margin']:g} times the noise is allowed",
        "",
        f"{'':<34} {'found':>9} {'noise':>9}",
        *(
            _line(f"layer {layer}, relative error", *both)
            for layer, both in enumerate(zip(found["layers"], noise["layers"], strict=True))
        ),
        _line("mean divergence of the law, nats", found["divergence"], noise["divergence"]),
        _line("largest divergence, nats", found["worst"], noise["worst"]),
        _line("likeliest token flipped, share", found["flips"], noise["flips"]),
        _line("largest change of a likely logit", found["shift"], noise["shift"]),
        f"{'greedy texts alike':<34} {_alike(found):>9} {_alike(noise):>9}",
        "",
        *record["problems"],
        "right" if record["right"] else "WRONG: further from the reference than noise explains",
    ]
    return "\n".join(lines)


def _line(name: str, found: float | None, noise: float | None) -> str:
    shown = ("infinite" if value is None else f"{value:.2e}" for value in (found, noise))
    return f"{name:<34} {next(shown):>9} {next(shown):>9}"


def _alike(side: dict[str, Any]) -> str:
    return f"{sum(text is None for text in side['texts'])}/{len(side['texts'])}"
