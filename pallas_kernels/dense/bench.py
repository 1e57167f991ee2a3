"""The dense products as benchmark cases."""

import jax

from pallas_kernels.bench_case import BenchCase, random_bf16, random_fp8, random_rows
from pallas_kernels.dense import fused
from pallas_kernels.dense.specs import ExactSpec, ProductSpec

WALK = 1 << 29  # bytes of different weights to walk through


def bench_case(spec: ProductSpec | ExactSpec, **options) -> BenchCase:
    """The product, with the FP8 product beside it where the spec names one; `options` go to the call."""
    if isinstance(spec, ProductSpec):
        return _product_case(spec, options)
    return _exact_case(spec, options)


def _product_case(spec: ProductSpec, options: dict) -> BenchCase:
    size = spec.matrix().bytes
    calls = max(4, min(64, WALK // size))
    matrices = [random_fp8(seed, spec.matrix(), spec.block) for seed in range(calls)]
    x = random_rows(calls, spec.input(), spec.block)

    @jax.jit
    def chain(x, matrices):
        for matrix in matrices:
            y = fused.product(x, matrix, scale_block=spec.block, groups=spec.groups, **options)
            x = x + (1e-30 * y[0, :, :1]).astype(x.dtype)
        return x

    return BenchCase(chain, (x, matrices), calls, size, ("fp8_product",))


def _exact_case(spec: ExactSpec, options: dict) -> BenchCase:
    beside = spec.beside
    size = spec.weight().size * 2 + (beside.matrix().bytes if beside else 0)
    calls = max(4, min(64, WALK // size))
    weights = [random_bf16(seed, spec.weight()) for seed in range(calls)]
    x = random_rows(calls, spec.input())
    if beside is None:
        matrices, rounded = [None] * calls, None
    else:
        matrices = [random_fp8(seed, beside.matrix(), beside.block) for seed in range(calls)]
        rounded = random_rows(calls + 1, beside.input(), beside.block)

    @jax.jit
    def chain(x, rounded, weights, matrices):
        for weight, matrix in zip(weights, matrices, strict=True):
            if beside is None:
                y = fused.exact_product(x, weight, **options)
            else:
                _, y = fused.products(rounded, matrix, x, weight, scale_block=beside.block, **options)
            x = x + (1e-30 * y[0, :, :1]).astype(x.dtype)
        return x

    kernel = "bf16_product" if beside is None else "both_products"
    return BenchCase(chain, (x, rounded, weights, matrices), calls, size, (kernel,))
