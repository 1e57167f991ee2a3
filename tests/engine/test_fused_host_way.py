"""A packed model with cold experts in the host's memory writes the text of a resident one, also while experts move."""

import dataclasses
import functools
from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import pytest
import tiered_toys
from packed_toys import small_toy
from toy_models import Toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine import backends, fused_host_way, host_way, programs
from v4flash.engine.backends import ChangingWeights
from v4flash.engine.language_model import LanguageModel
from v4flash.model.fused import two_memories
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.packing import pack_model
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import Placement

SHAPES = programs.Shapes(rows=8, chunk=8, context=96)
HOT_COUNT, SPARE, TOKENS = 5, 2, 24


def cut(toy: Toy, placement: Placement) -> fused_host_way.Parts:
    """The toy's parameters as loading leaves them."""
    memory = host_memory()
    parts = [
        (own, variable.replace(array))
        for path, variable in nnx.to_flat_state(toy.params)
        for own, array in host_way.put(placement, memory, path, variable.get_value()).items()
    ]
    return fused_host_way.separated(nnx.from_flat_state(parts))


def models(family: str) -> tuple[LanguageModel, LanguageModel]:
    """(all experts on the device, cold ones in the host's memory) of one toy, on the operations' definitions."""
    toy, memory = small_toy(family), host_memory()
    config, numerics, placement = toy.config, toy.numerics, tiered_toys.placement(toy, HOT_COUNT)
    divided = fused_host_way.packed(config, numerics, cut(toy, placement), placement, memory)
    weights = ChangingWeights(divided, two_memories.nothing_kept(divided, SPARE))
    build = functools.partial(
        programs.build,
        None,
        config=config,
        numerics=numerics,
        shapes=SHAPES,
        cache=None,
        bodies=ReferenceBodies,
    )
    backend, resident = backends.Backend(backends.FUSED), pack_model(toy.model)
    loaded = LoadedModel(config, numerics, None, resident, Path("no-files"))
    hosted = dataclasses.replace(build(weights), exchange=fused_host_way.exchange)
    return (
        LanguageModel(loaded, build(resident), backend),
        LanguageModel(dataclasses.replace(loaded, params=weights), hosted, backend, placement=placement),
    )


def text(model: LanguageModel, seed: int, *, swaps: bool = False, **options) -> list[int]:
    prompt = np.random.default_rng(seed).integers(2, 95, 12).tolist()
    found = model.generate(prompt, seed=seed, max_tokens=TOKENS, ignore_eos=True, **options)
    random, moved = np.random.default_rng(100 + seed), 0
    for number, _ in enumerate(found):
        if swaps and number % 3 == 0:
            counts = random.random(model.placement.tier.shape)
            moved += model.place_experts(Placement.from_counts(counts, HOT_COUNT))
    assert (moved > 0) == swaps
    return found.tokens


# The family with more operations every time, both with the slow tests.
@pytest.mark.parametrize("family", ["v41", pytest.param("v4", marks=pytest.mark.slow)])
def test_the_text_of_resident_experts_swaps_or_not(family):
    resident, hosted = models(family)
    for options in ({"k": 0}, {"k": 5}, {"k": 5, "temperature": 1.0}):
        expected = text(resident, 1, **options)
        assert len(expected) == TOKENS
        assert text(hosted, 1, **options) == expected
        assert text(hosted, 1, swaps=True, **options) == expected
    cold, missed, kept = np.asarray(hosted.params.changed.counts).sum(axis=0).tolist()
    assert 0 < kept <= missed < cold
    kinds = {layer.experts.cold.sharding.memory_kind for layer in hosted.params.kept.layers}
    assert kinds == {host_memory().memory_kind}


def test_programs_are_made_from_the_shapes_that_packing_gives():
    toy, memory = small_toy("v4"), host_memory()
    placement = tiered_toys.placement(toy, HOT_COUNT)
    made = fused_host_way.packed(toy.config, toy.numerics, cut(toy, placement), placement, memory)
    shapes = two_memories.shapes(backends.packed_shapes(toy.config, toy.numerics), HOT_COUNT, memory)
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert shape.sharding is None or shape.sharding.memory_kind == array.sharding.memory_kind
