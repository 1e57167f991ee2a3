"""The dense kernels, instruction by instruction, against their reference. Run by test_interpreted.py."""

import expert_cases
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels.dense import fused, packing, reference

ptx_emulator.teach_interpreter()

# float32 sums of the same products in another order.
SUM_TOLERANCE = 1e-5


def _close(found, expected) -> None:
    found, expected = np.asarray(found).sum(axis=0), np.asarray(expected)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=SUM_TOLERANCE * np.abs(expected).max())


def _rows(seed: int, columns: int, dtype) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(8, columns)), jnp.float32).astype(dtype)


def _matrix(seed: int, n: int, k: int, block: int):
    return packing.pack_fp8([expert_cases.fp8(np.random.default_rng(seed), n, k, block)], block)


@pytest.mark.parametrize(
    ("n", "k", "block", "groups", "dtype", "options"),
    [
        (32, 128, 128, 1, jnp.float16, {}),  # one tile, one chunk: three warps have nothing to do
        (64, 640, 32, 1, jnp.float16, dict(splits=1, fenced=True)),  # a turn and a tail
        (32, 1152, 128, 1, jnp.float16, dict(splits=1, warps=4)),  # two turns and a tail
        (64, 1024, 128, 1, jnp.float16, dict(splits=1, warps=8)),
        (64, 1056, 32, 1, jnp.float16, dict(splits=2)),  # a last chunk of one block
        (64, 256, 32, 2, jnp.bfloat16, {}),
        (64, 256, 32, 2, jnp.float32, {}),
    ],
)
def test_fp8_product(n, k, block, groups, dtype, options):
    x, matrix = _rows(1, groups * k, dtype), _matrix(2, n, k, block)
    found = fused.product(x, matrix, scale_block=block, groups=groups, **options)
    _close(found, reference.product(x, matrix, groups=groups))


@pytest.mark.parametrize(
    ("n", "k", "dtype", "splits"),
    [
        (32, 64, jnp.bfloat16, None),
        (64, 640, jnp.bfloat16, 2),
        (32, 256, jnp.float32, None),
        (32, 576, jnp.bfloat16, 1),
    ],
)
def test_exact_product(n, k, dtype, splits):
    x, weight = _rows(3, k, dtype), _rows(4, k, jnp.bfloat16)
    weight = jnp.tile(weight, (n // 8, 1)) * jnp.arange(1, n + 1)[:, None].astype(jnp.bfloat16)
    _close(fused.exact_product(x, weight, splits=splits), reference.exact_product(x, weight))


def test_rows_do_not_see_each_other():
    matrix = _matrix(9, 32, 256, 32)
    x = _rows(10, 256, jnp.float16)
    first = fused.product(x, matrix, scale_block=32)
    second = fused.product(x.at[3].set(jnp.nan), matrix, scale_block=32)
    rest = np.arange(8) != 3
    assert np.array_equal(np.asarray(first)[:, rest], np.asarray(second)[:, rest])


def test_shapes_are_checked():
    matrix = _matrix(11, 64, 256, 32)
    with pytest.raises(ValueError, match="packed words have shape"):
        fused.product(_rows(0, 512, jnp.float16), matrix, scale_block=32)
    with pytest.raises(ValueError, match=r"activations have shape \(4, 256\)"):
        fused.product(_rows(0, 256, jnp.float16)[:4], matrix, scale_block=32)
    with pytest.raises(ValueError, match="expected bfloat16 rows in multiples of 32"):
        fused.exact_product(_rows(0, 256, jnp.bfloat16), jnp.zeros((40, 256), jnp.bfloat16))
