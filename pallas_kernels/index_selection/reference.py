"""Which compressed entries each row attends to, in plain jax.numpy.

Knows: index queries, their scores, the selection's total order (higher score, then lower entry) and candidate
blocks. Does not know: attention over the chosen entries.

    score of entry n for row t = sum over heads h of weight[t, h] * relu(query[t, h] . key[n]), zero always +0

A choice lists entries in rising order. Source: DeepSeek inference/model.py (`Indexer`, V4.1's two levels included).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns, turn

INDEX_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed:
    """Numbers in rising order: ids int32 [R, K], of which row r has its first counts[r]; the rest are -1."""

    ids: jax.Array
    counts: jax.Array


def queries(q: Columns, table: jax.Array, spec: IndexSpec) -> jax.Array:
    """Rotated and rounded index queries [R, H, di] in the model's type."""
    x = turn(q.summed().astype(spec.type).reshape(q.rows, spec.heads, spec.width), table)
    if not spec.quantise:
        return x
    return formats.fp4_index_round_trip(formats.hadamard_transform(x) if spec.hadamard else x, INDEX_BLOCK)


def scores(q: Columns, weights: Columns, table: jax.Array, keys: jax.Array, spec: IndexSpec) -> jax.Array:
    """Index scores float32 [R, N] of keys [N, di]; weights are the columns [R, H] of their product."""
    precision = jax.lax.Precision.HIGHEST if spec.type == jnp.float32 else None
    hits = jnp.einsum(
        "rhd,nd->rhn", queries(q, table, spec), keys, precision=precision, preferred_element_type=jnp.float32
    )
    weight = weights.summed().astype(spec.type).astype(jnp.float32) * (spec.width * spec.heads) ** -0.5
    total = jnp.sum(jax.nn.relu(hits) * weight[..., None], axis=1)
    return jnp.where(total == 0, 0.0, total)


def visible(length: jax.Array, count: jax.Array, rows: int, spec: IndexSpec) -> jax.Array:
    """How many entries each row sees, int32 [R]; none beyond the live rows."""
    row = jnp.arange(rows, dtype=jnp.int32)
    return jnp.where(row < count, (length + row + 1) // spec.ratio, 0)


def best(values: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """bool [R, M]: the `count` best allowed ones of each row, ties to the lower number."""
    order = jnp.argsort(jnp.where(allowed, -values, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1, stable=True)
    return allowed & (rank < count)


def listed(chosen: jax.Array, size: int) -> Listed:
    """The numbers of the true columns of bool [R, M], at most `size` a row."""
    number = jnp.where(chosen, jnp.arange(chosen.shape[1], dtype=jnp.int32), chosen.shape[1])
    number = jnp.sort(jnp.pad(number, ((0, 0), (0, size)), constant_values=chosen.shape[1]), axis=1)[:, :size]
    return Listed(jnp.where(number < chosen.shape[1], number, -1), jnp.sum(chosen, axis=1, dtype=jnp.int32))


def candidate_blocks(values: jax.Array, seen: jax.Array, spec: IndexSpec) -> Listed:
    """The `kept` blocks whose best visible score [R, N] is highest; the block of the newest entry always stays."""
    padding = -values.shape[1] % spec.block
    values = jnp.pad(
        jnp.where(jnp.arange(values.shape[1]) < seen[:, None], values, -jnp.inf),
        ((0, 0), (0, padding)), constant_values=-jnp.inf,
    )  # fmt: skip
    peaks = jnp.max(values.reshape(values.shape[0], -1, spec.block), axis=2)
    newest = jnp.arange(peaks.shape[1]) == (seen[:, None] - 1) // spec.block
    return listed(best(jnp.where(newest, jnp.inf, peaks), peaks > -jnp.inf, spec.kept), spec.kept)


def choose(
    q: Columns,
    weights: Columns,
    table: jax.Array,
    keys: jax.Array,
    length: jax.Array,
    count: jax.Array,
    spec: IndexSpec,
    candidates: Listed | None = None,
) -> tuple[Listed, Listed | None]:
    """The chosen entries of rows at positions length .. length + R - 1, `count` of them live, and the candidates.

    Args: q, H * di columns, and weights, H columns, of unsummed products; table float32 [R, 2, rope / 2]; keys
    [N, di] with the entries of this pass in them; length, count int32 []; candidates for members. Returns the
    choice, K = topk, and the candidate blocks that a source publishes (a member passes its own on).
    """
    values, seen = scores(q, weights, table, keys, spec), visible(length, count, q.rows, spec)
    allowed = jnp.arange(keys.shape[0]) < seen[:, None]
    if spec.role == "source":
        candidates = candidate_blocks(values, seen, spec)
    if spec.role == "member":
        blocks = -(-keys.shape[0] // spec.block)
        rows = jnp.arange(q.rows)[:, None]
        inside = jnp.zeros((q.rows, blocks + 1), bool).at[rows, candidates.ids].set(True)[:, :blocks]
        allowed &= jnp.repeat(inside, spec.block, axis=1)[:, : keys.shape[0]]
    return listed(best(values, allowed, spec.topk), spec.topk), candidates
