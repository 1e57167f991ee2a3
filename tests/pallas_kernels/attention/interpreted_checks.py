"""The fused attention core against its meaning, in Triton's interpreter at reduced shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device_barrier, launch
from pallas_kernels.attention import kernels, reference
from pallas_kernels.attention.reference import Block, Chosen, Visible
from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.rows import Columns, turn_table

# float32: sums in another order. bfloat16: weights are rounded before the division here, behind it there; a
# weight's error of 2^-9 and the output's last bit (2^-8 of values up to 3) are the most that was seen.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
WINDOW, RING, ROWS, ENTRIES, CHOSEN = 16, 24, 8, 40, 10
# First position and live rows: empty caches, both sides of a full window and of the ring's end, all of a group.
BOUNDARIES = [
    ("none", 0, 8), ("none", 15, 3), ("none", 24, 8), ("chosen", 0, 1), ("chosen", 22, 5), ("chosen", 97, 8),
    ("visible", 3, 8), ("visible", 30, 1), ("block", 0, 2), ("block", 23, 8),
]  # fmt: skip


REFERENCE = jax.jit(reference.attend, static_argnums=7)  # one compilation for all cases of a kind


def spec(dtype="bfloat16", norm=True, width=32):
    return AttentionSpec(2, width, 8, WINDOW, 1e-6 if norm else None, dtype)


def case(kind, spec, length, count, seed=0, rows=ROWS, splits=2, ratio=4):
    """Operands of `attend`; rows of keys that nothing may see hold large numbers."""
    random = np.random.default_rng(seed)

    def noise(*shape):
        return jnp.asarray(random.normal(size=shape).astype(np.float32))

    side = 12  # columns of another product in front of the queries
    partials = noise(splits, rows, side + spec.heads * spec.width)
    ring = np.full((RING, spec.width), 1e4, np.float32)
    last = length - 1 if kind == "block" else length + count - 1
    for position in range(max(0, last - RING + 1), last + 1):
        ring[position % RING] = random.normal(size=spec.width)
    entries = np.full((ENTRIES, spec.width), 1e4, np.float32)
    visible = min((length + count) // ratio, ENTRIES)
    entries[:visible] = random.normal(size=(visible, spec.width))
    entries = jnp.asarray(entries, spec.type)
    far = None
    if kind == "chosen":
        counts = np.minimum((length + np.arange(rows) + 1) // ratio, CHOSEN)
        ids = np.full((rows, CHOSEN), -1, np.int32)
        for row in range(rows):
            own = min((length + row + 1) // ratio, visible)
            counts[row] = min(counts[row], own) if row < count else 0
            ids[row, : counts[row]] = np.sort(random.permutation(own)[: counts[row]])
        far = Chosen(entries, jnp.asarray(ids), jnp.asarray(counts, jnp.int32))
    elif kind == "visible":
        far = Visible(entries, ratio)
    elif kind == "block":
        far = Block(noise(rows, spec.width).astype(spec.type).at[count:].set(1e4))
    table = turn_table(length + jnp.arange(rows), 10000.0 ** -(np.arange(0, spec.rope, 2) / spec.rope))
    q = Columns(partials, side, spec.heads * spec.width)
    return q, table, noise(spec.heads), jnp.asarray(ring, spec.type), jnp.int32(length), jnp.int32(count), far


def tile(splits=2, heads=2, keys=16, tiles=1):
    return {
        "heads": heads, "keys": keys, "splits": splits, "tiles": tiles, "warps": 4, "stages": 2
    }  # fmt: skip


def attend(operands, spec, **choice):
    counters = device_barrier.counters(ROWS * spec.heads)
    out, counters = kernels.attend(*operands, counters, spec, tile=tile(**choice))
    assert not np.any(np.asarray(counters)), "counters are left at zero"
    return np.asarray(out, np.float32)


def check(kind, spec, length, count, **choice):
    operands = case(kind, spec, length, count)
    expected = np.asarray(REFERENCE(*operands, spec), np.float32)
    found = attend(operands, spec, **choice)
    live = slice(0, count)
    np.testing.assert_allclose(found[live], expected[live], atol=TOLERANCE[spec.dtype], rtol=0)
    assert np.all(found[count:] == 0)


def test_interpreted():
    assert launch.INTERPRETED


@pytest.mark.parametrize("kind,length,count", BOUNDARIES)
def test_every_kind_of_keys_at_boundaries(kind, length, count):
    check(kind, spec(), length, count)


def test_float32_is_exact_up_to_summation_order():
    check("chosen", spec("float32", norm=False), 61, 4)
    check("visible", spec("float32"), 61, 8, splits=1, keys=8)


def test_more_parts_than_key_tiles():
    check("none", spec(norm=False), 2, 3, splits=4)


@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_rows_of_one_pass_may_have_different_numbers_of_parts(tiles):
    """With 16 keys a tile and rows of one or two near tiles and up to two far ones."""
    check("visible", spec(), 12, 8, splits=4, tiles=tiles, keys=8)


def test_several_blocks_of_heads_and_a_width_that_is_no_power_of_two():
    check("chosen", spec(width=24), 45, 8, heads=1, keys=32)


def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it():
    q, table, sink, ring, length, count, far = case("visible", spec(), 29, 8)
    whole = attend((q, table, sink, ring, length, count, far), spec())
    other = Columns(q.partials.at[:, 3:].set(7.0), q.first, q.width)
    found = attend((other, table, sink, ring, length, jnp.int32(3), far), spec())
    np.testing.assert_array_equal(found[:3], whole[:3])


def test_rows_of_a_drafter_block_may_be_fewer_than_eight():
    operands = case("block", spec(), 40, 3, rows=5)
    found = attend(operands, spec())
    expected = np.asarray(REFERENCE(*operands, spec()), np.float32)
    np.testing.assert_allclose(found[:3], expected[:3], atol=TOLERANCE["bfloat16"], rtol=0)
