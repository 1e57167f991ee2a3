"""Cases of all operations: every kernel has one, and both bodies take its operands and give the same outputs."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

import pallas_kernels
from pallas_kernels import bench_case, launch, registry

ROOT = Path(pallas_kernels.__file__).parent
# Bytes of a weight with its scales: FP4 has one per 32 columns, FP8 four per 32 x 64.
FP4, FP8 = 0.5 + 1 / 32, 1 + 4 / 2048
SIZES = {
    "demo experts, 10 and the shared one": 3 * 256 * 128 * (10 * FP4 + FP8),
    "demo wo_b product": 256 * 256 * FP8,
    # A projection of four streams, the streams and seven experts' outputs, and both matrices.
    "demo boundary behind experts and ratio 2 products": (
        256 * (24 * 4 * 4 + 8 * 4 * (4 + 7)) + 160 * 256 * 2 + 192 * 256 * FP8
    ),
    "demo head": 4160 * 256 * 2,
    "v4-flash router": 256 * 4096 * 2 + 8 * 4096 * 2,
    # A projection of four float32 streams to 24 numbers, the streams themselves, and eight parts of a product.
    "v4-flash boundary behind product": 4096 * (24 * 4 * 4 + 8 * 4 * 2 + 8 * 8 * 4),
    "v4-flash boundary behind embedding": 4096 * (24 * 4 * 4 + 8 * 2),
    "v4-flash index at 65,000": (65000 // 4 + 8) * 256 + 8 * 4 * (64 * 128 + 4 * 64),
}


def launched_kernels(folder: Path) -> set[str]:
    """Names of the kernels that the sources of a folder launch."""
    found = set()
    for source in folder.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch.call":
                found.add(ast.unparse(node.args[0]).rpartition(".")[2])
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "plgpu.kernel":
                found.update(word.value.value for word in node.keywords if word.arg == "kernel_name")
    return found


def test_every_kernel_has_a_case():
    launched = {folder.name: launched_kernels(folder) for folder in ROOT.iterdir() if folder.is_dir()}
    launched = {name: kernels for name, kernels in launched.items() if kernels}
    listed = {name: set() for name in registry.OPERATIONS}
    for case in registry.cases():
        listed[case.operation].update(case.kernels)
    assert listed == launched


def test_names_are_different_and_begin_with_a_model():
    names = [case.name for case in registry.cases()]
    assert len(set(names)) == len(names)
    assert {case.model for case in registry.cases()} == set(bench_case.MODELS)


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("operation", registry.OPERATIONS)
def test_both_bodies_take_the_operands(operation, monkeypatch):
    """Traced at the real shapes: the same outputs from both, the kernels that are named, and a chain that goes on."""
    launched, call, mosaic_kernel = [], launch.call, mosaic_gpu.kernel

    def recorded(kernel, *operands, **settings):
        launched.append(kernel.fn.__name__)
        return call(kernel, *operands, **settings)

    def recorded_mosaic(body, *, kernel_name, **settings):
        launched.append(kernel_name)
        return mosaic_kernel(body, kernel_name=kernel_name, **settings)

    monkeypatch.setattr(launch, "call", recorded)
    monkeypatch.setattr(mosaic_gpu, "kernel", recorded_mosaic)
    with launch.compiling_for(90):
        for case in registry.cases():
            if case.operation != operation:
                continue
            shared, (own,) = case.shapes()
            launched.clear()
            made, behind = jax.eval_shape(case.fused, shared, own)
            assert set(launched) == set(case.kernels), case.name
            assert signature(made) == signature(jax.eval_shape(case.reference, shared, own)), case.name
            assert signature(behind) == signature(shared), case.name
            assert set(made) <= set(case.tolerances), case.name


@pytest.mark.parametrize("name", SIZES)
def test_bytes_that_a_call_has_to_read(name):
    (case,) = [case for case in registry.cases() if case.name == name]
    assert case.bytes == SIZES[name]


def test_choosing():
    assert {case.operation for case in registry.chosen("winners")} == {"head"}
    assert {case.model for case in registry.chosen("engram")} == {"v4.1-flash", "demo"}
    assert {case.operation for case in registry.chosen("boundary", "v4-flash")} == {
        "attention_input",
        "hyper_connections",
        "router",
    }
    assert registry.chosen("nothing of that name") == ()


def test_a_chain_feeds_each_call_with_what_the_one_before_left():
    def body(shared, own):
        return {"sum": shared + own}, 2 * shared + own

    case = bench_case.OperationCase("none", "demo none", (), 0, 3, None, body, None, {})
    assert case.chain(1, [1, 2, 3]) == 2 * (2 * (2 * 1 + 1) + 2) + 3


def test_error():
    expected = jnp.asarray([3.0, 4.0])
    assert bench_case.error(expected, expected) == 0
    assert bench_case.error(expected + jnp.asarray([0.0, 0.5]), expected) == pytest.approx(0.1)
    assert bench_case.error(jnp.asarray([3.0, jnp.nan]), expected) == np.inf
    assert bench_case.error(jnp.asarray([1, 2, 3, 4]), jnp.asarray([1, 2, 3, 5])) == 0.25
    assert bench_case.error(jnp.zeros(2), jnp.zeros(2)) == 0
    assert bench_case.error(jnp.ones(2), jnp.zeros(2)) > 1
    with pytest.raises(ValueError, match="found shape"):
        bench_case.error(jnp.zeros(2), expected[:1])


def test_calls_walk_through_more_than_caches_hold():
    assert bench_case.calls_for(1 << 10) == 32
    assert bench_case.calls_for(1 << 30) == 4
    assert bench_case.calls_for(1 << 25) * (1 << 25) == 1 << 29
