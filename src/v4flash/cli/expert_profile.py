"""`v4flash experts profile`: counts which experts texts choose, and says what a hot set would serve.

Knows: options, and how tables and the popularity curve look. Does not know: how anything is counted
(fidelity/routing_profile.py).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from v4flash.cli import options as shared
from v4flash.cli.options import add, whole
from v4flash.cli.terminal import NOT_KNOWN, Messages
from v4flash.errors import UsageError

NAME = "profile"
HELP = "count which experts each layer chooses over texts: what hot experts would serve, and what could be foreseen"
BARS, BAR_WIDTH = 16, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_checkpoint(parser)
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of plain text, as unlike each other as what will be decoded; half of them decide which experts are "
        "hot, the others judge the choice",
    )
    parser.add_argument(
        "--hot",
        type=counts,
        metavar="N,N,...",
        help="numbers of hot experts a layer to report (default: from a quarter to seven eighths of the experts)",
    )
    sizes = {"env": False, "metavar": "N"}
    add(
        parser,
        "--k",
        help="drafts of a step, whose rows choose together",
        default=5,
        type=whole(0, 7),
        **sizes,
    )
    add(parser, "--ctx", help="longest piece of a text in one pass", default=4096, type=whole(2), metavar="N")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the counts to a file, for `v4flash plan --stats` and --expert-stats",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    shared.add_backend(parser)
    shared.add_experts(parser)
    shared.add_numbers(parser, None)
    shared.add_device(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON document of the figures instead of text"
    )
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, each once and in order."""
    return tuple(sorted({whole(1)(part) for part in text.split(",")}))


def run(options: argparse.Namespace) -> int:
    """Counts and prints; the counts go to --out."""
    from v4flash.config import ModelConfig
    from v4flash.fidelity import routing_profile
    from v4flash.fidelity.id_lists import check_output

    path = shared.checkpoint_folder(options.ckpt)
    config = ModelConfig.from_file(path)
    texts = routing_profile.read_texts(options.text)
    hot = options.hot or routing_profile.hot_counts(config)
    if max(hot) > config.n_routed_experts:
        raise UsageError(f"--hot has {max(hot)}, this model has {config.n_routed_experts} experts a layer")
    out = Path(options.out) if options.out else None
    if out:
        check_output(out, overwrite=options.overwrite)
    messages = Messages(options.quiet)
    from v4flash.cli import device as devices

    device = devices.choose(options.device)
    from v4flash.engine import language_model, programs
    from v4flash.fidelity import certificate_file
    from v4flash.fidelity.model_routes import ModelRoutes

    model = language_model.load(
        path,
        context=options.ctx,
        mode=options.mode,
        dtype=options.dtype,
        backend=options.backend,
        **shared.expert_options(options),
        compile_cache=not options.no_compile_cache,
        progress=messages.progress,
        note=messages.progress if device.platform == "cpu" else messages.say,
    )
    messages.say(f"{path}: {config.family}, {model.mode} | {device} | backend {model.backend}")
    found = routing_profile.profile(
        texts,
        lambda text: model.encode(text, raw=True).ids,
        ModelRoutes(model, None if options.no_compile_cache else programs.cache_folder()),
        config,
        certificate_file.fingerprint(path),
        context=model.programs.shapes.context,
        rows=options.k + 1,
        hot=hot,
        say=messages.progress,
    )
    messages.clear()
    if out:
        found.statistics.write(out)
        messages.say(f"wrote {out}; `v4flash plan --stats {out}` plans by it")
    facts = {
        "checkpoint": str(path),
        "device": device.kind,
        "backend": model.backend,
        "dtype": model.numerics.dtype.__name__,
        "mode": model.mode,
    }
    document = facts | routing_profile.figures(found)
    print(json.dumps(document, indent=1) if options.json else as_text(document))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The figures for a person."""
    model, rows = found["model"], found["rows"]
    judged = "no second text to judge it" if rows["out"] is None else f"{rows['out']:,} judge it"
    return "\n".join(
        [
            f"{len(found['texts'])} texts, {found['label']}: {rows['in']:,} rows decide what is hot, {judged}; "
            f"{model['layers']} layers choose {model['chosen']} of {model['experts']} experts",
            "",
            *_curve(found["popularity"]),
            "",
            *_hot(found),
            "",
            *_predictions(found),
        ]
    )


def _curve(popularity: dict[str, Any]) -> list[str]:
    """Share of a layer's routes by the rank of its experts, in groups, as numbers and bars."""
    experts = len(popularity["in"])
    groups = min(BARS, experts)
    edges = [experts * group // groups for group in range(groups + 1)]

    def sums(shares: list[float] | None) -> list[float] | None:
        if shares is None:
            return None
        return [sum(shares[first:last]) for first, last in zip(edges, edges[1:], strict=False)]

    inside, outside = sums(popularity["in"]), sums(popularity["out"])
    shown = outside or inside
    lines = [
        "routes of a layer by the rank of its experts (mean of the layers; bars: "
        f"{'out of sample' if outside else 'in sample'})",
        f"{'rank':>9}  {'in sample':>9}  {'out of sample':>13}",
    ]
    for group, share in enumerate(shown):
        first, last = edges[group] + 1, edges[group + 1]
        rank = f"{first}-{last}" if last > first else f"{first}"
        bar = "#" * round(BAR_WIDTH * share / max(shown))
        judged = _percent(outside[group] if outside else None)
        lines.append(f"{rank:>9}  {_percent(inside[group]):>9}  {judged:>13}  {bar}".rstrip())
    return lines


def _hot(found: dict[str, Any]) -> list[str]:
    distinct, experts = found["distinct_experts"], found["model"]["experts"]
    lines = [
        f"what hot experts serve, and cold experts a layer in a step of {found['step_rows']} rows (of "
        f"{_number(distinct['in'])} different ones in sample, {_number(distinct['out'])} out of sample)",
        f"{'hot':>9}  {'in sample':>9}  {'out of sample':>13}  {'cold, in':>8}  {'cold, out':>9}",
    ]
    for row in found["hot"]:
        share, cold = row["share"], row["cold_experts"]
        lines.append(
            f"{row['hot']:>4}/{experts:<4}  {_percent(share['in']):>9}  {_percent(share['out']):>13}  "
            f"{_number(cold['in']):>8}  {_number(cold['out']):>9}"
        )
    return lines


def _predictions(found: dict[str, Any]) -> list[str]:
    """Cold experts that a guess would have had ready, and how much of what it named was used."""
    sample = "in sample" if found["rows"]["out"] is None else "out of sample"
    made = found["predictions"]
    slots = [entry["slots"] for entry in max((row["recently_used"] for row in made), key=len)]
    lines = [
        f"cold experts of a step that were known or cached before it ({found['label']}, {sample}): exactly, in layers "
        "routed by token id;",
        "by the previous step and by what the same tokens chose last time (behind a slash: the share of the named that "
        "was used);",
        "in a cache of the cold experts used last, by its slots a layer",
        f"{'hot':>9}  {'a step':>7}  {'by id':>7}  {'previous step':>15}  {'same tokens':>15}"
        + "".join(f"  {number:>6}" for number in slots),
    ]
    for row in made:
        cached = [_percent(entry["ready"]) for entry in row["recently_used"]]
        lines.append(
            f"{row['hot']:>9}  {_number(row['cold_experts_a_step']):>7}  {_percent(row['in_hash_layers']):>7}  "
            f"{_guess(row['previous_step']):>15}  {_guess(row['same_token']):>15}"
            + "".join(f"  {share:>6}" for share in cached)
        )
    return lines


def _guess(found: dict[str, Any]) -> str:
    return f"{_percent(found['ready'])}/{_percent(found['used'])}"


def _percent(share: float | None) -> str:
    return NOT_KNOWN if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.2f}"
