"""The launches for experts in two memories, instruction by instruction. Run by test_tiers.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
import tier_cases

from pallas_kernels.experts import early, early_fused, tiered, tiers
from pallas_kernels.experts.specs import DEMO, TWIN, ExpertSpec

ptx_emulator.teach_interpreter()

# Several turns, tails for some warps, rows that end inside a chunk, eight warps; with the slots poisoned where records
# have no padding.
SHAPES = {
    "demo": (dataclasses.replace(DEMO, experts=4), True),
    "twin": (dataclasses.replace(TWIN, experts=4), False),
    "long hidden rows": (ExpertSpec(32, 1152, 4, 1, 128), False),
    "eight warps": (ExpertSpec(2208, 32, 4, 1, 32), False),
}


@pytest.mark.parametrize("name", tier_cases.CASES)
def test_steps(name):
    tier_cases.check_steps(tier_cases.fused_body(), tier_cases.SMALL, *tier_cases.CASES[name])


@pytest.mark.parametrize("name", tier_cases.GUESSED)
def test_guessed_steps(name):
    *case, guesses = tier_cases.GUESSED[name]
    tier_cases.check_steps(tier_cases.fused_body(), tier_cases.SMALL, *case, guesses=guesses)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    spec, poison = SHAPES[name]
    rows = [tuple(range(4))[-spec.chosen :], tuple(range(4))[: spec.chosen]]
    tier_cases.check_steps(tier_cases.fused_body(), spec, (1,), 2, [rows, rows[:1]], poison)


def test_records_of_several_pieces_are_fetched_by_few_programs():
    words, rng = 5 * early_fused.WORDS + 100, np.random.default_rng(0)
    cold, records = (jnp.asarray(rng.integers(0, 99, (rows, words)), jnp.int32) for rows in (5, 3))
    table = jnp.asarray([[[1, 4], [0, 0], [1, 0], [1, 2]]] * 2, jnp.int32)
    fetches, turn = jnp.asarray([[2, 0, 2], [1, 0, 4]], jnp.int32), jnp.zeros((1,), jnp.int32)
    expected, _ = early.fetch(jnp.int32(1), cold, table, fetches, turn, records)
    np.testing.assert_array_equal(expected, jnp.stack([cold[4], records[1], cold[2]]))
    for programs in (1, 2, 16):
        found, _ = early_fused.fetch(jnp.int32(1), cold, table, fetches, turn, records, programs=programs)
        np.testing.assert_array_equal(found, expected)


def test_shapes_are_checked():
    spec = tier_cases.SMALL
    here = tier_cases.world(spec, (0, 1))
    kept, listed = tier_cases.start(here, 2, poison=True), tier_cases.routes(spec, [(0, 1)])
    with pytest.raises(ValueError, match="the table is"):
        tiered.place(jnp.int32(0), here.table[0], listed, kept)
    places, kept = tiered.place(jnp.int32(tier_cases.LAYER), here.table, listed, kept)
    x, options = jnp.zeros((8, spec.width), jnp.float16), dict(limit=1.0, scale_block=32)
    with pytest.raises(ValueError, match="kept records are"):
        tiered.gate_up(x, here.experts, here.shared, listed, places, kept.records[0][:, :8], **options)
    with pytest.raises(ValueError, match="places are"):
        tiered.gate_up(x, here.experts, here.shared, listed, places[1:], kept.records[0], **options)
    assert tiers.record_words(here.routed) == kept.records[0].shape[1]
