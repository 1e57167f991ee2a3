"""A packed model with cold experts in host memory says what it says with all of them on the device, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_toys import small_toy

from v4flash.errors import CapacityError, UsageError
from v4flash.model.fused import two_memories
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.model import ROWS, FusedModel
from v4flash.model.fused.packing import pack_model
from v4flash.placement.host_memory import host_memory

CONTEXT = 96


def table_of(config, hot: int, seed: int) -> np.ndarray:
    """A random table with `hot` hot experts a layer."""
    random, experts = np.random.default_rng(seed), config.n_routed_experts
    table = np.zeros((config.num_hidden_layers, experts, 2), np.int32)
    for places in table:
        order = random.permutation(experts)
        places[order[:hot]] = np.stack([np.zeros(hot), np.arange(hot)], axis=1)
        places[order[hot:]] = np.stack([np.ones(experts - hot), np.arange(experts - hot)], axis=1)
    return table


class InTurn(ReferenceBodies):
    """Guesses two experts, others in every pass."""

    def guess(self, kept, tokens, length, count):
        named, kept = super().guess(kept, tokens, length, count)
        return jnp.zeros_like(named).at[:, :2].set(1 + jnp.stack([length % 8, (length + 3) % 8])), kept


@pytest.mark.parametrize("family", [pytest.param("v4", marks=pytest.mark.slow), "v41"])
def test_cold_experts_change_no_bit_and_moving_one_compiles_nothing(family):
    toy = small_toy(family)
    config, numerics, resident = toy.config, toy.numerics, pack_model(toy.model)
    compiled = []

    def one_pass(packed, kept, tokens, state, count):
        compiled.append(count)
        model = FusedModel(config, numerics, packed, InTurn, kept)
        output, state = model.backbone.trunk(tokens, state, count)
        return model.backbone.logits(output.hidden), output.routes, model.backbone.kept, state.advance(count)

    run, tokens = jax.jit(one_pass), np.random.default_rng(1).integers(2, 90, (8, ROWS)).astype(np.int32)
    state = toy.state(CONTEXT, ROWS)
    expected = []
    for row in tokens:
        logits, routes, _, state = run(resident, None, row, state, jnp.int32(5))
        expected.append((np.asarray(logits)[:5], [np.asarray(ids)[:5] for ids in routes]))
    assert len(compiled) == 1
    for seed, early in ((2, False), (3, False), (4, True)):
        packed = two_memories.in_two_memories(resident, table_of(config, 3, seed))
        assert all(layer.experts.cold.sharding.memory_kind == "pinned_host" for layer in packed.layers)
        state, kept = toy.state(CONTEXT, ROWS), two_memories.nothing_kept(packed, 2)
        if early:
            kept = two_memories.nothing_fetched(packed, 2, config.num_experts_per_tok)
        table, wanted = np.asarray(packed.placement), 0
        for row, (logits, routes) in zip(tokens, expected, strict=True):
            found, found_routes, kept, state = run(packed, kept, row, state, jnp.int32(5))
            np.testing.assert_array_equal(np.asarray(found)[:5], logits)
            for layer, (ids, other) in enumerate(zip(found_routes, routes, strict=True)):
                np.testing.assert_array_equal(np.asarray(ids)[:5], other)
                wanted += sum(table[layer, expert, 0] for expert in np.unique(other))
        counts = np.asarray(kept.counts).sum(axis=0)
        assert counts[0] == wanted and 0 < counts[2] <= counts[1] <= wanted
        if early:
            fetched, used = np.asarray(kept.early.counts).sum(axis=0)
            assert 0 < used < fetched
    assert len(compiled) == 3  # once resident, in two memories, and with guesses, whatever the table


def test_tables_must_fill_their_tiers():
    toy = small_toy("v4")
    packed, table = pack_model(toy.model), table_of(toy.config, 3, 2)
    table[0, np.flatnonzero(table[0, :, 0] == 0)[0], 1] = 5
    with pytest.raises(UsageError, match="tier 0 of a layer has slots"):
        two_memories.in_two_memories(packed, table)
    every = np.arange(toy.config.n_routed_experts)
    with pytest.raises(UsageError, match="tier 1 of a layer has slots"):
        two_memories.divided(packed.layers[0].experts, np.stack([0 * every, every], axis=1))


def test_refused_host_memory_is_one_sentence(monkeypatch):
    def refuse(array, place):
        raise RuntimeError("RESOURCE_EXHAUSTED: no room\nsecond line")

    experts, memory = pack_model(small_toy("v4").model).layers[0].experts, host_memory()
    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(
        CapacityError, match=r"were refused \(RESOURCE_EXHAUSTED: no room\); keep more experts on the"
    ):
        two_memories.moved_to_host(experts, memory)
