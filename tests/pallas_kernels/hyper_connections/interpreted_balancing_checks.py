"""The two launches of a balancing against their meaning, in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hyper_connections import balancing


@pytest.mark.parametrize("tokens,size,iterations", [(1, 4, 20), (64, 4, 2), (100, 4, 3), (5, 2, 1)])
def test_launches(tokens, size, iterations):
    random = np.random.default_rng(tokens)
    given = (
        jax.nn.softmax(jnp.asarray(3 * random.normal(size=(tokens, size, size)).astype(np.float32))) + 1e-6
    )
    slope = jnp.asarray(random.normal(size=given.shape).astype(np.float32))
    made, factors = balancing.forward_launch(given, iterations, 1e-6)
    expected, expected_factors = balancing.forward_reference(given, iterations, 1e-6)
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    np.testing.assert_allclose(factors, expected_factors, rtol=1e-6)
    np.testing.assert_allclose(
        balancing.backward_launch(made, factors, slope),
        balancing.backward_reference(expected, expected_factors, slope),
        rtol=2e-5, atol=2e-5,
    )  # fmt: skip
