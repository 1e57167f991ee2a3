"""The expert launches as a benchmark case."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.bench_case import BenchCase, random_fp4, random_fp8, random_rows
from pallas_kernels.experts import fused, reference
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.specs import ExpertSpec

RESIDENT = 128  # packed experts to choose from
LIVE = 7
_routes = jax.jit(reference.routes, static_argnums=3)


def random_experts(spec: ExpertSpec, resident: int = RESIDENT) -> tuple[PackedExperts, PackedExperts]:
    """Random routed and shared experts, packed."""
    shapes = spec.routed(min(spec.experts, resident))
    own = spec.shared()
    return (
        PackedExperts(random_fp4(0, shapes.gate_up), random_fp4(1, shapes.down)),
        PackedExperts(random_fp8(2, own.gate_up, spec.block), random_fp8(3, own.down, spec.block)),
    )


def random_routes(spec: ExpertSpec, seed: int, distinct: int, resident: int = RESIDENT) -> reference.Routes:
    """Choices of LIVE rows that need `distinct` experts, or as many as the rows can choose."""
    rng = np.random.default_rng(seed)
    pool = rng.permutation(min(spec.experts, resident))[:distinct]
    ids = np.full((tiles.ROWS, spec.chosen), -1)
    for i, expert in enumerate(pool[: LIVE * spec.chosen]):
        ids[i % LIVE, i // LIVE] = expert
    for row in ids[:LIVE]:
        rest = rng.permutation(np.setdiff1d(pool, row))
        row[row < 0] = rest[: np.sum(row < 0)]
    weights = jnp.asarray(rng.uniform(0.1, 0.5, ids.shape), jnp.float32)
    return _routes(jnp.asarray(ids, jnp.int32), weights, jnp.arange(tiles.ROWS) < LIVE, spec.entries)


def bench_case(spec: ExpertSpec, distinct: int = 30, calls: int = 8) -> BenchCase:
    """Gate and up, then down, of `distinct` listed experts and the shared one; other experts in each call."""
    routed, shared = random_experts(spec)
    routes = [random_routes(spec, seed, distinct) for seed in range(calls)]
    x = random_rows(4, jax.ShapeDtypeStruct((tiles.ROWS, spec.width), jnp.float16), spec.block)
    options = dict(scale_block=spec.block, dtype=jnp.dtype(spec.dtype))

    @jax.jit
    def chain(x, routed, shared, routes):
        for own in routes:
            hidden = fused.gate_up(x, routed, shared, own, limit=spec.limit, **options)
            partial = fused.down(
                hidden, routed, shared, own, chosen=spec.chosen, round_block=spec.block, **options
            )
            x = x + (1e-30 * partial[:, -1, :1].astype(jnp.float32)).astype(x.dtype)
        return x

    count = int(routes[0].count[0])
    each = sum(matrix.bytes for matrix in routed) // routed.down.words.shape[0]
    size = count * each + sum(matrix.bytes for matrix in shared)
    return BenchCase(chain, (x, routed, shared, routes), calls, size, ("gate_up", "down"))
