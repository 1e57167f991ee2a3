"""Experts in the host's memory: the same bits as resident ones, and only what is missed is fetched."""

import dataclasses
import functools
from collections.abc import Sequence

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import toy_json

from v4flash.config import ModelConfig
from v4flash.engine import host_way
from v4flash.model.experts import Experts
from v4flash.model.host_experts import CACHE, HostExperts, changed_state
from v4flash.model.numerics import Numerics
from v4flash.placement.cache import EMPTY
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import COLD, HOT, Placement

EXPERTS, CHOSEN, HOT_COUNT, SPARE = 12, 2, 7, 2
FEW, MANY = 4, 16  # rows that gather their experts, and rows that run all of them
CONFIG = dataclasses.replace(ModelConfig.from_dict(toy_json("v4")), num_hidden_layers=1)
NUMERICS = {
    "exact": Numerics(packed=False),
    "rounded": Numerics(quantise=True, packed=True),
    "bfloat16": Numerics(dtype=jnp.bfloat16, quantise=True, packed=True),
}
TABLE = Placement.from_counts(np.random.default_rng(5).random((1, EXPERTS)), HOT_COUNT)
PATH = ("backbone", "layers", 0, "ffn", "experts")


@functools.cache
def resident(kind: str) -> Experts:
    """Experts of random weights."""
    experts, random = Experts(CONFIG, NUMERICS[kind], EXPERTS), np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(experts)):
        shape, dtype = variable[...].shape, variable[...].dtype
        if dtype == jnp.uint8:  # scales lie where products neither vanish nor overflow
            limits = (118, 123) if shape[-1] == CONFIG.hidden_size // 32 else (0, 256)
            variable[...] = jnp.asarray(random.integers(*limits, shape), jnp.uint8)
        else:
            variable[...] = jnp.asarray(random.normal(size=shape) * shape[-1] ** -0.5, dtype)
    return experts


def hosted(kind: str, table: Placement = TABLE) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The same experts cut by the table: graph, what stays, and the caches."""
    memory = host_memory()
    made = HostExperts(CONFIG, NUMERICS[kind], EXPERTS, hot=HOT_COUNT, spare=SPARE)
    made.table.tier[...], made.table.slot[...] = jnp.asarray(table.tier[0]), jnp.asarray(table.slot[0])
    for path, variable in nnx.to_flat_state(nnx.state(resident(kind))):
        for own, array in host_way.put(table, memory, (*PATH, *path), variable[...]).items():
            place = made
            for name in own[len(PATH) :]:
                place = getattr(place, name)
            place[...] = array
    return nnx.split(made, lambda path, _: CACHE not in path, ...)


@functools.cache
def program(graph):
    @jax.jit
    def run(kept, cache, x, ids, weights):
        experts = nnx.merge(graph, kept, cache)
        output = experts(x, ids, weights)
        return output, changed_state(experts)

    return run


def rows(count: int, seed: int, among: Sequence[int] = range(EXPERTS)):
    """Rows [T, D], distinct choices among some experts [T, K] and their weights; the last row is dead."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(among)[:CHOSEN] for _ in range(count)])
    weights = random.uniform(0.1, 1, ids.shape).astype(np.float32)
    weights[-1] = 0
    return random.normal(size=(count, CONFIG.hidden_size)).astype(np.float32), ids.astype(np.int32), weights


@pytest.mark.parametrize("kind", NUMERICS)
@pytest.mark.parametrize("count", [FEW, MANY])
def test_the_bits_of_resident_experts(kind, count):
    graph, kept, cache = hosted(kind)
    expected = jax.jit(resident(kind).__call__)
    for seed in range(6):
        chosen = rows(count, seed)
        made, cache = program(graph)(kept, cache, *chosen)
        wanted = expected(*chosen)
        assert np.asarray(wanted[:-1]).any(axis=1).all()
        np.testing.assert_array_equal(made, wanted)


def test_an_expert_that_a_row_chose_twice_counts_twice():
    x, ids, weights = rows(MANY, 3)
    ids[2] = ids[2, 0]
    ids[3] = TABLE.held(0, COLD)[1]
    expected = (
        resident("exact").run_chosen(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights)).sum(axis=1)
    )
    graph, kept, cache = hosted("exact")
    made, _ = program(graph)(kept, cache, x, ids, weights)
    # Once with both weights, or twice with one each: sums of float32 in another order.
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(made, jax.jit(resident("exact").__call__)(x, ids, weights))


def held(cache: nnx.State) -> list[int]:
    return sorted(expert for expert in cache["cache"]["expert"][...].tolist() if expert != EMPTY)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_hot_choices_and_dead_rows_fetch_nothing(count):
    graph, kept, cache = hosted("exact")
    x, ids, weights = rows(count, 0, TABLE.held(0, HOT))
    ids[-1] = TABLE.held(0, COLD)[:CHOSEN]
    made, after = program(graph)(kept, cache, x, ids, weights)
    assert held(after) == []
    for before, behind in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, behind)
    assert np.asarray(made[:-1]).any() and not np.asarray(made[-1]).any()


def test_fetched_experts_stay_and_lie_in_their_slots():
    graph, kept, cache = hosted("exact")
    first, second, third = TABLE.held(0, COLD)[:3]
    x, ids, weights = rows(FEW, 0, TABLE.held(0, HOT))
    for cold, expected in (
        (first, [first]),
        (second, [first, second]),
        (first, [first, second]),
        (third, [first, third]),
    ):
        ids[1, 0] = cold
        _, cache = program(graph)(kept, cache, x, ids, weights)
        assert held(cache) == sorted(expected)
    assert cache["cache"]["counts"][...].tolist() == [4, 3]  # asked for, fetched
    stacks = cache["cache"]["experts"]
    for slot, expert in enumerate(cache["cache"]["expert"][...].tolist()):
        for name in ("w1", "w2", "w3"):
            wanted = getattr(resident("exact"), name).weight[expert]
            np.testing.assert_array_equal(stacks[name]["weight"][...][slot], wanted)
