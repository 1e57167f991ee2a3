"""The launches for experts in two memories, instruction by instruction. Run by test_tiers.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
import tier_cases

from pallas_kernels import tuning
from pallas_kernels.experts import bench, early, early_fused, fused, reference, tiered, tiers
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


WALKED = ExpertSpec(64, 512, 8, 2, 128, dtype="float32")  # two tiles an expert
WALKS = (
    {"programs": 5, "fetchers": 2},  # programs that begin and end inside experts
    {"programs": 2, "fetchers": 1},  # one has all missed experts, one all others
    {"programs": 60, "fetchers": 29},  # more programs than tiles: some have none
)
# Name: (hot experts, spare slots, steps), as in tier_cases.
WALKED_CASES = {
    name: tier_cases.CASES[name]
    for name in (
        "all cold",
        "more misses than slots",
        "no rows",
    )
} | {
    "hot, kept and missed": (tier_cases.HOT, 3, [[(0, 1), (4, 2)], [(1, 0), (5, 3), (4, 7)]]),
}


@pytest.mark.parametrize("name", WALKED_CASES)
def test_programs_that_walk_over_tiles(name):
    """Down by few programs leaves what down by one program a tile leaves, wherever experts lie."""
    hot, slots, steps = WALKED_CASES[name]
    here = tier_cases.world(WALKED, hot)
    kept = tier_cases.start(here, slots, poison=True)
    options = dict(
        chosen=WALKED.chosen, round_block=WALKED.block, scale_block=WALKED.block, dtype=jnp.float32
    )
    for number, rows in enumerate(steps):
        listed = tier_cases.routes(WALKED, rows)
        places, kept = tiered.place(jnp.int32(tier_cases.LAYER), here.table, listed, kept)
        used = jnp.concatenate([jnp.ones((1, 8), bool), listed.slot >= 0])[..., None]
        hidden = reference.Hidden(*(jnp.where(used, a, jnp.nan) for a in bench.random_hidden(WALKED, number)))
        arguments = hidden, here.experts, here.shared, listed, places, kept.records[tier_cases.LAYER]
        expected = tiered.down(*arguments, **options)
        for walk in WALKS:
            with _walking(walk):
                found = tiered.down(*arguments, **options)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(_bits(one), _bits(other), err_msg=f"{walk}, step {number}")
        with _walking(WALKS[0]):
            resident = fused.down(hidden, here.routed, here.shared, listed, **options)
        np.testing.assert_array_equal(_bits(resident), _bits(expected[0]), err_msg=f"step {number}")
        kept = kept.with_records(tier_cases.LAYER, expected[1])


def test_experts_in_two_memories_have_the_bits_of_experts_on_the_device():
    """Where tiles have other warps in the form of one program a tile."""
    spec = dataclasses.replace(WALKED, channels=1024)
    here, listed = tier_cases.world(spec, tier_cases.HOT), tier_cases.routes(spec, [(0, 1), (5, 3), (4, 7)])
    kept = tier_cases.start(here, 2, poison=True)
    places, kept = tiered.place(jnp.int32(tier_cases.LAYER), here.table, listed, kept)
    hidden, options = bench.random_hidden(spec, 0), dict(chosen=spec.chosen, round_block=128, scale_block=128)
    with _walking({"programs": 5, "fetchers": 2, "warps": 8}, spec):
        expected = fused.down(hidden, here.routed, here.shared, listed, **options)
        records = kept.records[tier_cases.LAYER]
        found, _ = tiered.down(hidden, here.experts, here.shared, listed, places, records, **options)
    np.testing.assert_array_equal(np.asarray(found).view(np.int16), np.asarray(expected).view(np.int16))


def _walking(walk: dict, spec: ExpertSpec = WALKED):
    choice = {"warps": 4, "shared": 2, **walk}
    return tuning.trying("experts", f"walking down {spec.width}x{spec.channels}", choice)


def _bits(array) -> np.ndarray:
    return np.asarray(array).view(np.int32)


@pytest.mark.parametrize("fetchers", [0, 3])
def test_some_programs_fetch_but_not_all(fetchers):
    here = tier_cases.world(WALKED, (0, 1))
    kept, listed = tier_cases.start(here, 2, poison=True), tier_cases.routes(WALKED, [(0, 1)])
    places, kept = tiered.place(jnp.int32(tier_cases.LAYER), here.table, listed, kept)
    arguments = bench.random_hidden(WALKED, 0), here.experts, here.shared, listed, places, kept.records[0]
    with (
        _walking({"programs": 3, "fetchers": fetchers}),
        pytest.raises(ValueError, match="of 3 programs fetch"),
    ):
        tiered.down(*arguments, chosen=2, round_block=128, scale_block=128)


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
