"""An Engram layer's table look-up and merge as cases to check and to time."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.bench_case import EXACT, HALVES, SUMS, OperationCase, normal, nudged
from pallas_kernels.engram import reference
from pallas_kernels.engram.reference import TABLE_GROUP, Memory
from pallas_kernels.engram.specs import SPECS, EngramSpec
from pallas_kernels.hyper_connections import reference as boundaries
from pallas_kernels.hyper_connections.reference import Output

CALLS, SPLITS, EXPERTS, LIVE = 20, 4, 7, 6
VOCABULARY = {"v4.1-flash": (129280, 99092), "demo": (4160, 3000)}  # tokens, and compressed ids
PRIME = 20011  # rows of one hash's sub-table; a real one has some hundred times more
RING = 136


def cases() -> tuple[OperationCase, ...]:
    """The two launches around the product."""
    return tuple(make(model, spec) for model, spec in SPECS.items() for make in (_lookup, _merge))


def random_memory(model: str, spec: EngramSpec) -> Memory:
    """A table of E4M3 rows with scales, and hashes of large odd multipliers."""
    random, (tokens, ids) = np.random.default_rng(0), VOCABULARY[model]
    payload, scale = jax.random.split(jax.random.key(1, impl="rbg"))
    rows = spec.columns * PRIME
    odd = [2 * int(value) + 1 for value in random.integers(2**40, 2**46, spec.ngrams)]
    finite = jnp.uint8(0x7B)  # no byte of seven ones
    groups = (rows, spec.head_dim // TABLE_GROUP)
    return Memory(
        jax.random.bits(payload, (rows, spec.head_dim), jnp.uint8) & finite,
        jax.random.randint(scale, groups, 118, 124, jnp.int32).astype(jnp.uint8),
        jnp.asarray(random.integers(0, ids, tokens), jnp.int32),
        jnp.asarray([[value & 0xFFFFFFFF, value >> 32] for value in odd], jnp.uint32),
        jnp.full((spec.columns,), PRIME, jnp.int32),
        jnp.arange(spec.columns, dtype=jnp.int32) * PRIME,
    )


def _lookup(model: str, spec: EngramSpec) -> OperationCase:
    def operands(calls):
        ring = np.random.default_rng(1).integers(0, VOCABULARY[model][0], RING)
        return (random_memory(model, spec), jnp.asarray(ring, jnp.int32), jnp.int32(500)), [None] * calls

    def fused(shared, _):
        from pallas_kernels.engram import fused as launches

        memory, ring, start = shared
        made = launches.lookup(spec, memory, ring, start, tiles.ROWS)
        return {"rows": made}, (memory, ring, start + 1 + (0 * made[0, 0]).astype(jnp.int32))

    def definition(shared, _):
        return {"rows": reference.lookup(spec, *shared, tiles.ROWS)}

    size = tiles.ROWS * spec.columns * (spec.head_dim + spec.head_dim // TABLE_GROUP)
    return OperationCase(
        "engram", f"{model} engram look-up", ("lookup",), size, CALLS, operands, fused, definition, {"rows": EXACT},
        interpreted=model == "demo",
    )  # fmt: skip


def _merge(model: str, spec: EngramSpec) -> OperationCase:
    rows, streams, width = tiles.ROWS, spec.streams, spec.width

    def operands(calls):
        coefficients = 6 * jax.nn.softmax(normal(3, rows, (2 + streams) * streams), axis=1)
        experts = normal(4, rows, EXPERTS, width, dtype=spec.type)
        weights = [normal(seed, streams, width, dtype=jnp.bfloat16) for seed in (1, 2)]
        shared = (normal(0, rows, streams, width, dtype=spec.type), *weights, coefficients, experts)
        return shared, [normal(10 + i, SPLITS, rows, (streams + 1) * width) for i in range(calls)]

    def fused(shared, partials):
        from pallas_kernels.engram import fused as launches

        old, q_weight, k_weight, coefficients, experts = shared
        output = Output(experts=experts, count=jnp.int32(LIVE))
        made = launches.merge(spec, old, partials, q_weight, k_weight, coefficients, output)
        return {"streams": made}, (nudged(old, made), *shared[1:])

    def definition(shared, partials):
        old, q_weight, k_weight, coefficients, experts = shared
        output = boundaries.output_rows(Output(experts=experts, count=jnp.int32(LIVE)), spec.type)
        spread = boundaries.spread(coefficients, output, old)
        return {"streams": reference.merge(spec, spread, partials, q_weight, k_weight)}

    word = spec.type.itemsize
    size = rows * width * (4 * SPLITS * (streams + 1) + word * (streams + EXPERTS))
    return OperationCase(
        "engram", f"{model} engram merge", ("merge",), size, CALLS, operands, fused, definition,
        {"streams": SUMS if word == 4 else HALVES}, interpreted=model == "demo",
    )  # fmt: skip
