"""Which draft length pays on this machine, for these prompts: measured, predicted, and what would change it.

Knows: how costs and acceptance are measured with the decoder itself, and the arithmetic from them to tokens per
second. Does not know: prompt files, printing, or where the result is kept.

    tokens per step(k) = 1 + survival_1 + ... + survival_k       (survival_j: drafts 1..j all accepted)
    predicted rate(k)  = tokens per step(k) / time of a step with k + 1 live rows

All draft lengths decode every prompt in turn, so that a machine that slows down slows all of them.

A step with a fixed k drafts k tokens and verifies k + 1 rows. One that chooses its depth in order and stops at k does
the same: it draws no draft that it does not verify, and makes its choice in the same program. So the fixed lengths
give the costs of both. Where depths are compared freely (greedy text or drafts) the whole block is drafted, which
these costs leave out; a greedy draft costs little beside a verified row.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from v4flash.engine.language_model import LanguageModel, Prompt, StepRecord
from v4flash.engine.programs import make_control, new_stream
from v4flash.engine.speculation_file import Calibration, SpeculationFile, StepCosts
from v4flash.errors import UsageError
from v4flash.speculative import calibration
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key

SCHEMA = 1
AUTO = "auto"
ALL = "all"
# What calibrations are fitted for besides the sampling asked for: if that is greedy, and if it is not.
OTHER_SAMPLING = ({"temperature": 1.0}, {"temperature": 0.0})
# Steps that draft and then verify nothing, timed on their own; decoding has none of them.
UNVERIFIED_STEPS = 24


@dataclasses.dataclass
class Tally:
    """What one draft length did on the prompts of one class.

    Attributes:
      tokens, steps: emitted after each prompt's first token, and in how many steps.
      seconds: time of these steps.
      step_seconds: time of each step but the first behind a prompt.
      accepted, drafted: by draft position, as in `Statistics`.
      pairs: by draft position, (confidence, accepted) of drafts whose prefix was accepted.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    pairs: list[list[tuple[float, bool]]] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def survival(self) -> list[float]:
        """By draft position, the share of verified drafts accepted together with all before them."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def conditional(self) -> list[float]:
        """By draft position, the share accepted where all before were."""
        found = []
        for judged in self.pairs:
            if judged:
                found.append(sum(ok for _, ok in judged) / len(judged))
        return found

    def add(self, other: "Tally") -> None:
        """Takes in another tally."""
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.step_seconds += other.step_seconds
        for field in ("accepted", "drafted"):
            pairs = itertools.zip_longest(getattr(self, field), getattr(other, field), fillvalue=0)
            setattr(self, field, [ours + theirs for ours, theirs in pairs])
        while len(self.pairs) < len(other.pairs):
            self.pairs.append([])
        for ours, theirs in zip(self.pairs, other.pairs, strict=False):
            ours += theirs


def decode(
    model: LanguageModel, prompt: Prompt, k: int | str, tokens: int, sampling: Mapping[str, Any], seed: int
) -> Tally:
    """Decodes behind one prompt, as any caller would, and counts. `sampling`: options of `generate` by name."""
    generation = model.generate(prompt, k=k, seed=seed, max_tokens=tokens, **sampling)
    records = list(generation)[1:]
    figures = generation.statistics
    return Tally(
        tokens=max(figures.generated - 1, 0),
        steps=figures.steps,
        seconds=figures.decode_seconds,
        step_seconds=figures.step_seconds[1:],
        accepted=list(figures.accepted),
        drafted=list(figures.drafted),
        pairs=judged(records),
    )


def judged(records: Sequence[StepRecord]) -> list[list[tuple[float, bool]]]:
    """By draft position, (confidence, accepted) of drafts whose prefix was accepted; the first token is no step."""
    pairs: list[list[tuple[float, bool]]] = []
    for record in records:
        count = min(record.accepted + 1, len(record.tokens), len(record.drafts))
        while len(pairs) < count:
            pairs.append([])
        for place in range(count):
            pairs[place].append((record.confidence[place], place < record.accepted))
    return pairs


def unverified_step_seconds(model: LanguageModel, prompt: Prompt, sampling: Mapping[str, Any]) -> float:
    """Time of a step that runs the drafter and then verifies nothing, as an average of several."""
    block = min(model.config.draft.block_size, model.draft_limit)
    chosen = SamplingParams.make(**sampling)
    control = make_control(block, block, chosen, seed_key(0), (), depth=DepthPolicy.stopping_at(0))
    session = model.session()
    session.tokens.extend(prompt.ids)
    drawn, _ = session.prefill(control)
    shapes = model.programs.shapes
    steps = min(UNVERIFIED_STEPS, shapes.context - len(prompt.ids) - 1)
    stream = new_stream(session.state, [*prompt.ids, int(drawn)], steps + 1, control, shapes)
    jax.block_until_ready(stream)
    started = time.perf_counter()
    for _ in range(steps):
        stream, _ = model.programs.step(model.params, stream, control)
    jax.block_until_ready(stream)
    return (time.perf_counter() - started) / steps


def measure(
    model: LanguageModel,
    prompts: Mapping[str, Sequence[Prompt]],
    draft_lengths: Sequence[int],
    *,
    tokens: int,
    sampling: Mapping[str, Any],
    say: Callable[[str], Any],
) -> dict[int | str, dict[str, Tally]]:
    """Tallies by draft length and class of prompts; `AUTO` last, with what the fixed lengths taught.

    Afterwards `model.speculation` holds the costs found and two calibrations, for texts sampled so and for greedy
    ones (for temperature 1 where `sampling`, options of `generate` by name, is greedy itself). Raises UsageError for a
    model without a drafter, or draft lengths that do not start at 0 or leave one out.
    """
    if model.config.draft is None:
        raise UsageError(f"{model.path} has no drafter, so there is no draft length to choose")
    if list(draft_lengths) != list(range(len(draft_lengths))) or len(draft_lengths) < 2:
        raise UsageError(f"draft lengths are {list(draft_lengths)}, expected 0, 1, 2, ... without a gap")
    numbered = [(name, seed, prompt) for name in prompts for seed, prompt in enumerate(prompts[name])]
    block = min(model.config.draft.block_size, max(draft_lengths))
    decode(model, numbered[0][2], max(draft_lengths), min(tokens, 16), sampling, 0)
    found: dict[int | str, dict[str, Tally]] = {
        k: {name: Tally() for name in prompts} for k in [*draft_lengths, AUTO]
    }
    for index, (name, seed, prompt) in enumerate(numbered):
        say(f"prompt {index + 1} of {len(numbered)}")
        for k in draft_lengths:
            found[k][name].add(decode(model, prompt, k, tokens, sampling, seed))
    other = OTHER_SAMPLING[sampling["temperature"] > 0]
    elsewhere = Tally()
    for index, (_, seed, prompt) in enumerate(numbered):
        say(f"prompt {index + 1} of {len(numbered)}, temperature {other['temperature']:g}")
        elsewhere.add(decode(model, prompt, block, tokens, other, seed))
    tallies = {sampling["temperature"]: total(found[block]), other["temperature"]: elsewhere}
    costs = [
        step_milliseconds(total(found[0])),
        1000 * unverified_step_seconds(model, numbered[0][2], sampling),
    ]
    costs += [step_milliseconds(total(found[k])) for k in draft_lengths[1:]]
    model.speculation = learnt(model, tallies, costs)
    for index, (name, seed, prompt) in enumerate(numbered):
        say(f"prompt {index + 1} of {len(numbered)}, draft length chosen in every step")
        found[AUTO][name].add(decode(model, prompt, AUTO, tokens, sampling, seed))
    return found


def learnt(
    model: LanguageModel, tallies: Mapping[float, Tally], milliseconds: Sequence[float]
) -> SpeculationFile:
    """Calibrations from what the trained block did by temperature, and costs as measured here."""
    fitted = {temperature: calibrated(temperature, tally.pairs) for temperature, tally in tallies.items()}
    shapes = model.programs.shapes
    return SpeculationFile(
        calibrations=[fitted[temperature] for temperature in sorted(fitted) if fitted[temperature]],
        costs=StepCosts(
            device=jax.devices()[0].device_kind,
            backend=model.backend,
            dtype=jnp.dtype(model.numerics.dtype).name,
            mode=model.mode,
            rows=shapes.rows,
            context=shapes.context,
            milliseconds=list(milliseconds),
        ),
    )


def calibrated(temperature: float, pairs: Sequence[Sequence[tuple[float, bool]]]) -> Calibration | None:
    """The calibration that follows from (confidence, accepted) by draft position; None where nothing was judged."""
    seen = [found for found in pairs if found]
    fits = [calibration.fit(*zip(*found, strict=True)) for found in seen]
    if not fits:
        return None
    return Calibration(
        temperature=float(temperature),
        slope=[fit.slope for fit in fits],
        bias=[fit.bias for fit in fits],
        acceptance=[sum(kept for _, kept in found) / len(found) for found in seen],
        pairs=[len(found) for found in seen],
    )


def total(classes: Mapping[str, Tally]) -> Tally:
    """All classes together."""
    both = Tally()
    for tally in classes.values():
        both.add(tally)
    return both


def step_milliseconds(tally: Tally) -> float:
    """Median time of a step. Raises UsageError where too few steps were taken to have one."""
    if not tally.step_seconds:
        raise UsageError("the prompts end too soon to time a step; give others, or raise --tokens")
    return 1000 * statistics.median(tally.step_seconds)


def advice(found: Mapping[int | str, Mapping[str, Tally]], block: int) -> dict[str, Any]:
    """What follows from the tallies, JSON-ready. `block` is the drafter's trained block.

    Predictions take acceptance from the decoding with `block` drafts, and of later positions from the deepest.

    Keys: `draft_lengths`, a row for each k and for AUTO with `step_ms`, measured and predicted tokens per step
    and per second, and `break_even_ms`, the step time below which k beats k - 1; `classes`, acceptance by
    position and the best k of each class of prompts; `best_k`; `loses`, whether k = 0 was the fastest;
    `verdict`, the same in a sentence.
    """
    fixed = [k for k in found if k != AUTO]
    together = {k: total(found[k]) for k in found}
    block = min(block, max(fixed))
    trained, deepest = (together[k].survival() for k in (block, max(fixed)))
    survival = [*trained, *deepest[len(trained) :]]
    rows = []
    for k in found:
        tally, milliseconds = together[k], step_milliseconds(together[k])
        row = {
            "k": k,
            "step_ms": milliseconds,
            "tokens_per_step": tally.tokens_per_step,
            "tokens_per_second": tally.rate,
            "predicted_tokens_per_step": None,
            "predicted_tokens_per_second": None,
            "break_even_ms": None,
        }
        if k != AUTO:
            expected = expected_tokens(survival, k)
            row["predicted_tokens_per_step"] = expected
            row["predicted_tokens_per_second"] = 1000 * expected / milliseconds
            if k > 0:
                before = step_milliseconds(together[k - 1])
                row["break_even_ms"] = before * expected / expected_tokens(survival, k - 1)
        rows.append(row)
    best = max(fixed, key=lambda k: together[k].rate)
    drafting = max(fixed[1:], key=lambda k: together[k].rate)
    return {
        "draft_lengths": rows,
        "classes": {name: _class_advice(found, name, block) for name in found[best]},
        "best_k": best,
        "loses": best == 0,
        "verdict": verdict(rows, best, drafting),
    }


def _class_advice(found: Mapping[int | str, Mapping[str, Tally]], name: str, block: int) -> dict[str, Any]:
    fixed = [k for k in found if k != AUTO]
    best = max(fixed, key=lambda k: found[k][name].rate)
    return {
        "survival": found[block][name].survival(),
        "conditional": found[block][name].conditional(),
        "best_k": best,
        "tokens_per_second": {str(k): found[k][name].rate for k in found},
    }


def expected_tokens(survival: Sequence[float], k: int) -> float:
    """Tokens per step when k drafts are verified."""
    return 1 + sum(survival[:k])


def verdict(rows: Sequence[Mapping[str, Any]], best: int, drafting: int) -> str:
    """The advice in a sentence or two. `best` is the fastest k, `drafting` the fastest above 0."""
    row = {found["k"]: found for found in rows}
    plain, fastest = row[0]["tokens_per_second"], row[drafting]["tokens_per_second"]
    chosen = f"; k auto gives {row[AUTO]['tokens_per_second']:.1f}"
    if best == 0:
        needed = row[0]["step_ms"] * row[drafting]["predicted_tokens_per_step"]
        return (
            f"speculation loses here: k = {drafting} gives {fastest:.1f} tok/s, no drafting {plain:.1f}; a step with "
            f"k = {drafting} takes {row[drafting]['step_ms']:.1f} ms and would have to take less than {needed:.1f}"
            f"{chosen}"
        )
    said = f"best: k = {best}, {fastest:.1f} tok/s against {plain:.1f} without drafting{chosen}"
    following = row.get(best + 1)
    if following is not None:
        said += (
            f"; k = {best + 1} pays below {following['break_even_ms']:.1f} ms a step, "
            f"it takes {following['step_ms']:.1f}"
        )
    return said
