"""The launches for experts in two memories, instruction by instruction. Run by test_tiers.py."""

import dataclasses

import jax.numpy as jnp
import ptx_emulator
import pytest
import tier_cases

from pallas_kernels.experts import tiered, tiers
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


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    spec, poison = SHAPES[name]
    rows = [tuple(range(4))[-spec.chosen :], tuple(range(4))[: spec.chosen]]
    tier_cases.check_steps(tier_cases.fused_body(), spec, (1,), 2, [rows, rows[:1]], poison)


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
