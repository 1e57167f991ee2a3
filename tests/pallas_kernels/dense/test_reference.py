"""The dense products' reference on packed weights, and how activations become terms."""

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.dense import fused, packing, reference

# float32 sums of the same products in another order.
SUM_TOLERANCE = 1e-5


def test_joined_matrices_are_each_others_neighbours():
    rng = np.random.default_rng(0)
    matrices = [expert_cases.fp8(rng, n, 160, 32) for n in (64, 96, 40)]
    x = jnp.asarray(rng.normal(size=(8, 160)), jnp.float16)
    found = np.asarray(jax.jit(reference.product)(x, packing.pack_fp8(matrices, 32)))[0]
    weights = [np.asarray(formats.decode_fp8(*matrix, 32)) for matrix in matrices]
    expected = np.asarray(x, np.float32) @ np.concatenate(weights).T
    np.testing.assert_allclose(found[:, :200], expected, rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)
    assert found.shape == (8, 224) and not found[:, 200:].any()


def test_groups_see_their_own_columns():
    rng = np.random.default_rng(1)
    weight, scale = expert_cases.fp8(rng, 128, 96, 32)
    x = jnp.asarray(rng.normal(size=(8, 2 * 96)), jnp.bfloat16)
    found = np.asarray(reference.product(x, packing.pack_fp8([(weight, scale)], 32), groups=2))[0]
    wide = np.asarray(formats.decode_fp8(weight, scale, 32))
    for group in range(2):
        rows = slice(64 * group, 64 * group + 64)
        own = np.asarray(x, np.float32)[:, 96 * group : 96 * group + 96]
        np.testing.assert_allclose(found[:, rows], own @ wide[rows].T, rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)


def test_matrices_to_join_must_fill_tiles():
    matrix = expert_cases.fp8(np.random.default_rng(2), 40, 64, 32)
    with pytest.raises(ValueError, match="wkv has 40 rows, expected a multiple of 32"):
        packing.pack_fp8([matrix, matrix], 32, "wkv")
    with pytest.raises(ValueError, match="96 columns, expected a multiple of 64"):
        packing.join_bf16([jnp.zeros((8, 96))])


def test_bf16_matrices_are_padded_to_tiles():
    joined = packing.join_bf16([jnp.ones((40, 64)), jnp.full((8, 64), 2.0)])
    assert joined.shape == (64, 64) and joined.dtype == jnp.bfloat16
    assert np.asarray(joined[:, 0], np.float32).tolist() == [1.0] * 40 + [2.0] * 8 + [0.0] * 16


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_terms_add_up(magnitude):
    x = np.random.default_rng(3).normal(size=(8, 256)).astype(np.float32) * np.float32(magnitude)
    three = np.asarray(jax.jit(packing.bfloat_terms)(x), np.float64)
    assert three.shape == (3, 8, 256) and np.array_equal(three.sum(0), x.astype(np.float64))
    two = np.asarray(jax.jit(packing.half_terms)(x), np.float64)
    bound = np.maximum(2.0**-24, np.abs(x) * 2.0**-22)  # two times eleven bits; the least step of fp16
    assert two.shape == (2, 8, 256) and (np.abs(two.sum(0) - x) <= bound).all()
    plain = jnp.asarray(x, jnp.bfloat16)
    assert np.array_equal(packing.bfloat_terms(plain)[0], plain)
    assert packing.half_terms(plain).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("tiles", "chunks", "warps", "expected"),
    [(1024, 8, 8, 1), (128, 64, 8, 4), (48, 32, 4, 8), (56, 40, 4, 10), (8, 2, 4, 1), (1024, 10, 4, 1)],
)
def test_shares_of_the_columns(tiles, chunks, warps, expected):
    assert fused.shares(tiles, chunks, warps) == expected
