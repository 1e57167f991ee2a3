"""The head as a benchmark case."""

import jax
import jax.numpy as jnp

from pallas_kernels.bench_case import BenchCase, random_bf16, random_rows
from pallas_kernels.head import fused
from pallas_kernels.head.specs import HeadSpec


def bench_case(spec: HeadSpec, calls: int = 4) -> BenchCase:
    """The best token of 8 rows, several times over one head (it is larger than any cache)."""
    weight, x = random_bf16(0, spec.weight()), random_rows(1, spec.input())

    @jax.jit
    def chain(x, weight):
        for _ in range(calls):
            token, _ = fused.logits_argmax(x, weight)
            x = x + (1e-30 * token[:, None].astype(jnp.float32)).astype(x.dtype)
        return x

    return BenchCase(chain, (x, weight), calls, 2 * weight.size, ("tile_winners", "winners"))
