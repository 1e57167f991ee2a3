"""Sessions of the smallest toy model, with programs compiled once for a whole run of the tests."""

import functools

import flax.nnx as nnx
import numpy as np
from toy_models import toy

from v4flash.engine import programs
from v4flash.engine.session import Session
from v4flash.engine.statistics import Statistics
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import seed_key

SHAPES = programs.Shapes(rows=8, chunk=32, context=200)
GREEDY = SamplingParams.make(temperature=0.0)


@functools.cache
def compiled() -> programs.Programs:
    model = toy("mini")
    return programs.build(model.graphdef, model.params, model.config, model.numerics, SHAPES, None)


def session(params: nnx.State | None = None) -> Session:
    """An empty session, with other weights if some are given."""
    model = toy("mini")
    empty = programs.new_state(model.config, model.numerics, SHAPES)
    return Session(compiled(), model.params if params is None else params, empty)


def control(k: int = 5, *, sampling: SamplingParams = GREEDY, seed: int = 0, stop_ids=(), **options):
    return programs.make_control(k, max(k, 5), sampling, seed_key(seed), stop_ids, **options)


def run(found: Session, prompt: list[int], count: int, settings=None):
    """Generates: (tokens, statistics)."""
    settings = settings or control()
    statistics = Statistics(int(settings.draft_length), 0)
    steps = found.generate(prompt, settings, count, statistics)
    return [token for step in steps for token in step.tokens], statistics


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 95, length).tolist()


def changed(path: tuple, change) -> nnx.State:
    """The toy's weights with one array replaced by `change(array)`."""
    flat = nnx.to_flat_state(toy("mini").params)
    assert any(found == path for found, _ in flat), f"no parameter {path}"
    return nnx.from_flat_state(
        [
            (found, variable.replace(change(variable.get_value())) if found == path else variable)
            for found, variable in flat
        ]
    )
