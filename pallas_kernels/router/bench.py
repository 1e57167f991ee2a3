"""The router, alone and behind the boundary in front of it, as cases to check and to time."""

import jax
import jax.numpy as jnp

from pallas_kernels import bench_case, tiles, tuning
from pallas_kernels.bench_case import EXACT, SUMS, OperationCase, normal
from pallas_kernels.hyper_connections import bench as boundaries
from pallas_kernels.hyper_connections import reference as boundary_reference
from pallas_kernels.hyper_connections.specs import SPECS as BOUNDARIES
from pallas_kernels.router import reference
from pallas_kernels.router.reference import Gate
from pallas_kernels.router.specs import SPECS, RouterSpec

CALLS = boundaries.CALLS
LIVE = boundaries.LIVE
TOLERANCES = {
    "expert_ids": EXACT, "count": EXACT, "slot": EXACT, "ids": EXACT, "weight": SUMS, "counters": EXACT
}  # fmt: skip
# One step away from what the launch has else: gate programs, warps, columns of a boundary's program.
TILES = (
    {"gates": 32}, {"gates": 132}, {"warps": 4}, {"columns": 32}, {"columns": 64},
)  # fmt: skip
ALONE = ("v4-flash", "v4.1-flash", "v4.1-flash drafter", "demo", "demo drafter")


def random_gates(spec: RouterSpec, calls: int, hashed: bool = False) -> list[Gate]:
    """Gates of different weights, with one bias or one table."""
    bias, table = normal(600, spec.experts, scale=0.25), None
    if hashed:
        key = jax.random.key(7, impl="rbg")
        shape = (boundaries.VOCABULARY, spec.chosen)
        bias, table = None, jax.random.randint(key, shape, 0, spec.experts, jnp.int32)
    return [
        Gate(normal(700 + i, spec.experts, spec.width, dtype=jnp.bfloat16, scale=1 / 32), bias, table)
        for i in range(calls)
    ]


def cases() -> tuple[OperationCase, ...]:
    """Routing by score and by table, and the boundary with its router in one launch."""
    return (
        *(_alone(name, SPECS[name]) for name in ALONE),
        _alone("v4-flash", SPECS["v4-flash"], hashed=True),
        *(_joined(model) for model in bench_case.MODELS),
    )


def _named(routes, ids: jax.Array, counters: jax.Array) -> bench_case.Outputs:
    return routes._asdict() | {"ids": ids, "counters": counters}


def _counters() -> jax.Array:
    from pallas_kernels import device_barrier
    from pallas_kernels.router import fused as launches

    return device_barrier.counters(launches.COUNTER_LINES)


def _alone(name: str, spec: RouterSpec, hashed: bool = False) -> OperationCase:
    dtype = jnp.float32 if bench_case.model_of(name) == "demo" else jnp.bfloat16
    tokens = jnp.arange(tiles.ROWS, dtype=jnp.int32) * 7 if hashed else None

    def operands(calls):
        return (normal(0, tiles.ROWS, spec.width, dtype=dtype), _counters()), random_gates(
            spec, calls, hashed
        )

    def fused(shared, gate):
        from pallas_kernels.router import fused as launches

        x, counters = shared
        routes, ids, counters = launches.route(spec, x, gate, jnp.int32(LIVE), counters, tokens)
        return _named(routes, ids, counters), (x, counters)

    def definition(shared, gate):
        x, counters = shared
        return _named(*reference.route(spec, x, gate, jnp.int32(LIVE), tokens), counters)

    size = 2 * spec.experts * spec.width + tiles.ROWS * spec.width * jnp.dtype(dtype).itemsize
    how = " by table" if hashed else ""
    return OperationCase(
        "router", f"{name} router{how}", ("route",), size, CALLS, operands, fused, definition, TOLERANCES,
        interpreted=dtype == jnp.float32,
    )  # fmt: skip


def _joined(model: str) -> OperationCase:
    spec, router = BOUNDARIES[model], SPECS[model]
    wanted = ("streams", "coefficients", "x", "rounded")

    def operands(calls):
        from pallas_kernels.router import fused as launches

        shared = boundaries.random_sublayer(spec, "product", launches.COUNTER_LINES)
        own = boundaries.random_projections(spec, calls), random_gates(router, calls)
        return shared, list(zip(*own, strict=True))

    def outputs(made, routes, ids, counters):
        return {name: getattr(made, name) for name in wanted} | _named(routes, ids, counters)

    def fused(shared, own):
        from pallas_kernels.router import fused as launches

        source, norm, coefficients, output, counters = shared
        projection, gate = own
        made, routes, ids, counters = launches.boundary_and_route(
            spec,
            router,
            source,
            norm,
            projection,
            gate,
            jnp.int32(LIVE),
            counters,
            coefficients,
            output,
        )
        behind = boundaries.Sublayer(made.streams, norm, made.coefficients, output, counters)
        return outputs(made, routes, ids, counters), behind

    def definition(shared, own):
        source, norm, coefficients, output, counters = shared
        projection, gate = own
        made = boundary_reference.boundary(spec, source, norm, projection, coefficients, output)
        routes, ids = reference.route(router, made.x, gate, jnp.int32(LIVE))
        return outputs(made, routes, ids, counters)

    # The weights follow x, whose bfloat16 roundings may fall to the other side.
    tolerances = boundaries.tolerances(spec) | TOLERANCES | {"weight": 1e-3}
    size = boundaries.boundary_bytes(spec, "product") + 2 * router.experts * router.width
    return OperationCase(
        "router", f"{model} boundary and router", ("boundary_and_route",), size, CALLS, operands, fused, definition,
        tolerances, interpreted=model == "demo",
        choices={tuning.by_shape(router.experts, router.width): TILES},
    )  # fmt: skip
