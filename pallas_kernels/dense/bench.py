"""The dense products as cases to check and to time."""

import jax

from pallas_kernels import bench_case
from pallas_kernels.bench_case import (
    SUMS,
    OperationCase,
    PublicProduct,
    nudged,
    random_bf16,
    random_fp8,
    random_rows,
)
from pallas_kernels.dense import reference
from pallas_kernels.dense.specs import EXACT_PRODUCTS, PRODUCTS, ExactSpec, ProductSpec


def cases() -> tuple[OperationCase, ...]:
    """Every FP8 product, and the exact ones that stand alone."""
    return (
        *(_product_case(name, spec) for name, spec in PRODUCTS.items()),
        *(_exact_case(name, spec) for name, spec in EXACT_PRODUCTS.items() if spec.beside is None),
    )


def _product_case(name: str, spec: ProductSpec) -> OperationCase:
    def fused(x, matrix):
        from pallas_kernels.dense import fused as launches

        made = launches.product(x, matrix, scale_block=spec.block, groups=spec.groups)
        return {"product": made.sum(0)}, nudged(x, made[0, :, :1])

    def definition(x, matrix):
        return {"product": reference.product(x, matrix, groups=spec.groups)[0]}

    return OperationCase(
        "dense", f"{name} product", ("fp8_product",), spec.matrix().bytes, bench_case.calls_for(spec.matrix().bytes),
        lambda calls: (random_rows(calls, spec.input(), spec.block), _matrices(spec, calls)),
        fused, definition, {"product": SUMS},
        # Public FP8 products know no groups of columns.
        public=PublicProduct("fp8", ((spec.rows, spec.columns),)) if spec.groups == 1 else None,
    )  # fmt: skip


def _matrices(spec: ProductSpec, calls: int) -> list:
    return [random_fp8(seed, spec.matrix(), spec.block) for seed in range(calls)]


def _exact_case(name: str, spec: ExactSpec) -> OperationCase:
    def fused(x, weight):
        from pallas_kernels.dense import fused as launches

        made = launches.exact_product(x, weight)
        return {"product": made.sum(0)}, nudged(x, made[0, :, :1])

    def definition(x, weight):
        return {"product": reference.exact_product(x, weight)[0]}

    size = bench_case.tree_bytes(spec.weight())
    return OperationCase(
        "dense", f"{name} exact product", ("bf16_product",), size, bench_case.calls_for(size),
        lambda calls: (random_rows(calls, spec.input()), _weights(spec, calls)),
        fused, definition, {"product": SUMS}, public=PublicProduct("bf16", ((spec.rows, spec.columns),)),
    )  # fmt: skip


def _weights(spec: ExactSpec, calls: int) -> list[jax.Array]:
    return [random_bf16(seed, spec.weight()) for seed in range(calls)]
