"""The balancing that is differentiated: its derivative, its batches, and its launches."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hyper_connections import balancing
from v4flash.model.hyper_connections import split_coefficients

EPS = 1e-6
# Steps backwards divide by what steps forwards multiplied with: a few roundings of 2^-24 a step, gradients near 10.
TOLERANCE = 3e-5


def matrices(tokens: int, size: int = 4) -> jax.Array:
    """Positive, of very different sizes, some almost of one entry a row."""
    random = np.random.default_rng(tokens)
    return jax.nn.softmax(jnp.asarray(4 * random.normal(size=(tokens, size, size)).astype(np.float32))) + EPS


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_gradient_is_that_of_the_plain_loop(iterations):
    given, slope = matrices(37), jnp.asarray(np.random.default_rng(1).normal(size=(37, 4, 4)), jnp.float32)
    plain, pull = jax.vjp(lambda m: balancing.balanced.fun(m, iterations, EPS), given)
    found, pull_found = jax.vjp(lambda m: balancing.balanced(m, iterations, EPS), given)
    np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pull_found(slope)[0], pull(slope)[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_batches_of_batches_are_more_tokens():
    given = matrices(24)

    def gradient(m):
        return jax.grad(lambda m: jnp.sum(balancing.balanced(m, 4, EPS)[:, 0, 1] ** 2))(m)

    nested = jax.vmap(jax.vmap(gradient))(given.reshape(2, 3, 4, 4, 4))
    np.testing.assert_allclose(nested.reshape(24, 4, 4), gradient(given), rtol=1e-6, atol=1e-7)


def test_nothing_changes_where_nothing_is_differentiated():
    mixes = jnp.asarray(np.random.default_rng(2).normal(size=(8, 24)), jnp.float32)
    ones, zeros = jnp.ones(3), jnp.zeros(24)
    comb = split_coefficients(mixes, ones, zeros, 4, 20, EPS)[2]
    start = jax.nn.softmax(mixes[:, 8:].reshape(-1, 4, 4), axis=2) + EPS
    np.testing.assert_allclose(comb, balancing.forward_reference(start, 20, EPS)[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jnp.sum(comb, axis=1), 1, atol=1e-5)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_balancing_checks.py"))


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
def test_nothing_spills(capability):
    given = jax.ShapeDtypeStruct((16384, 4, 4), jnp.float32)

    def both(matrices, gradient):
        return balancing.backward_launch(*balancing.forward_launch(matrices, 20, EPS), gradient)

    kernels = compile_for_gpu.kernels(both, given, given, capability=capability)
    assert len(kernels) == 2
    assert not any(kernel.spilled_bytes for kernel in kernels)
