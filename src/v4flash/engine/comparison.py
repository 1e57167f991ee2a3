"""Ways of speculating side by side, timed by a table of costs: what each would bring on a machine that is not at hand.

Knows: which ways are compared, how each would have gone along a given text, and what follows. Does not know: prompt
files, printing, or who measured the table.

Every text is drawn once. Speculation changes no law, so each way could have written it, and how it would have gone
follows from p and q, the laws of target and drafter at the text's own tokens:

    stays_i = chance that the first i drafts of a step are the text's and are kept, given the text
            = product of min(1, q/p)             judged token by token
            = smallest running product of q/p    judged as a block
    starts_t = chance that a step starts at token t: the sum over earlier starts of the chance to end just before t

(The block-wise rule keeps i drafts with chance min(1, r p/q), r that of i - 1; times q/p this is the line above.)
Tokens and time of all steps follow without a single draw but those of the text, and, where depths are chosen, of one
drafted block for each token, whose confidences say how many rows a step there would have cost. So ways differ by what
they are, hardly by luck. Errors are those of leaving out one prompt after another (jackknife).

Where depths are chosen, the running average of acceptance stays at its usual value here. Steps count that have room for
all drafts of the widest way.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.engine.advice import AUTO, calibrated, judged
from v4flash.engine.language_model import LanguageModel, Prompt
from v4flash.engine.speculation_file import SpeculationFile
from v4flash.errors import UsageError
from v4flash.speculative import depth
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams, is_greedy, target_law
from v4flash.speculative.randomness import round_key, seed_key
from v4flash.speculative.rejection import propose

SCHEMA = 1
ALL = "all"
# The trained block judged token by token, its drafts drawn without the text's filters: what most engines do.
TOKENWISE = "token"
# A token at the border of a filter may fall outside by rounding; it was drawn, so it had a chance.
_LEAST_CHANCE = 1e-12


class Drafted(NamedTuple):
    """The drafter's block behind each of T tokens, K drafts deep.

    Attributes:
      own, unfiltered: float [T, K], chance of the text's own token under the draft's law, with the text's filters
        and without.
      along, drawn: float [T, K], confidences where the drafts before are the text's, and where they were drawn.
    """

    own: np.ndarray
    unfiltered: np.ndarray
    along: np.ndarray
    drawn: np.ndarray


@dataclasses.dataclass(frozen=True)
class Walk:
    """How one way goes along one text: expected steps, tokens and milliseconds, and steps by verified drafts."""

    steps: float
    tokens: float
    milliseconds: float
    depths: np.ndarray


Walks = Sequence[Walk]


def stays(own: np.ndarray, target: np.ndarray, live: np.ndarray, blockwise: bool) -> np.ndarray:
    """Chance [T, K + 1], given the text, that the first 0 to K drafts of a step are the text's and are kept.

    Args: own, target, float [T, K], chance of the text's tokens under the draft's and the target's law; live, int [T],
    drafts verified.
    """
    ratio = own / np.maximum(target, _LEAST_CHANCE)
    kept = (
        np.minimum.accumulate(np.cumprod(ratio, axis=1), axis=1)
        if blockwise
        else np.cumprod(ratio.clip(max=1), 1)
    )
    kept = np.where(np.arange(own.shape[1]) < live[:, None], np.minimum(kept, 1), 0)
    return np.concatenate([np.ones((len(own), 1)), kept], axis=1)


def walked(stay: np.ndarray, verified: np.ndarray, costs: np.ndarray) -> Walk:
    """The walk that follows from `stays`, drafts verified [T] (-1: none drafted) and costs by live rows."""
    count, width = stay.shape
    ends = stay - np.append(stay[:, 1:], np.zeros((count, 1)), axis=1)
    starts = np.zeros(count + width)
    starts[0] = 1
    for token in range(count):
        starts[token + 1 : token + 1 + width] += starts[token] * ends[token]
    starts = starts[:count]
    return Walk(
        steps=float(starts.sum()),
        tokens=float(starts @ stay.sum(axis=1)),
        milliseconds=float(starts @ costs[verified + 1]),
        depths=np.bincount(np.maximum(verified, 0), weights=starts, minlength=width),
    )


class Along:
    """The laws of target and drafter along given texts, by the weights and bodies that decode."""

    def __init__(self, model: LanguageModel, sampling: SamplingParams, unfiltered: SamplingParams):
        self._model, limit = model, model.draft_limit

        def run_target(params, decode, tokens, count, following):
            found = model.programs.model(params)
            trunk, written = found.backbone.trunk(tokens, decode, count)
            written = found.drafter.commit(written, trunk.taps, decode.length, count).advance(count)
            laws = target_law(found.backbone.logits(trunk.hidden), sampling)
            return written, jnp.take_along_axis(laws, following[:, None], axis=1)[:, 0]

        def run_drafter(params, decode, anchor, following, block_rows, key):
            found = model.programs.model(params)
            block = found.drafter.block(found.backbone, decode, anchor, limit, block_rows)
            first = decode.length + 1
            step = round_key(key, first)

            def given(j, logits):
                token = following[j]
                return token, (target_law(logits, sampling)[token], target_law(logits, unfiltered)[token])

            def drawn(j, logits):
                token = propose(logits, sampling, step, first + j).token
                return token, token

            along, (own, bare) = found.drafter.chain(block, anchor, given)
            free, _ = found.drafter.chain(block, anchor, drawn)
            return own, bare, jax.nn.sigmoid(along.confidence), jax.nn.sigmoid(free.confidence)

        jit = model.programs.runner.jit
        self._target, self._drafter = jit(run_target), jit(run_drafter)

    def laws(
        self, prompt: Sequence[int], text: Sequence[int], block_rows: Sequence[int], longest: int, seed: int
    ) -> tuple[np.ndarray, dict[int, Drafted]]:
        """The target's chance [T, longest] of the tokens behind each token of the text that has so many behind it, and
        the drafter's blocks there by their rows."""
        model, rows, ids = self._model, self._model.programs.shapes.rows, [*prompt, *text]
        session = model.session()
        session.tokens.extend(prompt)
        session.prefill(model.control(k=0))
        decode = session.state
        padded = np.array(ids + [0] * (rows + model.draft_limit), np.int32)
        key, chances, blocks = seed_key(seed), [], {width: [] for width in block_rows}
        last = len(ids) - longest  # no token from here on has enough behind it

        def draft(at: int) -> None:
            behind = decode.replace(length=jnp.asarray(at, jnp.int32))
            following = jnp.asarray(padded[at + 1 : at + 1 + model.draft_limit])
            for width, found in blocks.items():
                anchor, live = jnp.asarray(ids[at], jnp.int32), jnp.asarray(width, jnp.int32)
                found.append(self._drafter(model.params, behind, anchor, following, live, key))

        # Passes as decoding has them: other shapes round otherwise, and a filter may leave out another token.
        for start in range(len(prompt), len(ids), rows):
            count = min(rows, len(ids) - start)
            if start < last:
                draft(start)
            tokens, following = padded[start : start + rows], padded[start + 1 : start + 1 + rows]
            decode, chance = self._target(
                model.params,
                decode,
                jnp.asarray(tokens),
                jnp.asarray(count, jnp.int32),
                jnp.asarray(following),
            )
            chances.append(chance)
            # The rings still hold what stands before any other token of this pass.
            for at in range(start + 1, min(start + count, last)):
                draft(at)
        target = np.concatenate(jax.device_get(chances)).astype(np.float64)
        places = np.arange(max(last - len(prompt), 0))[:, None] + np.arange(longest)
        drafted = {}
        for width, found in blocks.items():
            columns = zip(*jax.device_get(found), strict=True) if found else [np.zeros((0, longest))] * 4
            drafted[width] = Drafted(*[np.array(column, np.float64)[:, :longest] for column in columns])
        return target[places], drafted


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
    """Draws a text behind every prompt and compares all ways along it; JSON-ready.

    Args:
      prompts: by class.
      costs: milliseconds of a step by live rows, place 0 without drafting (`StepCosts.milliseconds`). A step of r live
        rows drafts r - 1, whether its depth is fixed or chosen in order.
      sampling: temperature and filters by the names of `SamplingParams.make`.
      tokens: of each text at most; longest: the largest draft length.

    Ways are every draft length from 0, `AUTO` with confidences calibrated on how the texts were decoded, and, above
    temperature 0, `TOKENWISE`.

    Keys: `block`, the trained block; `calibration`, as fitted; `classes`, for every class and ALL: `decoded`, tokens
    per step when the texts were drawn with the trained block, `ways`, figures of each way, and `comparisons`, gains
    with their standard errors. Afterwards `model.speculation` holds the calibration.
    Raises UsageError for a table or texts that are too short, or a model without a drafter.
    """
    if model.config.draft is None:
        raise UsageError(f"{model.path} has no drafter, so there is nothing to compare")
    if len(costs) < longest + 2:
        raise UsageError(
            f"the table has costs of {len(costs) - 1} live rows, k = {longest} has {longest + 1}; lower --max-k"
        )
    block = min(model.config.draft.block_size, longest)
    params, unfiltered = (
        SamplingParams.make(**sampling),
        SamplingParams.make(temperature=sampling["temperature"]),
    )
    along, widths = Along(model, params, unfiltered), [block, *range(block + 1, longest + 1)]
    numbered = [(name, seed, prompt) for name in prompts for seed, prompt in enumerate(prompts[name])]
    laws, pairs, decoded = [], [[] for _ in range(block)], []
    for index, (_, seed, prompt) in enumerate(numbered):
        say(f"text {index + 1} of {len(numbered)}")
        generation = model.generate(prompt, k=block, seed=seed, max_tokens=tokens, **sampling)
        for ours, theirs in zip(pairs, judged(list(generation)[1:]), strict=False):
            ours += theirs
        decoded.append((generation.statistics.generated - 1, generation.statistics.steps))
        laws.append(along.laws(prompt.ids, generation.tokens, widths, longest, seed))
    fitted = calibrated(sampling["temperature"], pairs)
    model.speculation = SpeculationFile([fitted] if fitted else [], model.speculation.costs)
    policy = dataclasses.replace(
        model.depth_policy(True, sampling["temperature"]),
        costs=DepthPolicy.make(adaptive=True, costs=list(costs)).costs,
    )
    greedy = bool(is_greedy(params))
    blocks, ends = (
        [drafted[block] for _, drafted in laws],
        np.cumsum([len(target) for target, _ in laws])[:-1],
    )
    # Greedy drafts are what they are; drawn ones are decided about in order, by confidences along the text.
    chosen, live = (
        np.split(_depths(np.concatenate(found)[:, :block], policy, greedy), ends)
        for found in ([one.drawn for one in blocks], [one.drawn if greedy else one.along for one in blocks])
    )
    drafting = bool(depth.worth_drafting(policy.acceptance[:block], policy, jnp.asarray(block)))
    walks = [
        _walks(*found, block, depths if drafting else None, greedy, np.array(costs))
        for found, *depths in zip(laws, chosen, live, strict=True)
    ]
    classes = {name: [i for i, found in enumerate(numbered) if found[0] == name] for name in prompts}
    figures = {}
    for name, chosen in (classes | {ALL: list(range(len(numbered)))}).items():
        if not sum(len(laws[i][0]) for i in chosen):
            raise UsageError(f"the texts of class {name} end too soon; give other prompts, or raise --tokens")
        emitted, steps = (sum(decoded[i][place] for i in chosen) for place in (0, 1))
        ways = {way: [walks[i][way] for i in chosen] for way in walks[0]}
        figures[name] = {"decoded": {"steps": steps, "tokens_per_step": emitted / max(steps, 1)}} | _figures(
            ways, block
        )
    return {"block": block, "calibration": dataclasses.asdict(fitted) if fitted else None, "classes": figures}


def _walks(
    target: np.ndarray,
    drafted: Mapping[int, Drafted],
    block: int,
    depths: Sequence[np.ndarray] | None,
    greedy: bool,
    costs: np.ndarray,
) -> dict[int | str, Walk]:
    """All ways along one text. `depths`: drafts `AUTO` verifies as drawn, and along the text; None for no drafts."""
    count, longest = target.shape
    none, own, all_live = np.full(count, -1), drafted[block], np.full(count, block)
    found: dict[int | str, Walk] = {0: walked(np.ones((count, 1)), none, costs)}
    for k in range(1, longest + 1):
        live = np.full(count, k)
        found[k] = walked(stays(drafted[max(k, block)].own, target, live, True), live, costs)
    chosen, live = (none, 0 * none) if depths is None else depths
    found[AUTO] = walked(stays(own.own, target, live, True), chosen, costs)
    if not greedy:
        found[TOKENWISE] = walked(stays(own.unfiltered, target, all_live, False), all_live, costs)
    return found


def _depths(confidence: np.ndarray, policy: DepthPolicy, undrawn: bool) -> np.ndarray:
    """Drafts that `choose_depth` verifies for confidences [T, K]."""
    width = confidence.shape[1]

    def one(row: jax.Array) -> jax.Array:
        chance, usual = depth.calibrated(row, policy), policy.acceptance[:width]
        return depth.choose_depth(chance, usual, policy, jnp.asarray(width), jnp.asarray(undrawn))

    return np.asarray(jax.vmap(one)(jnp.asarray(confidence, jnp.float32))).astype(int)


def rate(walks: Walks) -> float:
    """Tokens per second."""
    return 1000 * sum(one.tokens for one in walks) / sum(one.milliseconds for one in walks)


def per_step(walks: Walks) -> float:
    """Tokens per step."""
    return sum(one.tokens for one in walks) / sum(one.steps for one in walks)


def with_error(figure: Callable[..., float], *ways: Walks) -> tuple[float, float | None]:
    """A figure of ways along the same texts, and its standard error (jackknife; None for a single text)."""
    count = len(ways[0])
    whole = figure(*ways)
    if count < 2:
        return whole, None
    without = np.array([figure(*[[*way[:i], *way[i + 1 :]] for way in ways]) for i in range(count)])
    return whole, float(np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2)))


def _figures(ways: Mapping[int | str, Walks], block: int) -> dict[str, Any]:
    # Texts without a single step that counts say nothing, and would leave nothing when all others are left out.
    ways = {way: [one for one in walks if one.steps] for way, walks in ways.items()}
    figures = {
        str(way): {
            "tokens_per_step": per_step(walks),
            "milliseconds_per_step": sum(one.milliseconds for one in walks) / sum(one.steps for one in walks),
            "tokens_per_second": rate(walks),
            "depths": [round(float(steps), 2) for steps in sum(one.depths for one in walks)],
        }
        for way, walks in ways.items()
    }
    best = max((k for k in ways if isinstance(k, int)), key=lambda k: rate(ways[k]))

    def gain(figure: Callable[[Walks], float], of: int | str, over: int | str) -> dict[str, Any]:
        whole, error = with_error(lambda one, other: figure(one) / figure(other) - 1, ways[of], ways[over])
        return {"gain": whole, "standard_error": error}

    comparisons = {
        "auto_over_best_k": gain(rate, AUTO, best) | {"best_k": best},
        "auto_over_block": gain(rate, AUTO, block),
    }
    if TOKENWISE in ways:
        comparisons["block_rule_over_token_rule"] = gain(per_step, block, TOKENWISE)
    return {"ways": figures, "comparisons": comparisons}
