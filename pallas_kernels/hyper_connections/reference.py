"""What one boundary between two sublayers means, in plain jax.numpy.

Knows: how the output of the sublayer before is put together and spread into the streams, the coefficients of the
sublayer behind, its collapsed, normed and rounded input, and what the first and the last boundary do instead. Does
not know: which sublayers these are, or how the fused body shares the work.

    partials --sum--> output --spread(post, comb)--> streams --project--> coefficients --Sinkhorn--> pre, post, comb
                                                     streams --collapse(pre)--> hidden --norm--> x --round--> rounded

Coefficients travel as one float32 array [R, (2 + S) S]: pre [S], post [S], then comb [S, S] row by row, where
comb[j, k] weighs old stream j in new stream k.

Source: DeepSeek inference/model.py (`hc_*`) and its Sinkhorn kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.hyper_connections.balancing import balanced
from pallas_kernels.hyper_connections.specs import BoundarySpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a sublayer, still in parts: those of a split product, or those of experts.

    Attributes:
      partials: float32 [P, R, D] or None, summed in order, then rounded to the model's type.
      experts: [R, P, D] or None, in the model's type: summed in float32 and in order, the last one (of the shared
        expert) added at the end, then rounded. The others are read in live rows only.
      count: int32 [] or None, live rows of `experts`.
    """

    partials: jax.Array | None = None
    experts: jax.Array | None = None
    count: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projection:
    """Parameters of one hyper-connection, float32: fn [M, S * D], base [M], scale [3] (final head: M = S, [1]).

    base and scale may be longer: what lies behind their numbers is not read.
    """

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Boundary:
    """What a boundary hands to the sublayer behind it and to the next boundary.

    Attributes:
      streams: [R, S, D] in the model's type.
      coefficients: float32 [R, M], see the module; None behind the last layer.
      hidden: [R, D], collapsed streams before the norm; None where nobody needs them.
      x: [R, D], normed, in the model's type.
      rounded: float16 [R, D], x as FP8 products read it.
      tap: [R, D], the mean of the streams; None unless asked for.
    """

    streams: jax.Array
    coefficients: jax.Array | None
    hidden: jax.Array | None
    x: jax.Array
    rounded: jax.Array
    tap: jax.Array | None


def output_rows(output: Output, dtype) -> jax.Array:
    """The sublayer's output [R, D] in the model's type."""
    if output.experts is None:
        return jnp.sum(output.partials, axis=0).astype(dtype)
    live = (jnp.arange(output.experts.shape[0]) < output.count)[:, None, None]
    routed, shared = output.experts[:, :-1], output.experts[:, -1]
    routed = jnp.sum(jnp.where(live, routed.astype(jnp.float32), 0.0), axis=1)
    return (routed + shared.astype(jnp.float32)).astype(dtype)


def split(coefficients: jax.Array, streams: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(pre [R, S], post [R, S], comb [R, S, S]) of a coefficient array."""
    pre, post, comb = jnp.split(coefficients, (streams, 2 * streams), axis=1)
    return pre, post, comb.reshape(-1, streams, streams)


def first_coefficients(rows: int, spec: BoundarySpec) -> jax.Array:
    """What the first boundary takes for its predecessor's: delayed mixing starts from stream 0 alone."""
    return jnp.zeros((rows, spec.mixes), jnp.float32).at[:, 0].set(1.0)


def embedded(table: jax.Array, tokens: jax.Array, spec: BoundarySpec) -> jax.Array:
    """Equal streams [R, S, D] of the tokens' rows in `table` [V, D]."""
    rows = table[tokens].astype(spec.type)
    return jnp.broadcast_to(rows[:, None], (rows.shape[0], spec.streams, rows.shape[1]))


def spread(coefficients: jax.Array, output: jax.Array, streams: jax.Array) -> jax.Array:
    """New streams [R, S, D]: post[k] * output + sum_j comb[j, k] * streams[j], in float32."""
    _, post, comb = split(coefficients, streams.shape[1])
    mixed = jnp.sum(comb[..., None] * streams.astype(jnp.float32)[:, :, None], axis=1)
    return (post[..., None] * output.astype(jnp.float32)[:, None] + mixed).astype(streams.dtype)


def collapse(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_s pre[s] * streams[s] in float32, returned in the streams' type: [R, D]."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """rsqrt(mean(x^2) + eps) over the last axis (kept), float32; finite for all-zero rows."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return jax.lax.rsqrt(jnp.maximum(mean + eps, jnp.finfo(jnp.float32).tiny))


def mixes(projection: Projection, streams: jax.Array, spec: BoundarySpec) -> jax.Array:
    """The raw projection float32 [R, M] of the flattened streams, divided by their root mean square."""
    flat = streams.astype(jnp.float32).reshape(streams.shape[0], -1)
    product = jnp.einsum("rk,mk->rm", flat, projection.fn, precision=jax.lax.Precision.HIGHEST)
    return product * inverse_rms(flat, spec.norm_eps)


def sublayer_coefficients(projection: Projection, streams: jax.Array, spec: BoundarySpec) -> jax.Array:
    """Coefficients [R, M]: two sigmoids, and a softmax made nearly doubly stochastic by Sinkhorn steps."""
    s, eps = spec.streams, spec.mix_eps
    raw, base, scale = mixes(projection, streams, spec), projection.base[: spec.mixes], projection.scale
    pre = jax.nn.sigmoid(raw[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * jax.nn.sigmoid(raw[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (raw[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(-1, s, s)
    comb = balanced(jax.nn.softmax(comb, axis=2) + eps, spec.iterations, eps)
    return jnp.concatenate([pre, post, comb.reshape(comb.shape[0], -1)], axis=1)


def head_weights(projection: Projection, streams: jax.Array, spec: BoundarySpec) -> jax.Array:
    """Weights [R, S] of the learned final collapse."""
    raw = mixes(projection, streams, spec)
    return jax.nn.sigmoid(raw * projection.scale[0] + projection.base[: spec.streams]) + spec.mix_eps


def normed(hidden: jax.Array, weight: jax.Array, spec: BoundarySpec) -> jax.Array:
    """Weighted RMS norm in float32, returned in hidden's type."""
    wide = hidden.astype(jnp.float32)
    return (wide * inverse_rms(wide, spec.norm_eps) * weight.astype(jnp.float32)).astype(hidden.dtype)


def round_input(x: jax.Array, spec: BoundarySpec) -> jax.Array:
    """x as FP8 products read it, float16 [R, D]."""
    if spec.block:
        x = formats.fp8_round_trip(x, min(spec.block, x.shape[-1]))
    return x.astype(jnp.float16)


def boundary(
    spec: BoundarySpec,
    streams: jax.Array,
    norm: jax.Array,
    projection: Projection | None,
    coefficients: jax.Array | None = None,
    output: Output | None = None,
    *,
    last: bool = False,
    tap: bool = False,
) -> Boundary:
    """One boundary.

    Args:
      streams: [R, S, D] as the sublayer before found them.
      norm: weight [D] of the norm in front of the sublayer behind.
      projection: of the sublayer behind; behind the last layer that of the final head, or None with delayed mixing.
      coefficients: [R, M] from the boundary before.
      output: of the sublayer before; None takes the streams as they are.
      last: the boundary behind the last layer.
      tap: whether the mean of the streams is wanted.
    """
    if output is not None:
        streams = spread(coefficients, output_rows(output, spec.type), streams)
    own = None if last else sublayer_coefficients(projection, streams, spec)
    if spec.delayed:
        pre = coefficients[:, : spec.streams]
    else:
        pre = head_weights(projection, streams, spec) if last else own[:, : spec.streams]
    hidden = collapse(pre, streams)
    x = normed(hidden, norm, spec)
    mean = jnp.mean(streams.astype(jnp.float32), axis=1).astype(spec.type) if tap else None
    return Boundary(streams, own, hidden if last else None, x, round_input(x, spec), mean)
