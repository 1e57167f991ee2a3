"""Cold experts on the device that computes them for another one, apart from any step.

Knows: which experts each call chooses, so that none is found in a processor's cache. Does not know: a model, or how
values reach the device.
"""

import statistics
import time
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np

from v4flash.bench import random_weights
from v4flash.config import ModelConfig
from v4flash.model.experts import NOWHERE, Experts
from v4flash.model.experts_in_turn import PROCESSOR_ROWS, contributions_in_turn
from v4flash.profile.deviceless import REAL_NUMERICS

CHOSEN = (0, 1, 2, 4)
BLOCKS = (PROCESSOR_ROWS // 2, PROCESSOR_ROWS, 2 * PROCESSOR_ROWS, 4 * PROCESSOR_ROWS, None)
_STACKED, _CALLS = 32, 9


def run(config: ModelConfig, device: jax.Device, rows: int, live: int) -> list[dict[str, Any]]:
    """Milliseconds of 0, 1, 2 and 4 different experts, for several sizes of the blocks that are decoded at a time.

    Args: rows of a pass, of which `live` choose experts.
    """
    held = nnx.eval_shape(lambda: Experts(config, REAL_NUMERICS, _STACKED))
    graph, shapes = nnx.split(held)
    some = random_weights.popular_experts(config, config.n_routed_experts, live)
    # The names of a model's own: by these random weights know what an array is.
    named = random_weights.fill({"experts": shapes}, config, some)["experts"]
    stacks = jax.block_until_ready(jax.device_put(named, device))
    random = np.random.default_rng(0)
    x = jax.device_put(random.normal(size=(rows, config.hidden_size)), device).astype(REAL_NUMERICS.dtype)
    weights = jax.device_put(np.ones((rows, config.num_experts_per_tok), np.float32), device)
    return [
        {
            "rows_decoded": block or config.moe_intermediate_size,
            "milliseconds": _times(graph, stacks, x, weights, live, block),
        }
        for block in BLOCKS
    ]


def places(count: int, first: int, shape: tuple[int, int], live: int, among: int) -> np.ndarray:
    """Places int32 [T, K] of `count` different experts from the `first` on, each chosen by one row, or by more."""
    made = np.full(shape, NOWHERE, np.int32)
    for number in range(max(count, live if count else 0)):
        row, choice = number % live, number // live
        made[row, choice] = (first + number % count) % among
    return made


def _times(
    graph: nnx.GraphDef, stacks: nnx.State, x, weights, live: int, block: int | None
) -> dict[str, float]:
    @jax.jit
    def run(stacks, x, places, weights):
        return contributions_in_turn(nnx.merge(graph, stacks), x, places, weights, every=False, rows=block)

    found = {}
    for count in CHOSEN:
        taken = []
        for call in range(_CALLS + 1):
            chosen = places(count, call * max(CHOSEN), weights.shape, live, _STACKED)
            chosen = jax.block_until_ready(jax.device_put(chosen, x.sharding))
            started = time.perf_counter()
            jax.block_until_ready(run(stacks, x, chosen, weights))
            taken.append(time.perf_counter() - started)
        found[str(count)] = round(1e3 * statistics.median(taken[1:]), 3)
    return found
