"""Manifold-constrained hyper-connections: S parallel residual streams mixed by a near-doubly-stochastic matrix.

Knows: the coefficients of one sublayer, how streams collapse into its input and how its output is spread
back. Does not know: which sublayer it wraps, or whether the collapse weights come from this sublayer (V4) or
from its predecessor (V4.1); the backbone decides that.

Source: DeepSeek inference/model.py (`hc_*`), and its Sinkhorn kernel.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from pallas_kernels.hyper_connections.balancing import balanced
from v4flash.config import ModelConfig
from v4flash.model.numerics import Numerics, inverse_rms


def split_coefficients(
    mixes: jax.Array, scale: jax.Array, base: jax.Array, streams: int, iterations: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turns raw mixes [T, (2 + S) S] float32 into (pre [T, S], post [T, S], comb [T, S, S]).

    `comb[t, j, k]` is the weight of old stream j in new stream k: softmax over k, plus eps, then alternating
    column and row normalisation, 2 * iterations - 1 of them, columns first.
    """
    pre = jax.nn.sigmoid(mixes[:, :streams] * scale[0] + base[:streams]) + eps
    post = 2 * jax.nn.sigmoid(mixes[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
    return pre, post, balanced(jax.nn.softmax(comb, axis=2) + eps, iterations, eps)


def collapse(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_s pre[t, s] * streams[t, s] in float32, returned in the streams' type: [T, D]."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def spread(post: jax.Array, comb: jax.Array, output: jax.Array, streams: jax.Array) -> jax.Array:
    """New streams [T, S, D]: post[t, k] * output[t] + sum_j comb[t, j, k] * streams[t, j], in float32."""
    mixed = jnp.sum(comb[..., None] * streams.astype(jnp.float32)[:, :, None], axis=1)
    return (post[..., None] * output.astype(jnp.float32)[:, None] + mixed).astype(streams.dtype)


class HyperConnection(nnx.Module):
    """Coefficients of one sublayer; parameters fn [(2+S)S, S*D], base [(2+S)S], scale [3], all float32."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        self.fn = nnx.Param(jnp.zeros((config.hc_width, config.hc_mult * config.hidden_size), jnp.float32))
        self.base = nnx.Param(jnp.zeros((config.hc_width,), jnp.float32))
        self.scale = nnx.Param(jnp.zeros((3,), jnp.float32))
        self.config = config
        self.numerics = numerics

    def __call__(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(pre [T, S], post [T, S], comb [T, S, S]) from streams [T, S, D]."""
        config = self.config
        mixes = _projected(self.numerics, streams, self.fn[...], config.rms_norm_eps)
        return split_coefficients(
            mixes, self.scale[...], self.base[...], config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
        )


class HyperHead(nnx.Module):
    """The learned final collapse of V4; parameters fn [S, S*D], base [S], scale [1], all float32."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        self.fn = nnx.Param(jnp.zeros((config.hc_mult, config.hc_mult * config.hidden_size), jnp.float32))
        self.base = nnx.Param(jnp.zeros((config.hc_mult,), jnp.float32))
        self.scale = nnx.Param(jnp.zeros((1,), jnp.float32))
        self.config = config
        self.numerics = numerics

    def __call__(self, streams: jax.Array) -> jax.Array:
        """Collapsed hidden [T, D] from streams [T, S, D]."""
        mixes = _projected(self.numerics, streams, self.fn[...], self.config.rms_norm_eps)
        pre = jax.nn.sigmoid(mixes * self.scale[...] + self.base[...]) + self.config.hc_eps
        return collapse(pre, streams)


def _projected(numerics: Numerics, streams: jax.Array, fn: jax.Array, eps: float) -> jax.Array:
    flat = streams.astype(jnp.float32).reshape(streams.shape[0], -1)
    return numerics.exact_product("tk,mk->tm", flat, fn) * inverse_rms(flat, eps)
