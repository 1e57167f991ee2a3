"""Ways of speculating side by side, timed by a table of costs: what each would bring on a machine that is not at hand.

Knows: which ways are compared, how each decodes the same prompts, and what follows from the tallies. Does not know:
prompt files, printing, or who measured the table.

A way's rate is its tokens over the time that the table gives for its steps, each by its live rows. Tokens are counted
twice: as emitted, and as expected given the drafts before each draft (`expected_survival`), which has the same mean
over all draws and about half the noise. Comparisons use the latter. Errors are those of leaving out one prompt after
another (jackknife), so that what happens to all ways of one prompt alike is no error of their proportion.

Steps count that have room for all drafts of the widest way, in all ways, and are known to have it when they start.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.engine.advice import AUTO, calibrated
from v4flash.engine.language_model import LanguageModel, Prompt
from v4flash.engine.programs import new_stream
from v4flash.engine.speculation_file import SpeculationFile
from v4flash.errors import UsageError
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.rejection import expected_survival
from v4flash.speculative.step import draft
from v4flash.speculative.stream import RUNNING, Control, Stream

SCHEMA = 1
ALL = "all"
# The trained block judged token by token, its drafts drawn without the text's filters: what most engines do.
TOKENWISE = "token"


@dataclasses.dataclass
class Walk:
    """What one way did behind one prompt.

    Attributes:
      steps, tokens: that count, and what they emitted.
      expected: tokens they were expected to emit.
      milliseconds: their time by the table.
      depths: how many of them verified 0, 1, 2, ... drafts.
      undrafted: how many did not draft at all; they are among those that verified none.
      judged: by draft position, (confidence, accepted) of drafts whose prefix was accepted.
    """

    steps: int = 0
    tokens: int = 0
    expected: float = 0.0
    milliseconds: float = 0.0
    depths: list[int] = dataclasses.field(default_factory=list)
    undrafted: int = 0
    judged: list[list[tuple[float, bool]]] = dataclasses.field(default_factory=list)


Walks = Sequence[Walk]


def make_survival(model: LanguageModel) -> Callable[[Any, Stream, Control], jax.Array]:
    """A jitted function (weights, stream at the start of a step, control) -> `expected_survival` of its drafts."""
    rows, limit = model.programs.shapes.rows, model.draft_limit

    def survival(params: Any, stream: Stream, control: Control) -> jax.Array:
        found = model.programs.model(params)
        ids, laws, _ = draft(found, stream, control, limit)
        tokens = jnp.zeros((rows,), jnp.int32).at[0].set(stream.anchor).at[1 : limit + 1].set(ids)
        trunk, _ = found.backbone.trunk(tokens, stream.decode, control.draft_length + 1)
        targets = target_law(found.backbone.logits(trunk.hidden)[:limit], control.sampling)
        return expected_survival(ids, laws, targets, control.blockwise)

    return jax.jit(survival)


def walk(
    model: LanguageModel,
    survival: Callable,
    prompt: Sequence[int],
    control: Control,
    costs: Sequence[float],
    tokens: int,
    room: int,
) -> Walk:
    """Decodes up to `tokens` tokens behind a prompt; steps with room for fewer than `room` drafts do not count."""
    session = model.session()
    session.tokens.extend(prompt)
    drawn, _ = session.prefill(control)
    shapes = model.programs.shapes
    stream = new_stream(session.state, [*prompt, int(drawn)], tokens, control, shapes)
    found = Walk(depths=[0] * (room + 1), judged=[[] for _ in range(room)])
    while int(stream.finish) == RUNNING and int(stream.remaining) > room:
        chances = np.asarray(survival(model.params, stream, control))
        stream, result = model.programs.step(model.params, stream, control)
        result = jax.device_get(result)
        live, accepted, emitted = int(result.drafted), int(result.accepted), int(result.emitted)
        # No confidence is exactly 0 where the drafter ran.
        drafted = bool(result.confidence.any())
        found.steps += 1
        found.tokens += emitted
        found.expected += 1 + float(chances[:live].sum())
        found.milliseconds += costs[live + 1 if drafted else 0]
        found.depths[live] += 1
        found.undrafted += not drafted
        for place in range(min(accepted + 1, live, emitted)):
            found.judged[place].append((float(result.confidence[place]), place < accepted))
    return found


def compare(
    model: LanguageModel,
    prompts: Mapping[str, Sequence[Prompt]],
    costs: Sequence[float],
    *,
    sampling: Mapping[str, Any],
    tokens: int,
    longest: int,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Decodes all prompts in every way and compares them; JSON-ready.

    Args:
      prompts: by class.
      costs: milliseconds of a step by live rows, place 0 without drafting (`StepCosts.milliseconds`).
      sampling: temperature and filters by the names of `SamplingParams.make`.
      tokens: new tokens behind each prompt; longest: the largest draft length.

    Ways are every draft length from 1, `AUTO` with confidences calibrated on what the trained block did, and, above
    temperature 0, `TOKENWISE`.

    Keys: `block`, the trained block; `calibration`, as fitted; `classes`, for every class and ALL: `ways`, figures of
    each way, and `comparisons`, gains with their standard errors.
    Raises UsageError for a table that is too short, or a model without a drafter.
    """
    if model.config.draft is None:
        raise UsageError(f"{model.path} has no drafter, so there is nothing to compare")
    if len(costs) < longest + 2:
        raise UsageError(
            f"the table has costs of {len(costs) - 1} live rows, k = {longest} has {longest + 1}; lower --max-k"
        )
    block = min(model.config.draft.block_size, longest)
    params = SamplingParams.make(**sampling)
    unfiltered = SamplingParams.make(temperature=sampling["temperature"])
    survival = make_survival(model)
    names = list(prompts)

    def walked(seed_first: int, **options: Any) -> dict[str, Walks]:
        say(f"k {options['k']}, {options.get('rule', 'block')} rule")
        found = {}
        for name in names:
            found[name] = []
            for seed, prompt in enumerate(prompts[name], seed_first):
                control = model.control(
                    sampling=params, seed=seed, stop_ids=(model.config.eos_token_id,), **options
                )
                found[name].append(
                    walk(model, survival, prompt.ids, _timed(control, costs), costs, tokens, longest)
                )
            if not sum(one.steps for one in found[name]):
                raise UsageError(
                    f"the texts of class {name} end too soon; give other prompts, or raise --tokens"
                )
        return found

    ways: dict[int | str, dict[str, Walks]] = {k: walked(0, k=k) for k in range(1, longest + 1)}
    pairs = [
        [pair for one in itertools.chain(*ways[block].values()) for pair in one.judged[place]]
        for place in range(block)
    ]
    fitted = calibrated(sampling["temperature"], pairs)
    model.speculation = SpeculationFile([fitted] if fitted else [], model.speculation.costs)
    # Other draws than those that the calibration was fitted to.
    ways[AUTO] = walked(1000, k=AUTO)
    if sampling["temperature"] > 0:
        ways[TOKENWISE] = walked(0, k=block, rule="token", draft_sampling=unfiltered)
    return {
        "block": block,
        "calibration": dataclasses.asdict(fitted) if fitted else None,
        "classes": {name: _class_figures(ways, [name], costs, block) for name in names}
        | {ALL: _class_figures(ways, names, costs, block)},
    }


def _timed(control: Control, costs: Sequence[float]) -> Control:
    """The control with these costs in place of those of the machine at hand."""
    policy = DepthPolicy.make(adaptive=bool(control.depth.adaptive), costs=list(costs))
    depth = dataclasses.replace(control.depth, costs=policy.costs)
    return dataclasses.replace(control, depth=depth)


def rate(walks: Walks) -> float:
    """Expected tokens per second by the table."""
    return 1000 * sum(one.expected for one in walks) / sum(one.milliseconds for one in walks)


def per_step(walks: Walks) -> float:
    """Expected tokens per step."""
    return sum(one.expected for one in walks) / sum(one.steps for one in walks)


def with_error(figure: Callable[..., float], *ways: Walks) -> tuple[float, float | None]:
    """A figure of ways that walked the same prompts, and its standard error (jackknife; None of a single prompt)."""
    count = len(ways[0])
    whole = figure(*ways)
    if count < 2:
        return whole, None
    without = np.array([figure(*[[*way[:i], *way[i + 1 :]] for way in ways]) for i in range(count)])
    return whole, float(np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2)))


def _class_figures(
    ways: Mapping[int | str, Mapping[str, Walks]], names: Sequence[str], costs: Sequence[float], block: int
) -> dict[str, Any]:
    found = {way: [one for name in names for one in by_class[name]] for way, by_class in ways.items()}
    plain = 1000 / costs[0]
    figures: dict[str, Any] = {
        "0": {"tokens_per_step": 1.0, "expected_tokens_per_step": 1.0, "tokens_per_second": plain}
    }
    for way, walks in found.items():
        steps = sum(one.steps for one in walks)
        figures[str(way)] = {
            "steps": steps,
            "tokens_per_step": sum(one.tokens for one in walks) / steps,
            "expected_tokens_per_step": per_step(walks),
            "milliseconds_per_step": sum(one.milliseconds for one in walks) / steps,
            "tokens_per_second": rate(walks),
            "depths": np.sum([one.depths for one in walks], axis=0).tolist(),
            "undrafted": sum(one.undrafted for one in walks),
        }
    fixed = {k: rate(walks) for k, walks in found.items() if isinstance(k, int)} | {0: plain}
    best = max(fixed, key=fixed.get)

    def gain(figure: Callable[[Walks], float], of: int | str, over: int | str) -> dict[str, Any]:
        if over == 0:
            whole, error = with_error(lambda one: figure(one) / plain - 1, found[of])
        else:
            whole, error = with_error(
                lambda one, other: figure(one) / figure(other) - 1, found[of], found[over]
            )
        return {"gain": whole, "standard_error": error}

    comparisons = {
        "auto_over_best_k": gain(rate, AUTO, best) | {"best_k": best},
        "auto_over_block": gain(rate, AUTO, block),
    }
    if TOKENWISE in found:
        comparisons["block_rule_over_token_rule"] = gain(per_step, block, TOKENWISE)
    return {"ways": figures, "comparisons": comparisons}
