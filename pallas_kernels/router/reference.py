"""What routing means, in plain jax.numpy: scores, choice, weights, and the list of experts a pass needs.

Knows: how rows choose experts, by score or by a table over token ids. Does not know: the experts.

    x --gate--> scores --bias, top-k | table--> ids, weights --> entries for the expert launches (experts/reference.py)

Rows from `count` on choose nothing: no expert is listed for them alone, and all their weights are zero.

Source: DeepSeek inference/model.py (`Gate`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.experts.reference import Routes, routes
from pallas_kernels.router.specs import RouterSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """Parameters of one router: weight [E, D], and bias float32 [E] or, for hash routing, table int32 [V, K]."""

    weight: jax.Array
    bias: jax.Array | None = None
    table: jax.Array | None = None


def scores(x: jax.Array, weight: jax.Array) -> jax.Array:
    """sqrt(softplus(x W^T)), float32 [R, E], products and sums in float32."""
    logits = jnp.einsum(
        "rd,ed->re", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return jnp.sqrt(jax.nn.softplus(logits))


def choose(
    spec: RouterSpec, x: jax.Array, gate: Gate, tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Expert ids [R, K] and their weights [R, K]; the bias selects, the weights ignore it; ties go to the lower id."""
    values = scores(x, gate.weight)
    if gate.table is not None:
        ids = gate.table[tokens]
    else:
        ids = jax.lax.top_k(values + gate.bias, spec.chosen)[1]
    weights = jnp.take_along_axis(values, ids, axis=1)
    weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + spec.sum_eps)
    return ids, weights * spec.scaling


def route(
    spec: RouterSpec, x: jax.Array, gate: Gate, count: jax.Array, tokens: jax.Array | None = None
) -> tuple[Routes, jax.Array]:
    """Routes x [R, D]; `tokens` int32 [R] are needed by hash routing only.

    Returns: the entries [R * K], and the expert ids int32 [R, K] in the order of choice, -1 in dead rows.
    """
    ids, weights = choose(spec, x, gate, tokens)
    live = jnp.arange(x.shape[0]) < count
    return routes(ids, weights, live, ids.size), jnp.where(live[:, None], ids, -1)
