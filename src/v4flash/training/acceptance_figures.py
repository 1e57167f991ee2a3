"""What the steps of decoded texts say about a drafter: tokens per step, acceptance, ranking, self-check.

Knows: which steps count, how each figure follows from them, the bars a drafter must clear, and the table a
person reads. Does not know: models, files, or where the texts came from.

Steps that count start before the text has run into a loop and have room for all k drafts. Both are known
when a step starts, so counting them bends no figure.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from v4flash.training.evaluate import ranking_quality
from v4flash.training.trigram import Trigram, replay

LOOP_LENGTH = 8
# A trained drafter that sees the target's taps must beat a table of pairs clearly, not by the noise of a few
# hundred steps.
TRIGRAM_MARGIN = 0.3
LEAST_AUC = 0.75
STANDARD_ERRORS = 3
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Step:
    """One speculative step.

    Attributes:
      start: index of its first emitted token among the generated ids.
      emitted, accepted, drafted: tokens that came out, drafts among them, drafts verified.
      confidence: predicted acceptance of each verified draft.
      chances: of each verified draft, before it is drawn, the chance that it is accepted if those before it are;
        None where not computed.
    """

    start: int
    emitted: int
    accepted: int
    drafted: int
    confidence: tuple[float, ...] = ()
    chances: tuple[float, ...] | None = None

    @property
    def judged(self) -> int:
        """Drafts whose whole prefix was accepted and that the text did not end before."""
        return min(self.accepted + 1, self.emitted, self.drafted)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A text with its steps; `ids` begins with the token that prefill drew, `budget` was the limit on ids."""

    prompt: list[int]
    ids: list[int]
    steps: list[Step]
    budget: int


def loop_end(ids: Sequence[int], length: int = LOOP_LENGTH) -> int:
    """How many ids stand before the end of the first `length`-gram that occurs again; all if none does."""
    seen = set()
    for end in range(length, len(ids) + 1):
        gram = tuple(ids[end - length : end])
        if gram in seen:
            return end
        seen.add(gram)
    return len(ids)


def counted_until(text: Decoded, k: int) -> int:
    """Steps count that start before this index."""
    return min(loop_end(text.ids), text.budget - k)


def figures(texts: Sequence[Decoded], k: int, trigram: Trigram) -> dict[str, Any]:
    """All figures of some texts decoded with `k` drafts a step, JSON-ready; rates are None without steps.

    Keys: texts; tokens and steps that count; loop_excluded, tokens left out because the text had begun to
    repeat itself; drafts_verified; tokens_per_step; survival, by draft position the share of steps that accepted
    it and all before it; conditional, the share accepted of drafts whose prefix was; auc, how well the
    confidence ranks the latter; trigram_tokens_per_step on the same text; and, where every step carries chances,
    auc_of_chance, how well perfect knowledge of them would rank, and first_acceptance: measured, expected (mean
    chance), standard_error of their difference.
    """
    steps, replayed, excluded = [], [], 0
    for text in texts:
        until = counted_until(text, k)
        kept = [step for step in text.steps if step.start < until]
        steps += kept
        replayed += replay(trigram, text.prompt, text.ids, k, until)
        end = kept[-1].start + kept[-1].emitted if kept else min(1, len(text.ids))
        if loop_end(text.ids) < len(text.ids):
            excluded += len(text.ids) - end
    tokens = sum(step.emitted for step in steps)
    drafted = [sum(step.drafted > j for step in steps) for j in range(k)]
    judged = [sum(step.judged > j for step in steps) for j in range(k)]
    accepted = [sum(step.accepted > j for step in steps) for j in range(k)]
    found = {
        "texts": len(texts),
        "tokens": tokens,
        "steps": len(steps),
        "loop_excluded": excluded,
        "drafts_verified": sum(step.drafted for step in steps),
        "tokens_per_step": _share(tokens, len(steps)),
        "survival": [_share(a, d) for a, d in zip(accepted, drafted, strict=True)],
        "conditional": [_share(a, j) for a, j in zip(accepted, judged, strict=True)],
        "auc": _ranking(steps, [step.confidence for step in steps]),
        "trigram_tokens_per_step": _share(sum(replayed), len(replayed)),
    }
    if steps and all(step.chances is not None for step in steps):
        found["auc_of_chance"] = _ranking(steps, [step.chances for step in steps])
        found["first_acceptance"] = first_acceptance(steps)
    return found


def _ranking(steps: Sequence[Step], scores: Sequence[Sequence[float]]) -> float | None:
    """Area under the ROC curve of a score for each judged draft; None unless some were accepted and some refused."""
    pairs = [
        (score[j], j < step.accepted)
        for step, score in zip(steps, scores, strict=True)
        for j in range(step.judged)
    ]
    score, outcome = np.array(pairs, np.float64).reshape(-1, 2).T
    return round(ranking_quality(score, outcome), 4) if 0 < outcome.sum() < len(outcome) else None


def first_acceptance(steps: Sequence[Step]) -> dict[str, float]:
    """Measured and expected acceptance of the first draft, and the standard error of their difference.

    Given everything before it, a step accepts its first draft with that draft's chance, so the variance of the
    difference is the sum of chance * (1 - chance).
    """
    chance = np.array([step.chances[0] for step in steps], np.float64)
    return {
        "measured": round(float(np.mean([step.accepted > 0 for step in steps])), 5),
        "expected": round(float(chance.mean()), 5),
        "standard_error": round(math.sqrt(max((chance * (1 - chance)).sum(), 0)) / len(steps), 5),
    }


def gates(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Which bars are cleared by rows of `figures` that carry `class` and `temperature`."""
    classes = [row for row in rows if row["class"] != ALL]
    pooled = [row for row in rows if row["class"] == ALL]
    checks = [row["first_acceptance"] for row in pooled if "first_acceptance" in row]
    return {
        "beats_trigram_on_every_class": all(
            row["steps"] and row["tokens_per_step"] - row["trigram_tokens_per_step"] >= TRIGRAM_MARGIN
            for row in classes
        ),
        "confidence_ranks": all(row["auc"] is not None and row["auc"] > LEAST_AUC for row in pooled),
        "first_acceptance_as_expected": bool(checks)
        and all(
            abs(check["measured"] - check["expected"]) <= STANDARD_ERRORS * check["standard_error"]
            for check in checks
        ),
    }


def markdown(document: dict[str, Any]) -> str:
    """Tables of an acceptance document (see acceptance.py) for a person."""
    k, rows = document["k"], document["figures"]
    lines = [
        f"{document['prompts_per_class']} held-out prompts a class, up to {document['tokens']} tokens each, k = {k}, "
        f"rule '{document['rule']}', {document['mode']}, {document['dtype']}, {document['device']}, "
        f"jax {document['versions']['jax']}.",
        "",
        "| text | T | tokens | steps | tokens per step | trigram | accepted with all before it, by position "
        "| accepted if those before it were | confidence AUC | AUC of the true chance | looped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['class']} | {row['temperature']:g} | {row['tokens']} | {row['steps']} "
            f"| {_shown(row['tokens_per_step'])} | {_shown(row['trigram_tokens_per_step'])} "
            f"| {' '.join(map(_shown, row['survival']))} | {' '.join(map(_shown, row['conditional']))} "
            f"| {_shown(row['auc'], 3)} | {_shown(row.get('auc_of_chance'), 3)} | {row['loop_excluded']} |"
        )
    lines += [
        "",
        f"`trigram`: tokens per step of a table of pairs along the same texts. `looped`: tokens left out of every "
        f"figure because the text had begun to repeat {LOOP_LENGTH} tokens. `AUC of the true chance`: what a "
        "confidence would reach that knew, before each draft is drawn, with what probability it will be accepted.",
    ]
    for row in rows:
        if row["class"] == ALL and (check := row.get("first_acceptance")):
            lines += [
                "",
                f"Self-check at temperature {row['temperature']:g}: the first draft was accepted in "
                f"{check['measured']:.4f} of the steps; the overlap of both laws says {check['expected']:.4f} "
                f"(standard error {check['standard_error']:.4f}).",
            ]
    lines += ["", "| bar | cleared |", "| --- | --- |"]
    lines += [
        f"| {name.replace('_', ' ')} | {'yes' if passed else 'no'} |"
        for name, passed in document["gates"].items()
    ]
    return "\n".join(lines)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _shown(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
