"""A packed model with cold experts in the host's memory writes the text of a resident one, also while experts move."""

import dataclasses
import functools
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiered_toys
from packed_toys import SMALL, small_toy
from toy_models import Toy, random_toy, with_table_sizes

from v4flash.checkpoint.export import save_published
from v4flash.checkpoint.loading import LoadedModel
from v4flash.config import ModelConfig
from v4flash.engine import backends, compiler_options, fused_host_way, host_way, opening, programs, ways
from v4flash.engine.backends import ChangingWeights
from v4flash.engine.language_model import LanguageModel
from v4flash.model.fused import two_memories
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.packing import pack_model
from v4flash.model.numerics import Numerics
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import COLD, Placement

SHAPES = programs.Shapes(rows=8, chunk=8, context=96)
EXPERTS, HOT_COUNT, SPARE, TOKENS = 8, 5, 2, 24


def cut(toy: Toy, placement: Placement) -> fused_host_way.Parts:
    """The toy's parameters as loading leaves them."""
    memory = host_memory()
    parts = [
        (own, variable.replace(array))
        for path, variable in nnx.to_flat_state(toy.params)
        for own, array in host_way.put(placement, memory, path, variable.get_value()).items()
    ]
    return fused_host_way.separated(nnx.from_flat_state(parts))


class EveryGuess(ReferenceBodies):
    """What the tokens chose last, random experts, no expert, or always the same ones, by the length of the text."""

    def guess(self, kept, tokens, length, count):
        named, kept = super().guess(kept, tokens, length, count)
        random = jax.random.randint(jax.random.key(length), named.shape, 0, EXPERTS + 1)
        same = jnp.broadcast_to(1 + jnp.arange(named.shape[1]) % 3, named.shape)
        return jnp.select([length % 4 == kind for kind in range(3)], [named, random, same], 0), kept


def models(
    family: str, bodies: type[ReferenceBodies] = ReferenceBodies
) -> tuple[LanguageModel, LanguageModel]:
    """(all experts on the device, cold ones in the host's memory) of one toy, on the operations' definitions.

    The second fetches early what `bodies` guess.
    """
    toy, memory = small_toy(family), host_memory()
    config, numerics, placement = toy.config, toy.numerics, tiered_toys.placement(toy, HOT_COUNT)
    divided = fused_host_way.packed(config, numerics, cut(toy, placement), placement, memory)
    assert config.n_routed_experts == EXPERTS
    kept = two_memories.nothing_fetched(divided, SPARE, config.num_experts_per_tok)
    weights = ChangingWeights(divided, kept)
    build = functools.partial(
        programs.build,
        None,
        config=config,
        numerics=numerics,
        shapes=SHAPES,
        cache=None,
    )
    backend, resident = backends.Backend(backends.FUSED), pack_model(toy.model)
    loaded = LoadedModel(config, numerics, None, resident, Path("no-files"))
    hosted = dataclasses.replace(build(weights, bodies=bodies), exchange=fused_host_way.exchange)
    return (
        LanguageModel(loaded, build(resident, bodies=ReferenceBodies), backend),
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
    fetched, used = np.asarray(hosted.params.changed.early.counts).sum(axis=0).tolist()
    assert 0 < used <= fetched
    kinds = {layer.experts.cold.sharding.memory_kind for layer in hosted.params.kept.layers}
    assert kinds == {host_memory().memory_kind}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_the_text_of_resident_experts_whatever_is_guessed(family):
    resident, hosted = models(family, EveryGuess)
    for options in ({"k": 0}, {"k": 5}, {"k": 5, "temperature": 1.0}):
        expected = text(resident, 1, **options)
        assert text(hosted, 1, **options) == expected
        assert text(hosted, 1, swaps=True, **options) == expected
    kept, placement = hosted.params.changed, hosted.placement
    fetched, used = np.asarray(kept.early.counts).sum(axis=0).tolist()
    assert 0 < used < fetched
    filled = 0
    for layer, (records, pack) in enumerate(zip(kept.records, hosted.params.kept.layers, strict=True)):
        for record, owner in zip(np.asarray(records), np.asarray(kept.owners[layer]), strict=True):
            if owner and placement.tier[layer, owner - 1] == COLD:
                np.testing.assert_array_equal(record, pack.experts.cold[placement.slot[layer, owner - 1]])
                filled += 1
    assert filled


@pytest.mark.slow  # a checkpoint is opened twice, and four programs compiled
def test_an_opened_checkpoint_fetches_early_beside_other_launches(tmp_path, monkeypatch):
    raw = with_table_sizes(SMALL["v41"])
    config = ModelConfig.from_dict(raw)
    save_published(tmp_path / "toy", raw, random_toy(config, quantise=False).params)
    asked, of = [], compiler_options.of

    def watched(*arguments, **options):
        asked.append(options["beside_each_other"])
        return of(*arguments, **options)

    monkeypatch.setattr(compiler_options, "of", watched)
    placement, numerics = Placement.in_order(config.num_hidden_layers, EXPERTS, HOT_COUNT), Numerics()
    resident = opening.open_packed(tmp_path / "toy", numerics, SHAPES, None, ReferenceBodies)
    assert not any(asked)
    asked.clear()
    told = ways.Opening(tmp_path / "toy", numerics, SHAPES, placement, True, None, lambda sentence: None)
    hosted = fused_host_way.open_host(told, ReferenceBodies)
    assert asked and all(asked)
    backend = backends.Backend(backends.FUSED)
    hosted = LanguageModel(*hosted, backend, placement=placement)
    assert text(hosted, 1, k=5, swaps=True) == text(LanguageModel(*resident, backend), 1, k=5)
    fetched, used = np.asarray(hosted.params.changed.early.counts).sum(axis=0).tolist()
    assert 0 < used <= fetched


def test_launches_that_run_beside_each_other_are_another_program(tmp_path):
    one = jnp.zeros((3,))
    pin = functools.partial(programs.executable, "more", lambda x: x + 1, (one,), one, (), (), tmp_path)
    assert [pin(beside_each_other=beside)[1] for beside in (False, True, False, True)] == [
        False,
        False,
        True,
        True,
    ]


def test_programs_are_made_from_the_shapes_that_packing_gives():
    toy, memory = small_toy("v4"), host_memory()
    placement = tiered_toys.placement(toy, HOT_COUNT)
    made = fused_host_way.packed(toy.config, toy.numerics, cut(toy, placement), placement, memory)
    shapes = two_memories.shapes(backends.packed_shapes(toy.config, toy.numerics), HOT_COUNT, memory)
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert shape.sharding is None or shape.sharding.memory_kind == array.sharding.memory_kind
