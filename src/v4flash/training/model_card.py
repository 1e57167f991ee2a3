"""The model card that goes beside a trained checkpoint.

Knows: which figures of a run a reader needs. Does not know: how they were made.
"""

from collections.abc import Mapping

from v4flash.config import ModelConfig
from v4flash.training.corpus import CLASSES


def model_card(config: ModelConfig, corpus: Mapping, records: Mapping[str, list[dict]]) -> str:
    """Markdown from the configuration, the corpus manifest and the log of a run."""
    target, draft = records.get("target", []), records["draft"]
    measured = [entry for entry in target if f"heldout_{CLASSES[0]}" in entry]
    estimates = [entry for entry in draft if "own" in entry][-1]
    lines = [
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
    lines += ["", "5 % of every source was held out by file.", "", "## Loss on held-out text", ""]
    if measured:
        lines += ["| class | nats per token |", "| --- | --- |"]
        lines += [f"| {name} | {measured[-1][f'heldout_{name}']:.3f} |" for name in CLASSES]
    lines += [
        "",
        "## Drafter",
        "",
        "Estimated along given text at temperature 1 (`accepted`: probability that draft position 1, 2, ... is",
        "accepted if those before it were; `tokens per step`: expected accepted prefix plus one).",
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
    lines += ["", "How to rebuild it: docs/training.md. Every logged figure: losses.json.", ""]
    return "\n".join(lines)
