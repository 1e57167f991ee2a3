"""The fused cache writes against their meaning, in Triton's interpreter at reduced shapes."""

import dataclasses

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import device_barrier, launch, tuning
from pallas_kernels.dense import packing
from pallas_kernels.key_rows import fused, reference, specs
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import FP4_GROUPS, FP8_BLOCKS, PoolSpec, RowSpec
from pallas_kernels.rows import Columns, turn_table

ptx_emulator.teach_interpreter()

ROWS, LATENT, SPLITS = 8, 48, 2
V4 = RowSpec(width=32, rope=8, norm_eps=1e-6, rounded=24, block=8, latent_block=16)
V41 = RowSpec(width=32, rope=8, norm_eps=1e-20, rounded=32, block=32, latent_block=16)
EXACT = dataclasses.replace(V41, quantise=False, dtype="float32")
POOLS = {
    "ratio 4": (V4, PoolSpec(4, True, FP8_BLOCKS, index_width=32, index_rope=16, hadamard=True)),
    "ratio 128": (V4, PoolSpec(128, False, FP8_BLOCKS)),
    "ratio 2": (V41, PoolSpec(2, False, FP4_GROUPS, index_width=32, index_rope=8)),
    "ratio 1": (V41, PoolSpec(1, False, FP4_GROUPS, index_width=32, index_rope=8)),
    "exact ratio 4": (
        dataclasses.replace(V4, quantise=False, dtype="float32"),
        PoolSpec(4, True, FP8_BLOCKS, index_width=32, index_rope=16, hadamard=True),
    ),
    "exact ratio 2": (EXACT, PoolSpec(2, False, FP4_GROUPS, index_width=32, index_rope=8)),
}
# Wide enough for two programs an entry and an index key.
WIDE = (
    RowSpec(width=128, rope=16, norm_eps=1e-6, rounded=96, block=32, latent_block=32),
    PoolSpec(4, True, FP8_BLOCKS, index_width=128, index_rope=16, hadamard=True),
)
# Without rounding only the order of sums and the exponential differ.
EXACT_TOLERANCE = 1e-5
# Last bits that differ move a value across a rounding edge now and then; it then lands one step further. A step of
# E2M1 is at most half of the value.
MOST_MOVED, LARGEST_STEP = 0.01, 0.5


REFERENCE = jax.jit(reference.write, static_argnums=(4, 5))  # one compilation for all cases of a kind


def turns(positions, rope):
    return turn_table(positions, 10000.0 ** -(np.arange(0, rope, 2) / rope))


def case(spec, pool, length, count, seed=0, rows=ROWS, latent=LATENT):
    """Operands of `write` after `length` positions; the caches hold noise, as stale ones would."""
    random = np.random.default_rng(seed)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    def product(width, first=4):
        return Columns(noise(SPLITS, rows, first + width + 8), first, width)

    both = noise(SPLITS, rows, latent + spec.width)
    table = turns(length + jnp.arange(rows), spec.rope)
    given = Rows(
        Columns(both, latent, spec.width), noise(spec.width, dtype=spec.type), table,
        Columns(both, 0, latent), noise(latent, dtype=spec.type),
    )  # fmt: skip
    caches = dict(window=noise(24, spec.width, dtype=spec.type))
    compressor = index = None
    if pool is not None:
        halves, closing = 2 if pool.overlap else 1, pool.closing(rows)
        slots = -(-(halves * pool.ratio + rows - 1) // 8) * 8
        entries = 24  # one size for all cases: every new shape compiles the reference anew
        turned = pool.ratio * (length // pool.ratio + jnp.arange(closing))

        def make(width, rope):
            bias = noise(pool.ratio, halves * width) if pool.ratio >= 4 else None
            gate = product(halves * width) if pool.ratio > 1 else None
            return Compressor(
                product(halves * width, 12), gate, bias, noise(width, dtype=spec.type), turns(turned, rope)
            )

        compressor = make(spec.width, spec.rope)
        caches["entries"] = noise(entries, spec.width, dtype=spec.type)
        if pool.ratio > 1:
            caches["pending"] = noise(slots, 2, halves * spec.width)
        if pool.index_width:
            caches["index_keys"] = noise(entries, pool.index_width, dtype=spec.type)
            if pool.hadamard:
                index = make(pool.index_width, pool.index_rope)
                caches["index_pending"] = noise(slots, 2, halves * pool.index_width)
            else:
                index = LatentIndex(
                    noise(pool.index_width, spec.width, dtype=spec.type), noise(pool.index_width, dtype=spec.type),
                    turns(turned, pool.index_rope),
                )  # fmt: skip
    return given, Caches(**caches), jnp.int32(length), jnp.int32(count), spec, pool, compressor, index


def same(found, expected, before, spec, name):
    """What the reference leaves alone keeps its bits; what it writes agrees up to a rounding step."""
    found, expected, before = (np.asarray(x, np.float32) for x in (found, expected, before))
    written = expected != before
    np.testing.assert_array_equal(found[~written], before[~written], err_msg=name)
    if not spec.quantise or name.endswith("pending"):
        np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT_TOLERANCE, err_msg=name)
        return
    moved = found != expected
    assert np.sum(moved) <= max(1, MOST_MOVED * np.sum(written)), name
    np.testing.assert_allclose(found, expected, rtol=LARGEST_STEP, atol=1e-2, err_msg=name)


def check(operands):
    _, caches, _, _, spec, *_ = operands
    found, latent = fused.write(*operands)
    expected, expected_latent = REFERENCE(*operands)
    for name, before in vars(caches).items():
        if before is not None:
            same(getattr(found, name), getattr(expected, name), before, spec, name)
    assert latent.dtype == expected_latent.dtype
    same(latent, expected_latent, np.full(latent.shape, np.nan), spec, "latent")
    return found


def test_interpreted():
    assert launch.INTERPRETED


@pytest.mark.parametrize("length,count", [(0, 1), (20, 8), (23, 3)])
def test_window_rows(length, count):
    check(case(V4, None, length, count))


@pytest.mark.parametrize("name,length,count", [
    ("ratio 4", 0, 8), ("ratio 4", 1, 8), ("ratio 4", 2, 7), ("ratio 4", 3, 8), ("ratio 4", 7, 1),
    ("ratio 128", 121, 8), ("ratio 128", 255, 1),
    ("ratio 2", 0, 1), ("ratio 2", 1, 8), ("ratio 1", 9, 8), ("exact ratio 4", 10, 8), ("exact ratio 2", 3, 8),
])  # fmt: skip
def test_entries_that_close(name, length, count):
    check(case(*POOLS[name], length, count))


def test_sixteen_rows():
    check(case(*POOLS["ratio 128"], 121, 13, rows=16))


def test_bits_do_not_tell_how_a_pass_was_cut():
    """Eight rows at once, and three of them followed by the other five, leave equal caches."""
    operands = case(*POOLS["ratio 4"], 5, 8)
    rows, caches, length, _, spec, pool, compressor, index = operands
    whole, _ = fused.write(*operands)
    first, _ = fused.write(rows, caches, length, jnp.int32(3), spec, pool, compressor, index)

    def later(columns):
        return dataclasses.replace(columns, partials=jnp.roll(columns.partials, -3, axis=1))

    def shifted(item):
        start, closing = 8, pool.closing(ROWS)
        turned = pool.ratio * (start // pool.ratio + jnp.arange(closing))
        table = turns(turned, 2 * item.table.shape[2])
        return dataclasses.replace(item, value=later(item.value), gate=later(item.gate), table=table)

    rest = Rows(later(rows.kv), rows.weight, turns(8 + jnp.arange(ROWS), spec.rope))
    second, _ = fused.write(
        rest, first, jnp.int32(8), jnp.int32(5), spec, pool, shifted(compressor), shifted(index)
    )
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(np.asarray(getattr(second, name)), np.asarray(value), err_msg=name)


# Latents that fall to the other side of a rounding edge change a few products by a little.
QUERY_TOLERANCE = {True: 2e-2, False: 1e-5}


def same_queries(found, expected, spec):
    found, expected = np.asarray(found).sum(0), np.asarray(expected)[0]
    bound = QUERY_TOLERANCE[spec.quantise] * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def query_matrix(latent, tiles=2, block=32):
    return packing.pack_fp8([expert_cases.fp8(np.random.default_rng(7), 32 * tiles, latent, block)], block)


REFERENCE_QUERIES = jax.jit(reference.write_and_query, static_argnums=(4, 6))


@pytest.mark.parametrize("name,latent,length,count", [
    (None, 64, 20, 8),  # a product without a whole turn
    ("wide ratio 4", 512, 3, 8),  # and with one; two programs pool a part of each entry and index key
    ("wide ratio 4", 64, 2, 1),  # nothing closes
    ("ratio 128", 64, 121, 8), ("exact ratio 4", 64, 10, 8), ("exact ratio 2", 64, 3, 8),
])  # fmt: skip
def test_writes_and_queries_in_one_launch(name, latent, length, count):
    spec, pool = (V4, None) if name is None else WIDE if name == "wide ratio 4" else POOLS[name]
    operands = case(spec, pool, length, count, latent=latent)
    rows, caches, *_ = operands
    matrix, counters = query_matrix(latent), device_barrier.counters(fused.COUNTER_LINES)
    found, queries, counters = fused.write_and_query(
        *operands[:5], matrix, counters, *operands[5:], scale_block=32
    )
    expected, expected_queries = REFERENCE_QUERIES(*operands[:5], matrix, *operands[5:])
    assert not np.any(counters)
    for part, before in vars(caches).items():
        if before is not None:
            same(getattr(found, part), getattr(expected, part), before, spec, part)
    same_queries(queries, expected_queries, spec)


@pytest.mark.parametrize("each", [2, 4])
def test_query_programs_that_walk_over_tiles(each):
    """They have the bits of one program a tile."""
    rows, *_ = case(V4, None, 40, 8, latent=512)
    matrix, made = query_matrix(512, tiles=4), []
    for tile in ({"each": 1}, {"each": each}):
        with tuning.trying("key_rows", "128x512", tile):
            counters = device_barrier.counters(fused.COUNTER_LINES)
            _, queries, counters = fused.block_rows_and_query(rows, V4, matrix, counters, scale_block=32)
        assert not np.any(counters)
        made.append(np.asarray(queries))
    np.testing.assert_array_equal(*made)


def test_rows_and_queries_of_a_drafter_block():
    rows, *_ = case(V4, None, 40, 8, latent=64)
    matrix, counters = query_matrix(64), device_barrier.counters(fused.COUNTER_LINES)
    found, queries, counters = fused.block_rows_and_query(rows, V4, matrix, counters, scale_block=32)
    expected, expected_queries = reference.block_rows_and_query(rows, V4, matrix)
    assert not np.any(counters)
    same(found, expected, np.full(found.shape, np.nan), V4, "block rows")
    same_queries(queries, expected_queries, V4)


def test_too_few_counters_are_refused():
    rows, *_ = case(V4, None, 40, 8, latent=64)
    with pytest.raises(ValueError, match="32 counters and 0 entries"):
        fused.block_rows_and_query(rows, V4, query_matrix(64), device_barrier.counters(1), scale_block=32)


def test_real_specs_are_consistent():
    for spec in (specs.V4_FLASH, specs.V41_FLASH, specs.DEMO):
        assert spec.rounded % spec.block == 0
