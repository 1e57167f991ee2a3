"""The expert launches as cases to check and to time.

Cold experts of these cases lie on the device as well: what the link costs is timed with a whole step.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_case, tiles, tuning
from pallas_kernels.bench_case import (
    EXACT,
    HALVES,
    ROUNDED,
    SUMS,
    OperationCase,
    PublicProduct,
    nudged,
    random_fp4,
    random_fp8,
)
from pallas_kernels.experts import early, reference, tiers
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.specs import SPECS, ExpertSpec
from pallas_kernels.experts.tiers import TieredExperts

RESIDENT = 128  # packed experts to choose from
HOT, SLOTS = 112, 3  # of them, and spare slots, where some are cold
GUESSED = 12
LIVE = 7
CALLS = 8  # each with other experts
DISTINCT = {"v4-flash": 30, "v4.1-flash": 30, "v4.1-flash drafter": 18, "demo": 10}
# Four or eight warps a tile; weight loads of a turn kept together, or spread over the arithmetic.
TILES = tuple({"warps": warps, "fenced": fenced} for warps in (4, 8) for fenced in (0, 1))
# Down as one tile a program, by more programs than two a processor, and with other costs of the shared expert's tiles.
WALKS = ({"programs": 0}, {"programs": 528}, {"shared": 2}, {"shared": 4})
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


def random_hidden(spec: ExpertSpec, seed: int) -> reference.Hidden:
    """Hidden rows as `gate_up` might hand them over."""
    shapes = spec.hidden()
    rows = reference.sticky_half(bench_case.normal(seed, *shapes.rows.shape) * tiles.HIDDEN_GAIN)
    return reference.Hidden(rows, jnp.max(jnp.abs(rows).reshape(*shapes.peaks.shape, -1), axis=-1))


def cases() -> tuple[OperationCase, ...]:
    """Gate and up, then down, of some listed experts and the shared one; and down of given hidden rows.

    Then the same where some experts are cold, of which a step misses more than there are slots; and cold experts that
    are fetched before a step asks for them.
    """
    return (
        *(_case(name, SPECS[name], distinct) for name, distinct in DISTINCT.items()),
        *(_tiered_case(name, SPECS[name], DISTINCT[name]) for name in ("v4-flash", "v4.1-flash")),
        *(_early_case(name, SPECS[name]) for name in ("v4-flash", "v4.1-flash")),
    )


def _case(name: str, spec: ExpertSpec, distinct: int) -> OperationCase:
    dtype = jnp.dtype(spec.dtype)
    single = dtype == jnp.float32
    walks = spec.channels % (8 * tiles.CHUNK) == 0  # rows of whole turns of eight warps

    def operands(calls):
        rows = jax.ShapeDtypeStruct((tiles.ROWS, spec.width), jnp.float16)
        shared = (bench_case.random_rows(4, rows, spec.block), random_hidden(spec, 5), *random_experts(spec))
        return shared, [random_routes(spec, seed, distinct) for seed in range(calls)]

    def outputs(gate_up, down, shared, routes):
        x, given, routed, own = shared
        made = gate_up(x, routed, own, routes, limit=spec.limit, dtype=dtype)
        options = dict(chosen=spec.chosen, round_block=spec.block, dtype=dtype)
        partial, other = (down(hidden, routed, own, routes, **options)[:LIVE] for hidden in (made, given))
        # Neither body owes anything in rows that an expert is not routed to, nor in dead ones.
        used = jnp.concatenate([jnp.ones((1, tiles.ROWS), bool), routes.slot >= 0])[..., None]
        rows, peaks = (jnp.where(used, part, 0) for part in made)
        return {"hidden": rows, "peaks": peaks, "output": partial, "output of given rows": other}

    def fused(shared, routes):
        from pallas_kernels.experts import fused as launches

        def launched(body):
            return lambda *arguments, **options: body(*arguments, scale_block=spec.block, **options)

        made = outputs(launched(launches.gate_up), launched(launches.down), shared, routes)
        return made, (nudged(shared[0], made["output"][:1, -1, :1]), *shared[1:])

    listed = spec.routed(distinct)
    return OperationCase(
        "experts", f"{name} experts, {distinct} and the shared one", ("gate_up", "down"),
        sum(matrix.bytes for matrix in (*listed, *spec.shared())), CALLS, operands, fused,
        lambda shared, routes: outputs(reference.gate_up, reference.down, shared, routes),
        {
            "hidden": 1e-3 if single else HALVES,  # kept in 11 bits, rounded to odd
            "peaks": 1e-3 if single else HALVES,
            "output": ROUNDED,
            "output of given rows": SUMS if single else HALVES,
        },
        public=PublicProduct(  # gate and up together, then down
            "fp4", ((2 * spec.channels, spec.width), (spec.width, spec.channels)), distinct, LIVE * spec.chosen
        ),
        choices={
            tuning.by_shape(spec.width, spec.channels, what=product): found
            for product, found in (("gate_up", TILES), ("walking down", WALKS) if walks else ("down", TILES))
        },
    )  # fmt: skip


def _tiered_case(name: str, spec: ExpertSpec, distinct: int) -> OperationCase:
    dtype = jnp.dtype(spec.dtype)
    options = (
        dict(limit=spec.limit, dtype=dtype),
        dict(chosen=spec.chosen, round_block=spec.block, dtype=dtype),
    )

    def operands(calls):
        rows = jax.ShapeDtypeStruct((tiles.ROWS, spec.width), jnp.float16)
        hot, own = random_experts(spec, HOT)
        experts = TieredExperts(hot, _cold_records(spec))
        kept = tiers.empty(1, SLOTS, tiers.record_words(hot))
        shared = (bench_case.random_rows(4, rows, spec.block), experts, own, _table(), kept)
        return shared, [random_routes(spec, seed, distinct) for seed in range(calls)]

    def outputs(body, options, shared, routes):
        x, experts, own, table, kept = shared
        places, kept = body.place(jnp.int32(0), table, routes, kept)
        hidden, records = body.gate_up(x, experts, own, routes, places, kept.records[0], **options[0])
        partial, records = body.down(hidden, experts, own, routes, places, records, **options[1])
        state = jnp.concatenate([part.reshape(-1) for part in (kept.owners, kept.ages, kept.counts)])
        made = {"output": partial[:LIVE], "places": places, "state": state, "records": records}
        return made, kept.with_records(0, records)

    def fused(shared, routes):
        from pallas_kernels.experts import tiered

        sized = tuple(own | dict(scale_block=spec.block) for own in options)
        made, kept = outputs(tiered, sized, shared, routes)
        return made, (nudged(shared[0], made["output"][:1, -1, :1]), *shared[1:4], kept)

    listed = spec.routed(distinct)
    return OperationCase(
        "experts", f"{name} experts in two memories, {distinct} and the shared one",
        ("place_experts", "gate_up_tiered", "down_tiered"),
        sum(matrix.bytes for matrix in (*listed, *spec.shared())), CALLS, operands, fused,
        lambda shared, routes: outputs(tiers, options, shared, routes)[0],
        {"output": ROUNDED, "places": EXACT, "state": EXACT, "records": EXACT},
    )  # fmt: skip


def _cold_records(spec: ExpertSpec) -> jax.Array:
    """The experts of a layer that are not on the device."""
    parts = (random_fp4(6 + i, part) for i, part in enumerate(spec.routed(RESIDENT - HOT)))
    return tiers.to_records(PackedExperts(*parts))


def _table() -> jax.Array:
    """Places [1, E, 2] of one layer's experts, in a mixed order."""
    order = jnp.asarray(np.random.default_rng(7).permutation(RESIDENT), jnp.int32)
    places = jnp.stack([order >= HOT, order - jnp.where(order >= HOT, HOT, 0)], axis=-1)
    return places.astype(jnp.int32)[None]


def _early_case(name: str, spec: ExpertSpec) -> OperationCase:
    def operands(calls):
        cold, table = _cold_records(spec), _table()
        kept = tiers.empty(1, SLOTS, cold.shape[1])
        kept = early.empty(kept, early.nothing_seen(1, 1, tiles.ROWS, spec.chosen))
        outside = np.flatnonzero(np.random.default_rng(7).permutation(RESIDENT) >= HOT)
        guesses = [
            np.append(rng.choice(outside, 2, replace=False), rng.integers(RESIDENT, size=GUESSED - 2)) + 1
            for rng in map(np.random.default_rng, range(calls))
        ]
        return (cold, table, kept), [jnp.asarray(own, jnp.int32)[None] for own in guesses]

    def outputs(body, shared, named):
        cold, table, kept = shared
        kept, layer = body.plan(table, named, kept), jnp.int32(0)
        records, turn = body.fetch(layer, cold, table, kept.early.fetches, kept.early.turn, kept.records[0])
        kept = kept.with_records(0, records)._replace(early=kept.early._replace(turn=turn))
        parts = (kept.owners, kept.ages, kept.early.fetches, kept.early.counts)
        state = jnp.concatenate([part.reshape(-1) for part in parts])
        return {"state": state, "records": records}, (cold, table, kept)

    def fused(shared, named):
        from pallas_kernels.experts import early_fused

        return outputs(early_fused, shared, named)

    return OperationCase(
        "experts", f"{name} experts fetched early", ("plan_fetches", "fetch_experts"),
        sum(matrix.bytes for matrix in spec.routed(2)), CALLS, operands, fused,
        lambda shared, named: outputs(early, shared, named)[0], {"state": EXACT, "records": EXACT},
    )  # fmt: skip
