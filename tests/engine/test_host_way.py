"""Cold experts in the host's memory: the text of resident experts, whatever moves, and nothing compiled by that."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiered_toys
from toy_models import FAMILIES, toy

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine import backends, host_way, language_model, programs, ways
from v4flash.engine.language_model import LanguageModel
from v4flash.engine.session import Session
from v4flash.errors import CapacityError, UsageError, V4FlashError
from v4flash.fidelity.model_logits import ModelLogits
from v4flash.model.host_experts import CACHE
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import COLD, HOT, Placement

SHAPES = programs.Shapes(rows=8, chunk=16, context=160)
HOT_COUNT, SPARE = (
    5,
    2,
)  # of 8 experts, of which a row chooses 2: passes miss several at once, and caches overflow


@contextlib.contextmanager
def quick_compiling():
    """Compiles without optimising: what writes a few dozen tokens is not worth more."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def models(family: str, quick: bool = True) -> tuple[LanguageModel, LanguageModel]:
    """(all experts resident, cold ones in the host's memory) of one toy."""
    with quick_compiling() if quick else contextlib.nullcontext():
        return _models(family)


def _models(family: str) -> tuple[LanguageModel, LanguageModel]:
    model = toy(family)
    table = tiered_toys.placement(model, HOT_COUNT)
    graphdef, params = tiered_toys.tiered(model, table, SPARE)
    build = functools.partial(
        programs.build, config=model.config, numerics=model.numerics, shapes=SHAPES, cache=None
    )
    hosted = dataclasses.replace(build(graphdef, params), exchange=host_way.exchange)
    loaded = LoadedModel(model.config, model.numerics, model.graphdef, model.params, Path("no-files"))
    backend = backends.Backend(backends.XLA, experts=ways.HOST)
    return (
        LanguageModel(loaded, build(model.graphdef, model.params)),
        LanguageModel(
            dataclasses.replace(loaded, graphdef=graphdef, params=params), hosted, backend, placement=table
        ),
    )


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 95, 20 + 3 * seed).tolist()


def text(model: LanguageModel, seed: int, count: int, *, swap_every: int = 0, **options) -> list[int]:
    """A text of `count` tokens, during which experts change places every few steps if wanted."""
    found = model.generate(prompt(seed), seed=seed, max_tokens=count, ignore_eos=True, **options)
    random = np.random.default_rng(100 + seed)
    for number, _ in enumerate(found):
        if swap_every and number % swap_every == 0:
            shape = model.placement.tier.shape
            assert model.place_experts(Placement.from_counts(random.random(shape), HOT_COUNT))
    return found.tokens


def same_texts(found: tuple[LanguageModel, LanguageModel], seeds: range, count: int) -> None:
    resident, hosted = found
    for seed in seeds:
        for options in (
            {"k": 0},
            {"k": 5},
            {"k": 5, "temperature": 1.0},
            {"k": 3, "temperature": 0.8, "top_p": 0.9},
        ):
            expected = text(resident, seed, count, **options)
            assert len(expected) == count
            assert text(hosted, seed, count, **options) == expected
            assert text(hosted, seed, count, swap_every=3, **options) == expected


# The family with more operations every time, both at length with the slow tests.
def test_the_text_of_resident_experts_swaps_or_not():
    same_texts(models("v41"), range(1), 32)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_resident_experts_over_hundreds_of_tokens(family):
    same_texts(models(family, quick=False), range(3), 100)


def test_the_state_has_the_same_bits():
    states = []
    for model in models("v41"):
        session = model.session()
        for _ in model.generate(
            prompt(2), session=session, max_tokens=20, temperature=1.0, k=5, ignore_eos=True
        ):
            pass
        states.append(session.state)
    for found, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_moving_experts_compiles_nothing():
    _, hosted = models("v41")
    text(hosted, 1, 8, swap_every=2)
    compiled = []

    def heard(name: str, seconds: float, **facts) -> None:
        if name.endswith("compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        text(hosted, 1, 24, swap_every=2)
        assert compiled == []
        jax.jit(lambda x: x + 24)(1)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def test_places_say_where_the_weights_are():
    model, (_, hosted) = toy("v41"), models("v41")
    shape = hosted.placement.tier.shape
    wanted = Placement.from_counts(np.random.default_rng(9).random(shape), HOT_COUNT)
    moved = hosted.place_experts(wanted)
    assert moved and np.array_equal(hosted.placement.tier, wanted.tier)
    assert hosted.place_experts(wanted) == 0
    for layer in range(shape[0]):
        parts = ("backbone", "layers", layer, "ffn", "experts")
        own, published = hosted.params.kept, model.params
        for part in parts:
            own, published = own[part], published[part]
        assert own["table"]["tier"][...].tolist() == wanted.tier[layer].tolist()
        for stack, tier in (("hot", HOT), ("cold", COLD)):
            ids = hosted.placement.held(layer, tier)
            assert own["table"]["slot"][...][ids].tolist() == list(range(len(ids)))
            for name in ("w1", "w2", "w3"):
                np.testing.assert_array_equal(
                    own[stack][name]["weight"][...], published[name]["weight"][...][ids]
                )


def test_the_step_is_one_program_that_takes_its_caches_over():
    _, hosted = models("v41")
    before = jax.tree.leaves(hosted.params.changed)
    text(hosted, 0, 8, k=5)
    assert all(array.is_deleted() for array in before)
    held = [
        array
        for path, array in jax.tree_util.tree_leaves_with_path(hosted.params.changed)
        if "expert'" in str(path)
    ]
    assert held and any((np.asarray(array) >= 0).all() for array in held)
    assert CACHE in str(jax.tree_util.tree_leaves_with_path(hosted.params.changed)[0][0])


@pytest.mark.slow  # two more programs are compiled
def test_other_programs_read_weights_that_change():
    resident, hosted = models("v41")
    before = jax.tree.map(np.asarray, hosted.params.changed)
    with quick_compiling():
        found, expected = (ModelLogits(model)(prompt(7)) for model in (hosted, resident))
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, hosted.params.changed, before)


def test_a_bad_cold_expert_is_named_as_the_checkpoint_names_it():
    _, hosted = models("v41")
    params = jax.tree.map(lambda array: array, hosted.params)
    params.changed = jax.tree.map(jnp.copy, params.changed)  # a session takes these over
    experts = params.kept["backbone"]["layers"][2]["ffn"]["experts"]["cold"]
    weight = experts["w3"]["weight"]
    memory = weight[...].sharding
    experts["w3"]["weight"] = weight.replace(jax.device_put(np.full_like(weight[...], np.nan), memory))
    session = Session(hosted.programs, params, hosted.session().state)
    with pytest.raises(
        V4FlashError, match="first bad layer: layer 2, tensor layers.2.ffn.experts.*w3.weight"
    ):
        for _ in hosted.generate(prompt(3), session=session, max_tokens=8):
            pass


def test_what_cannot_be_wanted():
    with pytest.raises(UsageError, match="needs --hot-experts"):
        ways.Wanted(ways.HOST)
    with pytest.raises(UsageError, match="leave one of them out"):
        ways.Wanted(hot=4)
    with pytest.raises(UsageError, match="leave one of them out"):
        ways.Wanted(statistics="routes.json")
    with pytest.raises(UsageError, match="expected resident, peer, host, sidecar"):
        ways.Wanted("elsewhere", 4)
    with pytest.raises(UsageError, match="expected 2 to 7"):
        ways.Wanted(ways.HOST, 1).placement(toy("v41").config)
    with pytest.raises(UsageError, match="nothing to move"):
        models("v41")[0].place_experts(models("v41")[1].placement)


def test_auto_takes_the_backend_that_has_the_way(monkeypatch):
    monkeypatch.setattr(ways, "OPENERS", {(ways.HOST, backends.XLA): host_way.open_host})
    fused = backends.Backend(backends.FUSED)
    assert ways.suited(fused, backends.AUTO, ways.RESIDENT) == fused
    found = ways.suited(fused, backends.AUTO, ways.HOST)
    assert (found.name, found.label) == (backends.XLA, "xla+host")
    assert found.note == "fused has no --experts host"
    with pytest.raises(UsageError, match="backend fused has no --experts host, only resident"):
        ways.suited(fused, backends.FUSED, ways.HOST)


def test_memory_that_is_refused_is_one_sentence(monkeypatch):
    table = Placement.in_order(1, 8, HOT_COUNT)
    path, weights = (
        ("backbone", "layers", 0, "ffn", "experts", "w1", "weight"),
        np.zeros((8, 4, 4), np.float32),
    )
    memory = host_memory()
    real = jax.device_put

    def refusing(value, where=None):
        if where is not None:
            raise RuntimeError("RESOURCE_EXHAUSTED: cudaHostAlloc failed\nin some file")
        return real(value)

    monkeypatch.setattr(jax, "device_put", refusing)
    with pytest.raises(
        CapacityError, match="refused 0.00 GB of layer 0's cold experts .*cudaHostAlloc failed"
    ) as caught:
        host_way.put(table, memory, path, weights)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 4
    with pytest.raises(CapacityError, match="reaches no memory of the host .RESOURCE_EXHAUSTED"):
        host_memory()


def test_a_checkpoint_is_opened_with_its_experts_cut(golden_checkpoint):
    path = golden_checkpoint("v41-tiny")
    options = {
        "mode": "exact",
        "context": 32,
        "rows": 2,
        "chunk": 8,
        "compile_cache": False,
        "drafter": False,
    }
    with quick_compiling():
        resident = language_model.load(path, **options)
        hosted = language_model.load(path, experts="host", hot_experts=11, **options)
    assert (resident.backend, hosted.backend) == ("xla", "xla+host") and hosted.placement.hot == 11
    experts = hosted.params.kept["backbone"]["layers"][0]["ffn"]["experts"]
    stacks = {name: experts[name]["w1"]["weight"][...] for name in ("hot", "cold")}
    assert [stack.shape[0] for stack in stacks.values()] == [11, 5]
    assert stacks["cold"].sharding.memory_kind == host_memory().memory_kind
    assert text(hosted, 0, 8) == text(resident, 0, 8)
