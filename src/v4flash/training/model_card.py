"""The model card that goes beside a trained checkpoint.

    python -m v4flash.training.model_card --ckpt demo

writes `README.md` anew from the checkpoint's config.json, corpus_manifest.json, losses.json and, where they exist,
acceptance.json and remarks.md, the one part that a person wrote.

Knows: which figures of a run a reader needs. Does not know: how they were made.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.training.acceptance_figures import markdown
from v4flash.training.corpus import CLASSES


def model_card(
    config: ModelConfig,
    corpus: Mapping[str, Any],
    records: Mapping[str, list[dict]],
    acceptance: dict[str, Any] | None = None,
    remarks: str = "",
) -> str:
    """Markdown from the configuration, the corpus manifest, the log of a run, figures of acceptance.py, and remarks."""
    lines = [*_introduction(config), *_corpus(corpus), *_losses(records), *_drafter(records)]
    if acceptance:
        lines += [
            "## Acceptance, measured with the decoder",
            "",
            markdown(acceptance),
            "",
            f"Weights measured: sha256 `{acceptance['checkpoint']}` over the shards in name order.",
            "",
        ]
    if remarks:
        lines += ["## Remarks", "", remarks.strip(), ""]
    return "\n".join([*lines, *_REBUILD, ""])


_REBUILD = [
    "## Building it again",
    "",
    "`docs/training.md` says what is needed and how long it takes; every logged figure is in `losses.json`. In short:",
    "",
    "    python -m v4flash.training.build_corpus --help",
    "    python -m v4flash.training.train --config configs/models/demo.json --corpus CORPUS --out RUN",
    "    python -m v4flash.training.acceptance --ckpt RUN/model --corpus CORPUS --out RUN/model/acceptance.json",
    "    python -m v4flash.training.model_card --ckpt RUN/model --corpus-manifest CORPUS/manifest.json",
    "",
    "## Licences",
    "",
    "Weights and code: Apache-2.0. The tokenizer is a cut-down copy of DeepSeek-V4's (MIT). The licences of the",
    "training text are in the table above; they apply to passages that the model reproduces. Names of the holders",
    "and the full notices: `NOTICE`.",
]


def _introduction(config: ModelConfig) -> list[str]:
    return [
        "# v4flash demonstration model",
        "",
        f"A small model with the mechanisms of `{config.family}` and a DSpark drafter, trained from random",
        "weights for this repository. It shows loading, chat framing, streaming and speculative decoding on any",
        "machine. It has partly memorised its corpus and knows nothing else: judge the decoder with it, not the",
        "answers.",
        "",
        f"- {config.num_hidden_layers} layers of width {config.hidden_size}, {config.n_routed_experts} routed",
        f"  experts of which {config.num_experts_per_tok} work on a token, and one shared expert",
        f"- {config.draft.stages} drafter stages, blocks of {config.draft.block_size} tokens",
        "- stored in the published formats: FP4 experts, FP8 blocks, bf16 embeddings and heads",
        "",
    ]


def _corpus(corpus: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Corpus",
        "",
        "Trained on the packages below; the texts themselves are not part of the repository.",
        "",
        "| package | version | class | licence | documents |",
        "| --- | --- | --- | --- | --- |",
    ]
    for source in corpus.get("sources", []):
        lines.append(
            f"| {source['package']} | {source['version']} | {source.get('class', '')} | {source['licence']} "
            f"| {source.get('documents', '')} |"
        )
    if classes := corpus.get("classes"):
        lines += [
            "",
            "| class | training tokens | held-out tokens | bytes per token |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {name} | {found['train_tokens']:,} | {found['heldout_tokens']:,} | {found['bytes_per_token']:.2f} |"
            for name, found in classes.items()
        ]
    return [
        *lines,
        "",
        "5 % of every source was held out by file. The chat class was made by rule from the others.",
        "",
    ]


def _losses(records: Mapping[str, list[dict]]) -> list[str]:
    """The last held-out losses; nothing where the target was trained in another run."""
    entries = [*records.get("target", []), *records.get("joint", [])]
    measured = [entry for entry in entries if f"heldout_{CLASSES[0]}" in entry]
    if not measured:
        return []
    last = measured[-1]
    return [
        "## Loss on held-out text",
        "",
        f"After {last['step']:,} steps ({last['seconds'] / 60:.1f} minutes) of the last stage that trained the target.",
        "",
        "| class | nats per token |",
        "| --- | --- |",
        *[f"| {name} | {last[f'heldout_{name}']:.3f} |" for name in CLASSES],
        "",
    ]


def _drafter(records: Mapping[str, list[dict]]) -> list[str]:
    estimates = [entry for entry in records["draft"] if "own" in entry][-1]
    lines = [
        "## Drafter, estimated in training",
        "",
        "Along given text at temperature 1 (`accepted`: probability that draft position 1, 2, ... is accepted if",
        "those before it were; `tokens per step`: expected accepted prefix plus one).",
        "",
        "| text | accepted | tokens per step | greedy tokens per step | confidence AUC |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in (*CLASSES, "own"):
        entry = estimates[name]
        accepted = " ".join(f"{value:.2f}" for value in entry["accepted"])
        label = "the model's own samples" if name == "own" else f"held-out {name}"
        lines.append(
            f"| {label} | {accepted} | {entry['tau']:.2f} | {entry['greedy_tau']:.2f} | {entry['auc']:.3f} |"
        )
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and writes the card."""
    parser = argparse.ArgumentParser(
        prog="python -m v4flash.training.model_card", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--ckpt", type=Path, required=True, help="checkpoint folder; its README.md is replaced"
    )
    parser.add_argument(
        "--corpus-manifest", type=Path, help="default: corpus_manifest.json in the checkpoint folder"
    )
    parser.add_argument("--losses", type=Path, help="log of the training run, default: losses.json there")
    parser.add_argument("--acceptance", type=Path, help="default: acceptance.json there, if it exists")
    options = parser.parse_args(arguments)
    folder = options.ckpt
    acceptance, remarks = options.acceptance or folder / "acceptance.json", folder / "remarks.md"
    card = model_card(
        ModelConfig.from_file(folder),
        _read(options.corpus_manifest or folder / "corpus_manifest.json"),
        _read(options.losses or folder / "losses.json"),
        _read(acceptance) if options.acceptance or acceptance.is_file() else None,
        remarks.read_text(encoding="utf-8") if remarks.is_file() else "",
    )
    write_atomically(folder / "README.md", [card.encode()])
    print(f"wrote {folder / 'README.md'}")
    return 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path} ({error}); give the JSON file that the training run wrote"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
