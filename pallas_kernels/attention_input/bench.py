"""The boundary in front of attention with its products, as cases to check and to time."""

from pallas_kernels import bench_case, tuning
from pallas_kernels.attention_input import reference
from pallas_kernels.bench_case import SUMS, OperationCase, random_bf16, random_fp8
from pallas_kernels.dense.specs import EXACT_PRODUCTS, PRODUCTS, ExactSpec, ProductSpec
from pallas_kernels.hyper_connections import bench as boundaries
from pallas_kernels.hyper_connections import reference as boundary_reference
from pallas_kernels.hyper_connections.bench import Kind, Sublayer
from pallas_kernels.hyper_connections.specs import SPECS, BoundarySpec

# One step away from what the launch has else: programs of a product, weights that they hold while they wait, columns
# of a boundary's program, warps.
TILES = (
    {"programs": 352}, {"programs": 704}, {"held": 0}, {"held": 1}, {"columns": 16}, {"warps": 4}, {"warps": 8},
)  # fmt: skip
BEHIND = (Kind("experts"), Kind("experts", tap=True), Kind("embedding"))


def cases() -> tuple[OperationCase, ...]:
    """Every set of products behind experts, and those of the plainest layers in the other places."""
    return tuple(
        _case(model, kind, products)
        for model in bench_case.MODELS
        for kind in BEHIND
        for products in ((None, *_exact(model)) if kind == BEHIND[0] else (None,))
    )


def _exact(model: str) -> tuple[str, ...]:
    return tuple(
        name for name, spec in EXACT_PRODUCTS.items() if spec.beside and bench_case.model_of(name) == model
    )


def _size(spec: BoundarySpec, kind: Kind, low: ProductSpec, exact: ExactSpec | None) -> int:
    weights = low.matrix().bytes + (bench_case.tree_bytes(exact.weight()) if exact else 0)
    return weights + boundaries.boundary_bytes(spec, kind.behind)


def _case(model: str, kind: Kind, products: str | None) -> OperationCase:
    spec, low = SPECS[model], PRODUCTS[f"{model} wq_a wkv"]
    exact = EXACT_PRODUCTS[products] if products else None
    size = _size(spec, kind, low, exact)
    wanted = ("streams", "coefficients", "tap") if kind.tap else ("streams", "coefficients")

    def operands(calls):
        from pallas_kernels.attention_input import fused as launches

        own = zip(
            boundaries.random_projections(spec, calls),
            [random_fp8(seed, low.matrix(), low.block) for seed in range(calls)],
            [random_bf16(seed, exact.weight()) if exact else None for seed in range(calls)],
            strict=True,
        )
        return boundaries.random_sublayer(spec, kind.behind, launches.COUNTER_LINES), list(own)

    def outputs(made, low_sums, exact_sums, counters):
        named = {name: getattr(made, name) for name in wanted}
        named |= {"x": made.x, "rounded": made.rounded, "low": low_sums, "counters": counters}
        return named if exact_sums is None else named | {"exact": exact_sums}

    def fused(shared, own):
        from pallas_kernels.attention_input import fused as launches

        source, norm, coefficients, output, counters = shared
        projection, matrix, weight = own
        made, low_sums, exact_sums, counters = launches.boundary_and_products(
            spec, source, norm, projection, matrix, counters, weight, coefficients, output, scale_block=low.block,
            tap=kind.tap,
        )  # fmt: skip
        behind = Sublayer(
            source if kind.behind == "embedding" else made.streams, norm, made.coefficients, output, counters
        )
        exact_sums = None if weight is None else exact_sums.sum(0)
        return outputs(made, low_sums.sum(0), exact_sums, counters), behind

    def definition(shared, own):
        source, norm, coefficients, output, counters = shared
        streams = boundary_reference.embedded(*source, spec) if kind.behind == "embedding" else source
        made, low_sums, exact_sums = reference.boundary_and_products(
            spec, streams, norm, *own, coefficients, output, tap=kind.tap
        )
        return outputs(made, low_sums[0], None if exact_sums is None else exact_sums[0], counters)

    # A product carries the errors of the rows it reads.
    tolerances = boundaries.tolerances(spec)
    tolerances |= {"low": tolerances["rounded"], "exact": max(tolerances["x"], SUMS)}
    name = f"{model} {kind} and {products.removeprefix(model).strip() if products else 'plain'} products"
    return OperationCase(
        "attention_input", name, ("boundary_and_products",), size, bench_case.calls_for(size), operands, fused,
        definition, tolerances,
        choices={tuning.by_shape(low.rows, exact.weight().shape[0] if exact else 0, spec.width): TILES}
        if kind == BEHIND[0]
        else {},
    )  # fmt: skip
