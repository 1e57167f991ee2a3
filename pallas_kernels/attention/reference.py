"""What the attention core means, in plain jax.numpy.

Knows: queries from an unsummed product (norm, rotation), which keys each row sees, the softmax with a sink, and
the rotation taken back from the output. Does not know: how keys were made or chosen.

    near keys   ring slots of the last `window` positions up to the row's own (for a drafter's block: up to the
                newest committed one), addressed by absolute position
    far keys    one of: chosen entries, all visible entries of a ratio, the live rows of the block itself, none

Every key is its own value. Source: DeepSeek inference/model.py (`MLA`/`Attention` and its sparse attention).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.rows import Columns, rms_norm, turn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """Far keys chosen for each row: entries [N, d]; ids int32 [R, K], of which row r has its first counts[r]."""

    entries: jax.Array
    ids: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
    """Far keys are all entries [N, d] that are complete at the row's position t: j < (t + 1) // ratio."""

    entries: jax.Array
    ratio: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """Far keys are the live ones among the block's own rows [R, d]; near keys end at position length - 1."""

    keys: jax.Array


FarKeys = Chosen | Visible | Block | None


def queries(q: Columns, table: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Rotated query heads [R, H, d] in the model's type."""
    rows = q.summed().astype(spec.type).reshape(q.rows, spec.heads, spec.width)
    if spec.norm_eps is not None:
        rows = rms_norm(rows, None, spec.norm_eps)
    return turn(rows, table)


def near_keys(ring: jax.Array, length: jax.Array, count: jax.Array, rows: int, window: int, block: bool):
    """Keys [R, W, d] of each row's window and which of them exist, bool [R, W]."""
    last = length - 1 if block else length + count - 1
    newest = jnp.broadcast_to(length - 1, (rows,)) if block else length + jnp.arange(rows)
    positions = newest[:, None] - window + 1 + jnp.arange(window)
    return ring[positions % ring.shape[0]], (positions >= 0) & (positions <= last)


def far_keys(far: FarKeys, length: jax.Array, count: jax.Array, rows: int):
    """Keys [R, M, d] and which of them exist, bool [R, M]."""
    if isinstance(far, Chosen):
        return far.entries[far.ids], jnp.arange(far.ids.shape[1]) < far.counts[:, None]
    if isinstance(far, Visible):
        keys = far.entries
        seen = jnp.arange(keys.shape[0]) < ((length + jnp.arange(rows) + 1) // far.ratio)[:, None]
    else:
        keys = far.keys
        seen = jnp.broadcast_to(jnp.arange(keys.shape[0]) < count, (rows, keys.shape[0]))
    return jnp.broadcast_to(keys, (rows, *keys.shape)), seen


def attend(
    q: Columns,
    table: jax.Array,
    sink: jax.Array,
    ring: jax.Array,
    length: jax.Array,
    count: jax.Array,
    far: FarKeys,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of R rows at positions length .. length + R - 1, of which `count` are live: [R, H * d].

    Args: q, columns of the query product, H * d wide; table float32 [R, 2, rope / 2], see `rows.turn_table`; sink
    [H], a logit without a value; ring [C, d] with this pass' live rows already in it; length, count int32 [].
    The output is in the model's type, rotated back, heads side by side. Rows beyond `count` hold anything finite.
    """
    heads = queries(q, table, spec)
    keys, seen = near_keys(ring, length, count, q.rows, spec.window, isinstance(far, Block))
    if far is not None:
        more, visible = far_keys(far, length, count, q.rows)
        keys = jnp.concatenate([keys, more.astype(keys.dtype)], axis=1)
        seen = jnp.concatenate([seen, visible], axis=1)
    precision = jax.lax.Precision.HIGHEST if spec.type == jnp.float32 else None
    options = dict(precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.einsum("rhd,rnd->rhn", heads, keys, **options) * spec.width**-0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    sink = sink.astype(jnp.float32)[:, None]
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    weights = jnp.exp(scores - peak)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - peak))
    output = jnp.einsum("rhn,rnd->rhd", weights.astype(spec.type), keys, **options).astype(spec.type)
    return turn(output, table, inverse=True).reshape(q.rows, -1)
