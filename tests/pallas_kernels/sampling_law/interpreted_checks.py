"""The fused laws of rows against their meaning, in Triton's interpreter, part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device_barrier
from pallas_kernels.sampling_law import fused, reference
from pallas_kernels.sampling_law.reference import Filters

# Sums of a few hundred terms in another order.
TOLERANCE = 1e-5
REFERENCE = jax.jit(reference.laws)
# Top-k, top-p and min-p.
FILTERS = [(0, 1.0, 0.0), (0, 1.0, 0.05), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.0, 0.0), (20, 0.8, 0.02)]


def made(logits, top_k, top_p, min_p, programs, temperature=1.5):
    filters = Filters(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))
    found, _ = fused.laws(logits, filters, device_barrier.counters(fused.COUNTER_LINES), programs)
    return found, REFERENCE(logits, filters)


@pytest.mark.parametrize("top_k,top_p,min_p", FILTERS)
def test_laws(top_k, top_p, min_p):
    """Two rows of a vocabulary that ends inside a slice of many blocks."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1000)).astype(np.float32)) * 3
    found, expected = made(logits, top_k, top_p, min_p, 4)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_of_a_whole_pass_do_not_meet():
    """Eight rows of other values each, one slice a block; one row forbids most tokens."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(8, 96)).astype(np.float32) * np.arange(1, 9, dtype=np.float32)[:, None]
    logits[3, 2:] = -np.inf
    found, expected = made(jnp.asarray(logits), 0, 0.7, 0.0, 96)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("top_k,top_p", [(40, 1.0), (0, 0.5), (400, 0.5)])
def test_of_equal_tokens_the_lowest_ids_stay(top_k, top_p):
    values = jnp.asarray([0.25, -0.0, 0.5])[jnp.arange(1000) % 3]
    found, expected = made(values[None], top_k, top_p, 0.0, 2)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
