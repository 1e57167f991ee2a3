"""Sinkhorn balancing of small positive matrices, with a gradient that takes one launch on a GPU.

Knows: the alternating normalisation, its derivative, and how both are launched for any batch. Does not know: where the
matrices come from (reference.py and model/hyper_connections.py have the whole mixing).

Where nothing is differentiated, this is a loop in plain JAX. Differentiated, XLA makes a dozen launches an iteration of
that loop, on matrices of S * S numbers; so training on a GPU takes one kernel forwards and one backwards instead.

Half a step divides M by its sums s over one axis: N = M / (s + eps). With G the gradient of N, that of M is
(G - sum(G * N)) / (s + eps), the sum over the same axis.
"""

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import launch

_TOKENS = 64  # of a program


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def balanced(matrices: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Positive float32 [T, S, S] after 2 * iterations - 1 normalisations: columns, then rows and columns in turn."""

    def columns(m):
        return m / (jnp.sum(m, axis=1, keepdims=True) + eps)

    def normalise(_, m):
        return columns(m / (jnp.sum(m, axis=2, keepdims=True) + eps))

    return jax.lax.fori_loop(0, iterations - 1, normalise, columns(matrices))


def _forward(
    matrices: jax.Array, iterations: int, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    body = forward_launch if _has_kernels() else forward_reference
    kept = _for_any_batch(functools.partial(body, iterations=iterations, eps=eps))(matrices)
    return kept[0], kept


def _backward(
    iterations: int, eps: float, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array]:
    del iterations, eps  # the factors say all
    return (_for_any_batch(backward_launch if _has_kernels() else backward_reference)(*kept, gradient),)


balanced.defvjp(_forward, _backward)


def forward_reference(matrices: jax.Array, iterations: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """(balanced [T, S, S], the factors of all half steps [T, 2 * iterations - 1, S]) of positive [T, S, S]."""
    factors = []
    for half in range(2 * iterations - 1):
        axis = 1 + half % 2
        factor = 1 / (jnp.sum(matrices, axis=axis) + eps)
        matrices = matrices * jnp.expand_dims(factor, axis)
        factors.append(factor)
    return matrices, jnp.stack(factors, axis=1)


def backward_reference(balanced: jax.Array, factors: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient [T, S, S] of the first matrices, from that of the balanced ones and what came forwards."""
    for half in reversed(range(factors.shape[1])):
        axis = 1 + half % 2
        factor = jnp.expand_dims(factors[:, half], axis)
        gradient = (gradient - jnp.sum(gradient * balanced, axis=axis, keepdims=True)) * factor
        balanced = balanced / factor
    return gradient


def forward_launch(matrices: jax.Array, iterations: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """`forward_reference` in one launch."""
    from pallas_kernels.hyper_connections import balancing_kernels

    tokens, size, _ = matrices.shape
    factors = jax.ShapeDtypeStruct((tokens, 2 * iterations - 1, size), jnp.float32)
    made, factors = launch.call(
        balancing_kernels.balance,
        matrices,
        grid=(-(-tokens // _TOKENS),),
        outputs=[jax.ShapeDtypeStruct(matrices.shape, jnp.float32), factors],
        ITERATIONS=iterations,
        EPS=eps,
        T=tokens,
        SIZE=size,
        TOKENS=_TOKENS,
    )
    return made, factors


def backward_launch(balanced: jax.Array, factors: jax.Array, gradient: jax.Array) -> jax.Array:
    """`backward_reference` in one launch."""
    from pallas_kernels.hyper_connections import balancing_kernels

    tokens, size, _ = balanced.shape
    return launch.call(
        balancing_kernels.balance_gradient,
        balanced,
        factors,
        gradient,
        grid=(-(-tokens // _TOKENS),),
        outputs=[jax.ShapeDtypeStruct(balanced.shape, jnp.float32)],
        ITERATIONS=(factors.shape[1] + 1) // 2,
        T=tokens,
        SIZE=size,
        TOKENS=_TOKENS,
    )[0]


def _has_kernels() -> bool:
    return launch.capability() is not None and importlib.util.find_spec("jax_triton") is not None


def _for_any_batch(body: Callable) -> Callable:
    """`body`, for which axes that `vmap` adds are more tokens: a kernel has no rule of its own for them."""
    call = jax.custom_batching.custom_vmap(body)

    @call.def_vmap
    def batched(count, is_batched, *operands):
        whole = [
            operand if own else jnp.broadcast_to(operand, (count, *operand.shape))
            for operand, own in zip(operands, is_batched, strict=True)
        ]
        results = call(*[operand.reshape(-1, *operand.shape[2:]) for operand in whole])
        return (
            jax.tree.map(lambda result: result.reshape(count, -1, *result.shape[1:]), results),
            jax.tree.map(lambda _: True, results),
        )

    return call
