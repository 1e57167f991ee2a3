"""The fused index selection against its meaning, in Triton's interpreter at reduced shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch
from pallas_kernels.index_selection import fused, kernels, reference
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns, turn_table

ROWS, SPLITS = 8, 2
TILE = {"columns": 8, "keys": 16, "programs": 8, "warps": 4, "stages": 2}
# heads * width is a power of four: with whole numbers every score is exact, and ties abound.
WHOLE = IndexSpec(heads=4, width=16, rope=8, ratio=2, topk=6, block=4, quantise=False, dtype="float32")
ROUNDED = IndexSpec(heads=4, width=64, rope=16, ratio=2, topk=6, block=4, hadamard=True)
# Scores are sums of 4 terms of size about 10; queries may move by a rounding step where last bits differ.
SCORE_TOLERANCE = 1e-2
REFERENCE = jax.jit(reference.choose, static_argnums=6)
SCORES = jax.jit(reference.scores, static_argnums=4)


def case(spec, entries, length, count, seed=0, whole=True, rows=ROWS, largest=2):
    """Operands of `choose`: with `whole`, small whole numbers that are not turned."""
    random = np.random.default_rng(seed)

    def noise(*shape):
        if whole:
            return jnp.asarray(random.integers(-largest, largest + 1, shape), jnp.float32)
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    q = Columns(noise(SPLITS, rows, 5 + spec.heads * spec.width), 5, spec.heads * spec.width)
    weights = Columns(noise(SPLITS, rows, spec.heads + 3), 2, spec.heads)
    positions = jnp.zeros(rows) if whole else length + jnp.arange(rows)
    table = turn_table(positions, 10000.0 ** -(np.arange(0, spec.rope, 2) / spec.rope))
    keys = noise(entries, spec.width).astype(spec.type)
    return [q, weights, table, keys, jnp.int32(length), jnp.int32(count), spec]


def lists(random, blocks, kept, seen, block):
    """Candidate lists as a source would publish them, the newest visible block included."""
    ids, counts = np.full((len(seen), kept), -1, np.int32), np.zeros(len(seen), np.int32)
    for row, entries in enumerate(seen):
        there = -(-entries // block)
        counts[row] = min(there, kept)
        if there:
            chosen = random.permutation(there - 1)[: counts[row] - 1]
            ids[row, : counts[row]] = np.sort(np.append(chosen, there - 1))
    return Listed(jnp.asarray(ids), jnp.asarray(counts))


def same(found, expected):
    for name in ("counts", "ids"):
        np.testing.assert_array_equal(
            np.asarray(getattr(found, name)), np.asarray(getattr(expected, name)), err_msg=name
        )


def check(operands, candidates=None):
    found, published = fused.choose(*operands, candidates, TILE)
    expected, expected_published = REFERENCE(*operands, candidates)
    same(found, expected)
    if operands[6].role == "source":
        same(published, expected_published)
    return found


def test_interpreted():
    assert launch.INTERPRETED


@pytest.mark.parametrize(
    "length,count", [(0, 1), (0, 8), (9, 8), (11, 3), (12, 1), (13, 7), (40, 8), (121, 8)]
)
def test_ties_and_boundaries(length, count):
    """Few distinct scores: ties inside and across blocks, from no entries to all of them."""
    check(case(WHOLE, 64, length, count, seed=length))


def test_one_score_for_all_entries():
    operands = case(WHOLE, 64, 100, 8)
    operands[3] = jnp.zeros_like(operands[3])
    found = check(operands)
    np.testing.assert_array_equal(found.ids[0], np.arange(6))


def test_negative_scores_and_many_values():
    check(case(dataclasses.replace(WHOLE, ratio=1), 128, 110, 8, largest=40))


@pytest.mark.parametrize("seen", [15, 16, 17, 18, 40, 60])
@pytest.mark.parametrize("largest", [0, 1, 40])
def test_every_program_has_one_tile_and_blocks_need_no_search(seen, largest):
    """Fewer entries than are chosen, as many, one more and many more; equal scores, ties, and many values."""
    operands = case(dataclasses.replace(WHOLE, ratio=1, topk=16), 64, seen - 1, 4, largest=largest, rows=4)
    found, _ = fused.choose(*operands, None, {**TILE, "programs": 16})
    same(found, REFERENCE(*operands, None)[0])


@pytest.mark.parametrize("ratio,topk", [(4, 6), (1, 16)])
def test_ratio_and_choice_size(ratio, topk):
    check(case(dataclasses.replace(WHOLE, ratio=ratio, topk=topk), 64, 50, 8, seed=3))


@pytest.mark.parametrize("length,count", [(0, 2), (5, 8), (18, 8), (22, 4), (50, 8)])
def test_source_publishes_candidate_blocks(length, count):
    spec = dataclasses.replace(WHOLE, ratio=1, role="source", kept=5)
    check(case(spec, 60, length, count, seed=length))


@pytest.mark.parametrize("length,count", [(0, 1), (3, 8), (18, 8), (53, 6)])
def test_member_chooses_among_candidate_blocks(length, count):
    spec = dataclasses.replace(WHOLE, ratio=1, role="member", kept=5)
    operands = case(spec, 64, length, count, seed=length)
    seen = np.where(np.arange(ROWS) < count, length + np.arange(ROWS) + 1, 0)
    check(operands, lists(np.random.default_rng(length), 16, spec.kept, seen, spec.block))


@pytest.mark.parametrize("hadamard", [True, False])
def test_rounded_queries(hadamard):
    """Random numbers: a choice may differ only where two scores are as close as their error."""
    spec = dataclasses.replace(ROUNDED, hadamard=hadamard)
    operands = case(spec, 64, 90, 8, whole=False)
    q, weights, table, keys, *_ = operands
    operands[3] = keys = reference.formats.fp4_index_round_trip(keys, reference.INDEX_BLOCK)
    found, _ = fused.choose(*operands, None, TILE)
    values = np.asarray(SCORES(q, weights, table, keys, spec))
    for row in range(ROWS):
        seen = (90 + row + 1) // spec.ratio
        chosen = np.asarray(found.ids[row])
        assert np.all(np.diff(chosen) > 0) and chosen[0] >= 0 and chosen[-1] < seen
        left = np.setdiff1d(np.arange(seen), chosen)
        assert values[row, chosen].min() >= values[row, left].max() - SCORE_TOLERANCE


def test_dead_rows_choose_nothing():
    found = check(case(WHOLE, 64, 70, 3))
    assert np.all(np.asarray(found.ids[3:]) == -1) and np.all(np.asarray(found.counts[3:]) == 0)


def test_largest_and_smallest_values_are_ordered():
    """The search orders bits: zeros, both signs, subnormal and huge values, and the infinity of a kept block."""
    import triton
    import triton.language as tl

    values = np.array(
        [0.0, 1e-40, -1e-40, 3e38, -3e38, 1.0, 1.0, -1.0, np.inf, 0.0, 2.0, -2.0, 5.0, 1.0, -7.0, 4.0],
        np.float32,
    )

    @triton.jit
    def choose(values_ptr, chosen_ptr, place_ptr, COUNT: tl.constexpr, M: tl.constexpr):
        number = tl.arange(0, M)
        ordered = kernels.in_order(tl.load(values_ptr + number), number < M)
        edge, room = kernels.edge_of(ordered, tl.full((), 0, tl.uint32), M, COUNT)
        chosen, place, _ = kernels.chosen_places(ordered, number < 0, edge, room, 0)
        tl.store(chosen_ptr + number, chosen.to(tl.int32))
        tl.store(place_ptr + number, place)

    for count in range(1, 16):
        chosen, place = launch.call(
            choose,
            jnp.asarray(values),
            grid=(1,),
            outputs=[jax.ShapeDtypeStruct((16,), jnp.int32)] * 2,
            COUNT=count,
            M=16,
        )
        expected = np.sort(np.argsort(-values, kind="stable")[:count])
        np.testing.assert_array_equal(np.flatnonzero(chosen), expected)
        np.testing.assert_array_equal(np.asarray(place)[expected], np.arange(count))
