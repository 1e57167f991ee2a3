"""The boundaries between sublayers as cases to check and to time."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import bench_case, tiles
from pallas_kernels.bench_case import EXACT, HALVES, ROUNDED, SUMS, OperationCase, normal
from pallas_kernels.hyper_connections import balancing, reference
from pallas_kernels.hyper_connections.reference import Output, Projection
from pallas_kernels.hyper_connections.specs import SPECS, BoundarySpec

CALLS = 24
LIVE = 6
TOKENS = 512  # balanced at once: a crop of training text
PARTS, EXPERTS = 8, 7  # parts of a split product; outputs of a row's experts, the shared one's included
VOCABULARY = 1000
TOLERANCES = {
    "streams": HALVES, "x": HALVES, "rounded": ROUNDED, "hidden": HALVES, "tap": HALVES, "coefficients": 1e-4,
    "counters": EXACT,
}  # fmt: skip


class Sublayer(NamedTuple):
    """What all boundaries of a chain share: streams or (table, tokens), and what the sublayer before left."""

    source: Any
    norm: jax.Array
    coefficients: jax.Array
    output: Output | None
    counters: jax.Array


@dataclasses.dataclass(frozen=True)
class Kind:
    """Which boundary: what it stands `behind` ('product', 'experts' or 'embedding'), and what else it does."""

    behind: str
    last: bool = False
    tap: bool = False

    def __str__(self) -> str:
        return (
            f"boundary behind {'the last ' if self.last else ''}{self.behind}{', tapped' if self.tap else ''}"
        )


KINDS = (
    Kind("product"), Kind("experts"), Kind("experts", tap=True), Kind("experts", last=True), Kind("embedding")
)  # fmt: skip


def random_sublayer(spec: BoundarySpec, behind: str, lines: int) -> Sublayer:
    """Random streams and the output of the sublayer before, with `lines` lines of counters."""
    from pallas_kernels import device_barrier

    rows, width, source = (
        tiles.ROWS,
        spec.width,
        normal(0, tiles.ROWS, spec.streams, spec.width, dtype=spec.type),
    )
    output = Output(normal(1, PARTS, rows, width))
    if behind == "experts":
        experts = normal(2, rows, EXPERTS, width, dtype=spec.type)
        output = Output(experts=experts, count=jnp.int32(LIVE))
    if behind == "embedding":
        tokens = jnp.arange(rows, dtype=jnp.int32) * 5
        source, output = (normal(3, VOCABULARY, width, dtype=jnp.bfloat16), tokens), None
    coefficients = 6 * jax.nn.softmax(normal(4, rows, spec.mixes), axis=1)
    return Sublayer(
        source, 1 + normal(5, width, scale=0.1), coefficients, output, device_barrier.counters(lines)
    )


def random_projections(spec: BoundarySpec, calls: int, last: bool = False) -> list[Projection | None]:
    """Hyper-connections, of the final head behind the last layer."""
    if last and spec.delayed:
        return [None] * calls
    mixes, columns = spec.streams if last else spec.mixes, spec.streams * spec.width
    return [
        Projection(
            normal(10 + i, mixes, columns, scale=columns**-0.5), normal(200 + i, mixes),
            normal(400 + i, 1 if last else 3),
        )
        for i in range(calls)
    ]  # fmt: skip


def boundary_bytes(spec: BoundarySpec, behind: str, last: bool = False) -> int:
    """What a boundary reads: its projection, the streams and the output of the sublayer before."""
    word = spec.type.itemsize
    streams, parts = spec.streams * word, {"product": 4 * PARTS, "experts": EXPERTS * word, "embedding": 0}
    if behind == "embedding":
        streams = 2  # one row of a bfloat16 table for all streams
    projection = 0 if last and spec.delayed else (spec.streams if last else spec.mixes) * spec.streams * 4
    return spec.width * (projection + tiles.ROWS * (streams + parts[behind]))


def named(made: reference.Boundary) -> bench_case.Outputs:
    """Its arrays by name."""
    return {name: value for name, value in vars(made).items() if value is not None}


def cases() -> tuple[OperationCase, ...]:
    """Boundaries behind split products and experts, behind the last layer, and in front of the first; balancing."""
    boundaries = (_case(model, SPECS[model], kind) for model in bench_case.MODELS for kind in KINDS)
    return (*boundaries, _balancing("demo"))


def _balancing(model: str) -> OperationCase:
    """What training does with the mixing matrices of a crop: balances them, and takes the gradient back."""
    spec = SPECS[model]
    shape = TOKENS, spec.streams, spec.streams

    def operands(calls):
        positive = jax.nn.softmax(normal(0, *shape)) + spec.mix_eps
        return positive, [normal(10 + i, *shape) for i in range(calls)]

    def chained(forwards, backwards):
        def both(matrices, slope):
            balanced, factors = forwards(matrices, spec.iterations, spec.mix_eps)
            gradient = backwards(balanced, factors, slope)
            return {"balanced": balanced, "factors": factors, "gradient": gradient}

        return both

    launched = chained(balancing.forward_launch, balancing.backward_launch)
    definition = chained(balancing.forward_reference, balancing.backward_reference)

    def fused(matrices, slope):
        made = launched(matrices, slope)
        return made, jax.nn.softmax(made["gradient"]) + spec.mix_eps

    # Backwards, every half step divides by what the one forwards multiplied with.
    bounds = {"balanced": SUMS, "factors": SUMS, "gradient": 1e-4}
    return OperationCase(
        "hyper_connections", f"{model} balancing with its gradient", ("balance", "balance_gradient"),
        3 * 4 * TOKENS * spec.streams**2, CALLS, operands, fused, definition, bounds, interpreted=True,
    )  # fmt: skip


def _case(model: str, spec: BoundarySpec, kind: Kind) -> OperationCase:
    options = dict(last=kind.last, tap=kind.tap)

    def operands(calls):
        from pallas_kernels.hyper_connections import fused as launches

        lines = launches.COUNTER_LINES
        return random_sublayer(spec, kind.behind, lines), random_projections(spec, calls, kind.last)

    def outputs(made):
        # Only the last boundary owes the collapsed streams to anybody but itself.
        return {name: value for name, value in named(made).items() if name != "hidden" or kind.last}

    def fused(shared, projection):
        from pallas_kernels.hyper_connections import fused as launches

        source, norm, coefficients, output, counters = shared
        made, counters = launches.boundary(
            spec, source, norm, projection, counters, coefficients, output, **options
        )
        behind = Sublayer(
            source if kind.behind == "embedding" else made.streams, norm,
            coefficients if kind.last else made.coefficients, output, counters,
        )  # fmt: skip
        return outputs(made) | {"counters": counters}, behind

    def definition(shared, projection):
        source, norm, coefficients, output, counters = shared
        streams = reference.embedded(*source, spec) if kind.behind == "embedding" else source
        made = reference.boundary(spec, streams, norm, projection, coefficients, output, **options)
        return outputs(made) | {"counters": counters}

    return OperationCase(
        "hyper_connections", f"{model} {kind}", ("boundary",), boundary_bytes(spec, kind.behind, kind.last), CALLS,
        operands, fused, definition, tolerances(spec), interpreted=model == "demo",
    )  # fmt: skip


def tolerances(spec: BoundarySpec) -> dict[str, float]:
    """Of the outputs of a boundary, in the model's type."""
    if spec.type == jnp.bfloat16:
        return TOLERANCES
    return {name: SUMS if bound == HALVES else bound for name, bound in TOLERANCES.items()}
