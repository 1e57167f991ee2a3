"""The fused output projection, instruction by instruction, against its reference. Run by test_interpreted.py."""

import expert_cases
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import device_barrier, tuning
from pallas_kernels.attention_output import fused, reference
from pallas_kernels.dense import packing

ptx_emulator.teach_interpreter()

# A sum on a rounding edge of the latent goes either way; one of its columns then moves by a step of E4M3.
ROUNDED_TOLERANCE, EXACT_TOLERANCE = 2e-2, 1e-5


def heads(columns, dtype, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(8, columns)), jnp.float32).astype(dtype)


def matrix(seed, n, k, block):
    return packing.pack_fp8([expert_cases.fp8(np.random.default_rng(seed), n, k, block)], block)


def project(x, first, second, block, tile=None, **options):
    width, output = first.words.shape[0] * 32, second.words.shape[0] * 32
    counters = device_barrier.counters(fused.counter_lines(width, options["round_block"]))
    with tuning.trying("attention_output", tuning.by_shape(width, output), tile or {}):
        found, left = fused.project(x, first, second, counters, scale_block=block, **options)
    assert not np.any(left), "counters are left at zero"
    return np.asarray(found).sum(0)


@pytest.mark.parametrize(
    ("width", "columns", "output", "groups", "block", "rounding", "dtype", "held"),
    [
        (512, 128, 64, 4, 128, 128, jnp.bfloat16, 0),  # four tiles a rounding block
        (512, 128, 32, 4, 128, 128, jnp.bfloat16, 1),  # half of a whole turn in registers
        (512, 128, 32, 1, 32, 32, jnp.bfloat16, 2),  # all of it, and a block a tile
        (
            64,
            512,
            32,
            2,
            32,
            32,
            jnp.float32,
            1,
        ),  # two shares of the first product; no whole turn in the second
        (64, 128, 32, 1, 32, 0, jnp.bfloat16, 1),  # nothing is rounded as activations
        (64, 128, 32, 1, 32, 0, jnp.float32, 1),
    ],
)
def test_both_products(width, columns, output, groups, block, rounding, dtype, held):
    x = heads(groups * columns, dtype)
    first, second = matrix(2, width, columns, block), matrix(3, output, width, block)
    options = dict(groups=groups, round_block=rounding, dtype=dtype)
    found = project(x, first, second, block, {"held": held}, **options)
    expected = np.asarray(reference.project(x, first, second, **options))[0]
    bound = EXACT_TOLERANCE if not rounding and dtype == jnp.float32 else ROUNDED_TOLERANCE
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


WALKS = (
    {"each": 2, "second_each": 2},  # half a rounding block; the second product of few programs
    {"splits": 2, "each": 4, "second_splits": 1, "second_each": 4},  # a whole one, its columns in two shares
    {"splits": 2, "each": 4},  # the second product one tile a program
    {"each": 1, "second_each": 4},  # and the first
)


@pytest.mark.parametrize("tile", WALKS)
@pytest.mark.parametrize(("rounding", "dtype"), [(128, jnp.bfloat16), (0, jnp.float32)])
def test_programs_that_walk_over_tiles(tile, rounding, dtype):
    columns = 512 * tile.get("splits", 1)
    x = heads(2 * columns, dtype)
    first, second = matrix(2, 512, columns, 128), matrix(3, 128, 512, 128)
    options = dict(groups=2, round_block=rounding, dtype=dtype)
    found = project(x, first, second, 128, {"warps": 4} | tile, **options)
    expected = np.asarray(reference.project(x, first, second, **options))[0]
    bound = ROUNDED_TOLERANCE if rounding else EXACT_TOLERANCE
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


def test_rows_do_not_see_each_other():
    x, first, second = heads(256, jnp.bfloat16), matrix(2, 64, 256, 32), matrix(3, 32, 64, 32)
    options = dict(groups=1, round_block=32, dtype=jnp.bfloat16)
    whole = project(x, first, second, 32, **options)
    other = project(x.at[3].set(jnp.nan), first, second, 32, **options)
    rest = np.arange(8) != 3
    np.testing.assert_array_equal(whole[rest], other[rest])


def test_shapes_are_checked():
    x, first, second = heads(256, jnp.bfloat16), matrix(2, 64, 256, 32), matrix(3, 32, 64, 32)
    given = dict(groups=1, scale_block=32, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="64 columns in rounding blocks of 128"):
        fused.project(x, first, second, device_barrier.counters(2), round_block=128, **given)
    with pytest.raises(ValueError, match="32 counters, expected 2 lines"):
        fused.project(x, first, second, device_barrier.counters(1), round_block=32, **given)
