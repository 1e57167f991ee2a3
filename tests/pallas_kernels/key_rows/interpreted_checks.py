"""The fused cache writes against their meaning, in Triton's interpreter at reduced shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch
from pallas_kernels.key_rows import kernels, reference, specs
from pallas_kernels.key_rows.reference import Caches, Compressor, LatentIndex, Rows
from pallas_kernels.key_rows.specs import FP4_GROUPS, FP8_BLOCKS, PoolSpec, RowSpec
from pallas_kernels.rows import Columns, turn_table

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
# Without rounding only the order of sums and the exponential differ.
EXACT_TOLERANCE = 1e-5
# Last bits that differ move a value across a rounding edge now and then; it then lands one step further. A step of
# E2M1 is at most half of the value.
MOST_MOVED, LARGEST_STEP = 0.01, 0.5


REFERENCE = jax.jit(reference.write, static_argnums=(4, 5))  # one compilation for all cases of a kind


def turns(positions, rope):
    return turn_table(positions, 10000.0 ** -(np.arange(0, rope, 2) / rope))


def case(spec, pool, length, count, seed=0, rows=ROWS):
    """Operands of `write` after `length` positions; the caches hold noise, as stale ones would."""
    random = np.random.default_rng(seed)

    def noise(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape).astype(np.float32), dtype)

    def product(width, first=4):
        return Columns(noise(SPLITS, rows, first + width + 8), first, width)

    both = noise(SPLITS, rows, LATENT + spec.width)
    table = turns(length + jnp.arange(rows), spec.rope)
    given = Rows(
        Columns(both, LATENT, spec.width), noise(spec.width, dtype=spec.type), table,
        Columns(both, 0, LATENT), noise(LATENT, dtype=spec.type),
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
    found, latent = kernels.write(*operands)
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
    whole, _ = kernels.write(*operands)
    first, _ = kernels.write(rows, caches, length, jnp.int32(3), spec, pool, compressor, index)

    def later(columns):
        return dataclasses.replace(columns, partials=jnp.roll(columns.partials, -3, axis=1))

    def shifted(item):
        start, closing = 8, pool.closing(ROWS)
        turned = pool.ratio * (start // pool.ratio + jnp.arange(closing))
        table = turns(turned, 2 * item.table.shape[2])
        return dataclasses.replace(item, value=later(item.value), gate=later(item.gate), table=table)

    rest = Rows(later(rows.kv), rows.weight, turns(8 + jnp.arange(ROWS), spec.rope))
    second, _ = kernels.write(
        rest, first, jnp.int32(8), jnp.int32(5), spec, pool, shifted(compressor), shifted(index)
    )
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(np.asarray(getattr(second, name)), np.asarray(value), err_msg=name)


def test_rows_of_a_drafter_block():
    rows, *_ = case(V4, None, 40, 8, rows=5)
    found, latent = kernels.block_rows(rows, V4)
    expected = reference.window_rows(rows, V4)
    same(found, expected, np.full(found.shape, np.nan), V4, "block rows")


def test_real_specs_are_consistent():
    for spec in (specs.V4_FLASH, specs.V41_FLASH, specs.DEMO):
        assert spec.rounded % spec.block == 0
