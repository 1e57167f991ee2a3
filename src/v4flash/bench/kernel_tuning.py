"""Which of an operation's tile choices is the fastest on this GPU: every one is checked, then timed inside the chain.

Knows: how candidates are compiled, compared with the definition, timed in turns and judged, and where winners are
written. Does not know: what a choice means, or how a record is shown (cli/kernel_tuning).

What is recorded now and its candidates take turns in one profile, so that a drift of the clocks meets all of them. A
name of choices that several cases share (a layer and its variants) is judged by the sum of their times.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels.bench_case import EXACT_TYPES, OperationCase, Pair, same_bits
from pallas_kernels.tuning import Choice
from v4flash.bench import kernel_cases
from v4flash.bench.kernel_cases import durations, profiled, told
from v4flash.profile.profile_table import Event

SCHEMA = "v4flash.kernels.tune/1"
ROUNDS = 5
LEAST_GAIN = 0.01  # of the time: what is smaller is not worth a line in a file


@dataclasses.dataclass(frozen=True)
class Trial:
    """The choices of one name: `candidates[0]` changes nothing of what is recorded."""

    operation: str
    name: str
    cases: tuple[OperationCase, ...]
    candidates: tuple[Choice, ...]


def trials(cases: Sequence[OperationCase]) -> tuple[Trial, ...]:
    """What there is to try for these cases."""
    found: dict[tuple[str, str], list[OperationCase]] = {}
    for case in cases:
        for name in case.choices:
            found.setdefault((case.operation, name), []).append(case)
    return tuple(
        Trial(operation, name, tuple(own), ({}, *own[0].choices[name]))
        for (operation, name), own in found.items()
    )


def tune(
    cases: Sequence[OperationCase],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], Any] = lambda record: None,
) -> dict[str, Any]:
    """Tries every choice of the cases; needs a GPU. Returns the record, JSON-ready.

    `say` hears a line for each name of choices; `keep` gets the record, unfinished at first, after each. Its `trials`
    hold, for each candidate, microseconds of one call (the sum over cases of medians over rounds), their spread (half
    of what rounds differ by), or the problem that rules it out; and `winner`, the choice that is faster than what is
    recorded by more than both spreads, or None.
    """
    wanted = trials(kernel_cases.timeable(cases))
    parts = [(trial, case, choice) for trial in wanted for case in trial.cases for choice in trial.candidates]
    definitions = list({case.name: case for _, case, _ in parts}.values())
    references = {case.name: made for case, made in kernel_cases.ahead(definitions, _compiled_definition)}
    # All are compiled before the first is timed: a profile would record what compiles beside it.
    futures, rows = iter([made for _, made in kernel_cases.ahead(parts, _compiled)]), []
    record = {
        "schema": SCHEMA,
        "device": kernel_cases.device(),
        "gpu": tuning.gpu(),
        "rounds": ROUNDS,
        "trials": rows,
    }
    for trial in wanted:
        found: list[dict[str, Any]] = [{"choice": dict(choice)} for choice in trial.candidates]
        for case in trial.cases:
            made = list(itertools.islice(futures, len(found)))
            try:
                _time_case(case, references[case.name], made, found)
            except Exception as problem:  # one case must not hide the others
                for one in found:
                    one["problem"] = f"{case.name}: {told(problem)}"
        row = {"operation": trial.operation, "name": trial.name, "cases": [case.name for case in trial.cases]}
        rows.append(row | {"candidates": [_summed(one) for one in found]})
        rows[-1]["winner"] = winner(rows[-1]["candidates"])
        say(described(rows[-1]))
        keep(record)
    return record


def _compiled(part: tuple[Trial, OperationCase, Choice]) -> Callable:
    """A chain that also returns the outputs of its first call."""
    trial, case, choice = part

    # A function of its own: JAX would trace a case's once, and take every choice for the first.
    def chain(shared, walked):
        made, behind = case.fused(shared, walked[0])
        return made, case.chain(behind, walked[1:])

    with tuning.trying(trial.operation, trial.name, choice):
        return jax.jit(chain).lower(*case.shapes(case.calls)).compile()


def _compiled_definition(case: OperationCase) -> Callable:
    shared, (own,) = case.shapes()
    options = EXACT_TYPES | {"xla_gpu_autotune_level": 0}
    return jax.jit(case.reference).lower(shared, own).compile(compiler_options=options)


def _time_case(case: OperationCase, definition, futures: Sequence, found: list[dict[str, Any]]) -> None:
    """Adds each candidate's times in every round, or its problem, to `found`; one with a problem is not run again."""
    shared, walked = case.operands(case.calls)
    expected = definition.result()(shared, walked[0])
    ready = {}
    for place, (one, future) in enumerate(zip(found, futures, strict=True)):
        if "problem" in one:
            continue
        try:
            chain = future.result()
            made = chain(shared, walked)[0]
            repeats = same_bits(made, chain(shared, walked)[0])
            verdict = kernel_cases.compared(case, Pair(made, expected, repeats))
            if verdict["right"]:
                ready[place] = chain
            else:
                one["problem"] = f"wrong outputs in {case.name}"
        except Exception as problem:  # one candidate must not hide the others
            one["problem"] = f"{case.name}: {told(problem)}"
    chains = [lambda chain=chain: chain(shared, walked) for chain in ready.values()]
    events = profiled(chains, ROUNDS) if chains else []
    for place, times in zip(ready, by_round(events, case.kernels, ROUNDS, len(chains)), strict=True):
        found[place].setdefault("times", []).append(times)


def by_round(events: Sequence[Event], kernels: Sequence[str], rounds: int, chains: int) -> list[list[float]]:
    """For each of `chains` chains that took turns: microseconds of one call in every round.

    A call's time is the sum over kernels of the median over a chain's launches. Chains launch each kernel equally
    often, whatever else XLA put between them.
    """
    if not chains:
        return []
    found = [[0.0] * rounds for _ in range(chains)]
    for kernel, launches in durations(events, kernels).items():
        each, rest = divmod(len(launches), rounds * chains)
        if rest:
            raise ValueError(f"{len(launches)} launches of {kernel} in {rounds * chains} equal chains")
        for number in range(rounds * chains):
            turn, chain = divmod(number, chains)
            found[chain][turn] += statistics.median(launches[number * each : (number + 1) * each])
    return found


def _summed(one: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's figures over its cases."""
    if "problem" in one:
        return {"choice": one["choice"], "problem": one["problem"]}
    totals = [sum(times) for times in zip(*one["times"], strict=True)]
    return {
        "choice": one["choice"],
        "microseconds": round(statistics.median(totals), 3),
        "spread": round((max(totals) - min(totals)) / 2, 3),
    }


def winner(candidates: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """The fastest choice, if it beats the first candidate (what is recorded) by more than noise."""
    recorded = candidates[0]
    right = [one for one in candidates if "problem" not in one]
    if not right:
        return None
    best = min(right, key=lambda one: one["microseconds"])
    if "problem" not in recorded:
        gain = recorded["microseconds"] - best["microseconds"]
        noise = max(recorded["spread"] + best["spread"], LEAST_GAIN * recorded["microseconds"])
        if gain <= noise:
            return None
    return dict(best["choice"])


def described(row: Mapping[str, Any]) -> str:
    """What was found for one name of choices, in one line."""
    told_candidates = ", ".join(
        f"{_spelled(one['choice'])} "
        + (one["problem"] if "problem" in one else f"{one['microseconds']:.1f} +- {one['spread']:.1f} us")
        for one in row["candidates"]
    )
    kept = f"takes {_spelled(row['winner'])}" if row["winner"] else "stays"
    return f"{row['operation']} {row['name']} {kept}: {told_candidates}"


def _spelled(choice: Choice) -> str:
    return " ".join(f"{name} {value}" for name, value in choice.items()) or "as recorded"


def write_choices(record: Mapping[str, Any], root: Path | None = None) -> list[Path]:
    """Writes the winners into the tuning files of the record's GPU below `root`, by default those of pallas_kernels.

    A file holds what it held, with the winners' values in place of the old ones; operations without a winner have none
    written. Returns the files.
    """
    won: dict[str, dict[str, Choice]] = {}
    for row in record["trials"]:
        if row["winner"]:
            before = tuning.tiles(row["operation"]).get(row["name"], {})
            won.setdefault(row["operation"], {})[row["name"]] = {**before, **row["winner"]}
    written = []
    for operation, winners in won.items():
        file = tuning.file(operation, record["gpu"], root or tuning.ROOT)
        choices = tuning.recorded(operation, record["gpu"]) | winners
        lines = [f"  {json.dumps(name)}: {json.dumps(choice)}" for name, choice in choices.items()]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        written.append(file)
    return written
