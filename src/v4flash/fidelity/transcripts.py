"""Greedy transcripts of a prompt file: recorded on one machine, compared on another.

Knows: how a transcript is made for several draft lengths, and how a first difference is judged: the logits
behind the common prefix say by how much the two tokens differ. Does not know: files' places or the terminal.

A difference whose two tokens are closer than TIE_GAP is a *tie* (rounding decided), any other one a *bug*.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.errors import UsageError
from v4flash.fidelity.logits import TargetPass

SCHEMA = 1
# Two float32 computations of the same logits differ by up to a few 1e-4 after a hundred rounded layers' worth
# of sums; a real fault moves logits by far more than this.
TIE_GAP = 2e-3


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two transcripts of a prompt disagree.

    Attributes:
      prompt: index of the prompt.
      position: index of the generated token.
      tokens: the two ids.
      gap: distance of their logits behind the common prefix.
      verdict: 'tie' or 'bug'.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    gap: float
    verdict: str


def digest(path: Path) -> str:
    """sha256 over the checkpoint's weight files, in name order."""
    total = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        total.update(file.read_bytes())
    return total.hexdigest()


def record(
    model: LanguageModel, prompts: Sequence[dict[str, Any]], draft_lengths: Sequence[int], max_tokens: int
) -> dict[str, Any]:
    """Greedy ids of every prompt for every draft length.

    Args: prompts, objects with `text`, `class` and `chat`; draft_lengths, the first is the reference.

    Returns a JSON-ready record; an entry's `differs_for_k` lists draft lengths whose ids were not the
    reference's (empty when speculation changed nothing).
    """
    entries = []
    for prompt in prompts:
        encoded = model.encode(prompt["text"], raw=not prompt["chat"])
        texts = {}
        for k in draft_lengths:
            generation = model.generate(encoded, k=k, max_tokens=max_tokens, ignore_eos=True)
            for _ in generation:
                pass
            texts[k] = generation.tokens
        reference = texts[draft_lengths[0]]
        entries.append(
            {
                "class": prompt["class"],
                "prompt": encoded.ids,
                "ids": reference,
                "differs_for_k": [k for k, ids in texts.items() if ids != reference],
            }
        )
    device = jax.devices()[0]
    return {
        "schema": SCHEMA,
        "checkpoint": digest(model.path),
        "device": device.device_kind,
        "jax": jax.__version__,
        "mode": model.mode,
        "dtype": np.dtype(model.numerics.dtype).name,
        "rows": model.programs.shapes.rows,
        "draft_lengths": list(draft_lengths),
        "max_tokens": max_tokens,
        "entries": entries,
    }


def compare(first: dict[str, Any], second: dict[str, Any], target: TargetPass) -> list[Difference]:
    """First differences of two records of the same checkpoint and prompts, judged by `target`'s logits."""
    if first["checkpoint"] != second["checkpoint"]:
        raise UsageError("the two records are of different checkpoints; record both with the same weights")
    if [entry["prompt"] for entry in first["entries"]] != [entry["prompt"] for entry in second["entries"]]:
        raise UsageError("the two records have different prompts; record both with the same prompt file")
    found = []
    for index, (one, other) in enumerate(zip(first["entries"], second["entries"], strict=True)):
        difference = first_difference(
            index, one["prompt"], one["ids"], other["ids"], lambda ids: target(ids).logits[-1]
        )
        if difference is not None:
            found.append(difference)
    return found


def first_difference(
    index: int,
    prompt: list[int],
    one: list[int],
    other: list[int],
    last_logits: Callable[[list[int]], np.ndarray],
    tie_gap: float = TIE_GAP,
) -> Difference | None:
    """Where two generated texts behind a prompt first disagree; None if nowhere.

    Args: last_logits, gives the logits [V] behind some ids; tie_gap, the distance below which a difference is a tie.
    """
    pairs = zip(one, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    tokens = one[position], other[position]
    logits = last_logits(prompt + one[:position])
    gap = float(abs(logits[tokens[0]] - logits[tokens[1]]))
    return Difference(index, position, tokens, gap, "tie" if gap < tie_gap else "bug")
