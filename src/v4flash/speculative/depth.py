"""How many drafts are worth verifying: expected tokens against what a step of so many rows costs.

Knows: calibrated chances of acceptance, a table of costs, and the choice of a depth that never looks at what it
must not look at. Does not know: where chances come from, or how the rows are then judged.

Draft i (from 0) is *live* when it is verified. At a temperature above zero the emitted law stays the target's
only if whether draft i is live depends on the drafts before i alone. The drafter's confidence in draft i
depends on exactly those, so depth may be chosen by it *one draft after another*: the decision about draft i
uses the confidences up to i and, for what lies ahead, the average acceptance of the steps before this one. It is
known before draft i is drawn, so drafts behind the chosen depth need not be drawn at all. Where drafts are not drawn
but follow from what was emitted (greedy drafts, copied ones), or where the target's own choices are emitted
whatever is verified (temperature 0), all confidences may be compared at once.

A step of r live rows costs `costs[r]`; `costs[0]` is the step without drafting, so `costs[1]` is a step that ran the
drafter and then verified nothing. Where drafts are drawn in order a step of r live rows draws r - 1. Only the
proportions count. Equal costs make every choice "verify all".

Verifying all is also what happens unless a smaller depth promises more by a margin; among the depths that do, the
best is taken.

Sources: DSpark paper (confidence-scheduled verification, and why it must stop in order); the look ahead beyond
the next row, which a cost curve with flat steps needs, and the margin are choices of this module.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError

MAX_DRAFT = 9
# A predicted gain below this is not worth leaving the depth that was asked for: predictions are noisy, and an
# accepted draft more is always right. On the demonstration model anything up to 0.02 is equally good, 0.04 is worse.
MARGIN = 0.01
# What is assumed of a drafter that nobody measured; without measured costs it decides nothing.
USUAL_ACCEPTANCE = 0.7
# One observation moves the running average by this much; without one it goes back to where it began.
_LEARNING, _FORGETTING = 1 / 16, 1 / 64
_LEAST_DOUBT = 1e-6
# Of `stopping_at`: a cost beside costs of 1, and the log-odds of a draft that is nearly certain.
_TOO_DEAR, _SURE = 1e6, 5.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DepthPolicy:
    """What the choice of a depth knows beforehand; all of it data.

    Attributes:
      adaptive: bool [], False verifies as many drafts as are wanted.
      slope, bias: float32 [MAX_DRAFT], the chance at place i is sigmoid(slope * log-odds of confidence + bias).
      acceptance: float32 [MAX_DRAFT], usual chance that a draft is accepted when those before it were.
      costs: float32 [MAX_DRAFT + 2], cost of a step by its live rows; place 0 is a step without drafting.
      margin: float32 [], least relative gain over verifying all wanted drafts that justifies fewer.
    """

    adaptive: jax.Array
    slope: jax.Array
    bias: jax.Array
    acceptance: jax.Array
    costs: jax.Array
    margin: jax.Array

    @classmethod
    def make(
        cls,
        *,
        adaptive: bool,
        slope: Sequence[float] = (1.0,),
        bias: Sequence[float] = (0.0,),
        acceptance: Sequence[float] = (USUAL_ACCEPTANCE,),
        costs: Sequence[float] = (1.0,),
        margin: float = MARGIN,
    ) -> "DepthPolicy":
        """Checks the numbers; sequences shorter than needed go on with their last value.

        Raises UsageError for costs that are not positive, chances outside 0 to 1, or a falling calibration.
        """
        if not all(np.isfinite(costs)) or min(costs) <= 0:
            raise UsageError(f"step costs are {list(costs)}, expected numbers above 0")
        if not 0 <= min(acceptance) <= max(acceptance) <= 1:
            raise UsageError(f"acceptance is {list(acceptance)}, expected numbers from 0 to 1")
        if not all(np.isfinite([*slope, *bias])) or min(slope) < 0:
            raise UsageError(
                f"calibration slopes are {list(slope)}, biases {list(bias)}; expected slopes from 0"
            )
        if not margin >= 0:
            raise UsageError(f"margin is {margin}, expected 0 or more")

        def filled(values: Sequence[float], length: int) -> jax.Array:
            padded = [*values, *[values[-1]] * length][:length]
            return jnp.asarray(padded, jnp.float32)

        return cls(
            adaptive=jnp.asarray(adaptive),
            slope=filled(slope, MAX_DRAFT),
            bias=filled(bias, MAX_DRAFT),
            acceptance=filled(acceptance, MAX_DRAFT),
            costs=filled(costs, MAX_DRAFT + 2),
            margin=jnp.asarray(margin, jnp.float32),
        )

    @classmethod
    def stopping_at(cls, depth: int) -> "DepthPolicy":
        """Drafts always and verifies `depth` drafts, whatever their confidence: made-up costs make more too dear."""
        costs = (_TOO_DEAR, *[1.0] * (depth + 1), _TOO_DEAR)
        return cls.make(adaptive=True, slope=(0.0,), bias=(_SURE,), costs=costs, margin=0.0)


def calibrated(confidence: jax.Array, policy: DepthPolicy) -> jax.Array:
    """Chance of acceptance of each draft, given those before it, from the drafter's confidence [k]."""
    sure = jnp.clip(confidence, _LEAST_DOUBT, 1 - _LEAST_DOUBT)
    odds = jnp.log(sure) - jnp.log1p(-sure)
    k = confidence.shape[0]
    return jax.nn.sigmoid(policy.slope[:k] * odds + policy.bias[:k])


def expected_tokens(chance: jax.Array) -> jax.Array:
    """Tokens [k + 1] that a step is expected to emit when it verifies 0 to k drafts of these chances [k]."""
    survival = jnp.concatenate([jnp.ones_like(chance[:1]), jnp.cumprod(chance)])
    return jnp.cumsum(survival)


def worth_drafting(ahead: jax.Array, policy: DepthPolicy, wanted: jax.Array) -> jax.Array:
    """bool []: whether a step should run the drafter at all; decided before anything is drafted.

    Args: ahead float [k], expected acceptance by place; wanted int [], drafts wanted, from 0 to k.
    """
    k = ahead.shape[0]
    rate = expected_tokens(ahead) / policy.costs[1 : k + 2]
    depth = jnp.arange(k + 1)
    best = jnp.max(jnp.where((depth > 0) & (depth <= wanted), rate, 0))
    return (wanted > 0) & (~policy.adaptive | (best * (1 + policy.margin) >= 1 / policy.costs[0]))


def choose_depth(
    chance: jax.Array, ahead: jax.Array, policy: DepthPolicy, wanted: jax.Array, free: jax.Array
) -> jax.Array:
    """How many of the drafts to verify, from 0 to `wanted`: int32 [].

    Args:
      chance: float [k], calibrated chance of each draft, given those before it.
      ahead: float [k], the same as expected before this step; stands for chances not yet looked at.
      policy: costs, margin, and whether to choose at all.
      wanted: int [], from 0 to k; the answer unless another one is better by more than the margin.
      free: bool [], whether all chances may be compared at once. False decides draft after draft: whether draft
        i is verified then depends on chance[: i + 1] only.
    """
    k = chance.shape[0]
    depth = jnp.arange(k + 1)
    costs = policy.costs[1 : k + 2].astype(chance.dtype)
    slack = 1 + policy.margin.astype(chance.dtype)
    tokens = expected_tokens(chance)
    rate = jnp.where(depth <= wanted, tokens / costs, 0)
    best = jnp.argmax(rate)
    known = jnp.where(rate[best] > slack * rate[wanted], best, wanted)
    stops = ~goes_on(depth[:k], chance, ahead, policy, wanted)
    in_order = jnp.argmax(jnp.append(stops, True))
    chosen = jnp.where(free, known, in_order)
    return jnp.where(policy.adaptive, chosen, wanted).astype(jnp.int32)


def goes_on(
    place: jax.Array, chance: jax.Array, ahead: jax.Array, policy: DepthPolicy, wanted: jax.Array
) -> jax.Array:
    """Whether a step that decides in order and verifies the first `place` drafts verifies the next one too.

    The answer for place i looks at chance[: i + 1] only, so it is known before draft i is drawn. It is that of an
    adaptive policy. Every number is picked by a mask: where `place` is one number all of it is a single kernel, which
    a loop asks in each of its turns.

    Args: place int [...], from 0 to k - 1; the others as in `choose_depth`.
    Returns: bool [...], False from `wanted` on.
    """
    costs, slack = policy.costs.astype(chance.dtype), 1 + policy.margin.astype(chance.dtype)
    ahead = ahead.astype(chance.dtype)
    survival = tokens = jnp.ones(place.shape, chance.dtype)
    here = best = whole = jnp.zeros(place.shape, chance.dtype)
    for further in range(chance.shape[0]):
        here = jnp.where(place == further, tokens / costs[further + 1], here)
        survival = survival * jnp.where(further <= place, chance[further], ahead[further])
        tokens = tokens + survival
        rate = jnp.where((further >= place) & (further < wanted), tokens / costs[further + 2], 0)
        best = jnp.maximum(best, rate)
        whole = jnp.where(further + 1 == wanted, rate, whole)
    return (place < wanted) & ~((here > best) & (here > slack * whole))


def observed(
    average: jax.Array,
    usual: jax.Array,
    chance: jax.Array,
    accepted: jax.Array,
    live: jax.Array,
    drafted: jax.Array,
) -> jax.Array:
    """The running average of acceptance by place after one more step, for the steps to come.

    A draft counts once all before it were accepted: with its outcome if it was verified, else with its chance,
    so that depths chosen by chance do not bend the average. A place that saw nothing drifts back to `usual`.

    Args: average, usual, chance float [k]; accepted, live int []; drafted bool [], False for a step without
    drafts of the drafter.
    """
    place = jnp.arange(chance.shape[0])
    outcome = jnp.where(place < live, (place < accepted).astype(average.dtype), chance.astype(average.dtype))
    seen = drafted & (place <= accepted)
    return average + jnp.where(seen, _LEARNING * (outcome - average), _FORGETTING * (usual - average))
