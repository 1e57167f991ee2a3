"""Benchmark cases of the weight-streaming operations: they launch what they say, and count what one call reads."""

import compile_for_gpu
import pytest

from pallas_kernels.dense import bench as dense
from pallas_kernels.dense import specs as dense_specs
from pallas_kernels.experts import bench as experts
from pallas_kernels.experts import specs as expert_specs
from pallas_kernels.head import bench as head
from pallas_kernels.head import specs as head_specs

# Bytes of a weight with its scales: FP4 has one per 32 columns, FP8 four per 32 x 64.
FP4, FP8 = 0.5 + 1 / 32, 1 + 4 / 2048
DEMO_EXPERT = 3 * 256 * 128
CASES = {
    "experts": (lambda: experts.bench_case(expert_specs.DEMO, 10, calls=2), DEMO_EXPERT * (10 * FP4 + FP8)),
    "dense": (
        lambda: dense.bench_case(dense_specs.PRODUCTS["demo wo_b"]),
        256 * 256 * FP8,
    ),
    "joined": (
        lambda: dense.bench_case(dense_specs.EXACT_PRODUCTS["demo ratio 2"]),
        160 * 256 * 2 + 192 * 256 * FP8,
    ),
    "head": (lambda: head.bench_case(head_specs.DEMO), 4160 * 256 * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name, monkeypatch):
    monkeypatch.setattr(dense, "WALK", 1)
    make, size = CASES[name]
    case = make()
    launched = compile_for_gpu.kernels(case.chain, *case.arguments, capability=90)
    assert sorted(kernel.name for kernel in launched) == sorted(case.kernels)
    assert case.bytes == size
