"""A certificate that speculation changes nothing: texts, states and laws of every draft length against plain decoding.

Knows: what is compared, and how a first difference is judged. Does not know: prompt files, where certificates are
kept (certificate_file.py), or printing.

For each prompt the greedy text decoded with k = 0 is the reference. Each other k must emit the same ids, leave the
same visible state behind (what later rows can see; rejected drafts have been rolled back by then), and emit the
same ids again after the session was rewound into the middle of what it said. All draft lengths run one program
whose rows do not depend on one another, so texts and states are compared bit for bit. Where ids differ, the logits
behind the common prefix say whether rounding decided between two almost equal tokens, a *tie*, or not, a *bug*; a
state that differs under equal ids is always a bug.

Sampled texts of different k are different texts. They are judged by the law of every token that was emitted
(sampled_law.py), those of k = 0 too: where plain decoding itself fails, the fault is not speculation's.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.engine.session import Session
from v4flash.engine.visible_state import visible_state
from v4flash.fidelity import sampled_law
from v4flash.fidelity.certificate_file import BUG, IDENTICAL, TIE
from v4flash.fidelity.transcripts import TIE_GAP, first_difference

# A step may choose its depth and copy from the text: how `--k auto --lookup` decodes.
AUTO = "auto"
# By number type, the distance below which rounding may have chosen between two tokens. Logits of trained models reach
# from 16 to 32, where neighbouring bfloat16 numbers are .125 apart.
TIE_GAPS = {"float32": TIE_GAP, "bfloat16": 0.125}
# Sampled texts are told apart from one another by their seeds; any number serves.
_FIRST_SEED = 1

Logits = Callable[[list[int]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One draft length that did not reproduce plain decoding.

    Attributes:
      prompt: index of the prompt; None for the law of all sampled texts.
      k: the draft length, or AUTO.
      what: 'text', 'text after rewinding', 'state', or 'law'.
      verdict: 'tie' or 'bug'.
      position, tokens, gap: of the first differing generated token: its index, both ids (plain decoding first),
        and the distance of their logits; None where no token differs.
      best_gap: distance of the two best logits there.
      detail: what else there is to say.
    """

    prompt: int | None
    k: int | str
    what: str
    verdict: str
    position: int | None = None
    tokens: tuple[int, int] | None = None
    gap: float | None = None
    best_gap: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = "" if self.prompt is None else f"prompt {self.prompt}, "
        where = f"{place}k = {self.k}, {self.what}: {self.verdict}"
        if self.tokens is None:
            return f"{where}, {self.detail}"
        return (
            f"{where} at token {self.position}: {self.tokens[0]} without drafting, {self.tokens[1]} with; their logits "
            f"are {self.gap:.3g} apart, the two best {self.best_gap:.3g}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
      draft_lengths: above 0, and AUTO.
      tokens: new tokens of each text.
      temperature: of the sampled texts; 0 leaves them out.
    """

    draft_lengths: Sequence[int | str]
    tokens: int
    temperature: float = 1.0


def certify(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    logits: Logits,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Compares every draft length with k = 0 on prompts of token ids: one JSON-ready part of a certificate.

    Args: logits, float32 [N, V] behind each of N ids, asked after a difference and for sampled texts.

    Keys: `verdict`, the worst of 'identical', 'tie' and 'bug'; `findings`, as `Finding`; `texts`, sha256 of the
    reference ids; `laws`, by draft length how sampled texts fit; and what all was made with.
    """
    findings, texts = [], hashlib.sha256()
    for index, prompt in enumerate(prompts):
        say(f"prompt {index + 1} of {len(prompts)}")
        session, reference = _decoded(model, prompt, 0, plan.tokens)
        expected = visible_state(model.config, session.state)
        texts.update(json.dumps(reference).encode())
        for k in plan.draft_lengths:
            findings += _compared(model, (index, prompt, reference, expected), k, plan.tokens, logits)
    laws = {}
    for k in (0, *plan.draft_lengths) if plan.temperature > 0 else ():
        say(f"sampled texts, k {k}")
        fits = laws[str(k)] = _sampled(model, prompts, k, plan, logits)
        if not fits.sound:
            odd = f"texts of the right law look as odd with chance {fits.chance:.1g}"
            never = f"{fits.impossible} tokens that have no chance" if fits.impossible else ""
            findings.append(Finding(None, k, "law", BUG, detail=never or odd))
    verdicts = {finding.verdict for finding in findings}
    return {
        "verdict": next(verdict for verdict in (BUG, TIE, IDENTICAL) if verdict in {*verdicts, IDENTICAL}),
        "texts": texts.hexdigest(),
        "prompts": len(prompts),
        "tokens": plan.tokens,
        "temperature": plan.temperature,
        "draft_lengths": list(plan.draft_lengths),
        "laws": {k: dataclasses.asdict(fits) for k, fits in laws.items()},
        "rows": model.programs.shapes.rows,
        "context": model.programs.shapes.context,
        "backend": model.backend,
        "mode": model.mode,
        "dtype": np.dtype(model.numerics.dtype).name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _compared(
    model: LanguageModel, reference: tuple, k: int | str, tokens: int, logits: Logits
) -> list[Finding]:
    index, prompt, ids, expected = reference
    gap = TIE_GAPS[np.dtype(model.numerics.dtype).name]
    session, found = _decoded(model, prompt, k, tokens)
    if found != ids:
        return [_difference(index, prompt, (ids, found), k, "text", logits, gap)]
    state = visible_state(model.config, session.state)
    differing = [name for name in expected if not np.array_equal(expected[name], state[name])]
    findings = (
        [Finding(index, k, "state", BUG, detail=f"differs in {', '.join(differing)}")] if differing else []
    )
    half = len(found) // 2
    session.rewind(len(prompt) + half)
    again = found[:half] + _continued(model, session, k, len(found) - half)
    if again != ids:
        findings.append(_difference(index, prompt, (ids, again), k, "text after rewinding", logits, gap))
    return findings


def _difference(
    index: int,
    prompt: Sequence[int],
    texts: tuple[list[int], list[int]],
    k: int | str,
    what: str,
    logits: Logits,
    tie_gap: float,
) -> Finding:
    rows: list[np.ndarray] = []

    def last(ids: list[int]) -> np.ndarray:
        rows.append(logits(ids)[-1])
        return rows[-1]

    found = first_difference(index, list(prompt), *texts, last, tie_gap)
    if found is None:
        return Finding(index, k, what, BUG, detail="the number of tokens differs")
    second, best = np.sort(rows[-1])[-2:]
    return Finding(
        index, k, what, found.verdict, found.position, found.tokens, found.gap, float(best - second)
    )


def _sampled(
    model: LanguageModel, prompts: Sequence[Sequence[int]], k: int | str, plan: Plan, logits: Logits
) -> sampled_law.LawVerdict:
    texts = []
    for index, prompt in enumerate(prompts):
        options = {"temperature": plan.temperature, "seed": _FIRST_SEED + index}
        _, found = _decoded(model, prompt, k, plan.tokens, **options)
        rows = logits([*prompt, *found[:-1]])[len(prompt) - 1 :]
        # Written out here: what the decoder samples by must not be judged by its own words.
        scaled = (rows.astype(np.float64) - rows.max(axis=1, keepdims=True)) / plan.temperature
        laws = np.exp(scaled)
        texts.append((laws / laws.sum(axis=1, keepdims=True), np.asarray(found)))
    return sampled_law.judge(texts)


def _decoded(
    model: LanguageModel, prompt: Sequence[int], k: int | str, tokens: int, **options
) -> tuple[Session, list[int]]:
    """A session that said `tokens` tokens behind the prompt, and these."""
    session = model.session()
    return session, _continued(model, session, k, tokens, prompt, **options)


def _continued(
    model: LanguageModel,
    session: Session,
    k: int | str,
    tokens: int,
    prompt: Sequence[int] = (),
    **options,
) -> list[int]:
    generation = model.generate(
        list(prompt), session=session, k=k, lookup=k == AUTO, max_tokens=tokens, ignore_eos=True, **options
    )
    for _ in generation:
        pass
    return generation.tokens
