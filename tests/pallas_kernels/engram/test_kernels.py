"""The kernels around an Engram layer's product: interpreted, and compiled at the published shapes."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.engram import fused, specs
from pallas_kernels.engram.reference import Memory
from pallas_kernels.hyper_connections.reference import Output

SPEC, ROWS = specs.V41_FLASH, 8


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
def test_nothing_spills(capability):
    table = 384006168, SPEC.head_dim
    memory = Memory(
        array(*table, dtype=jnp.uint8), array(table[0], table[1] // 32, dtype=jnp.uint8),
        array(129280, dtype=jnp.int32), array(SPEC.ngrams, 2, dtype=jnp.uint32),
        array(SPEC.columns, dtype=jnp.int32), array(SPEC.columns, dtype=jnp.int32),
    )  # fmt: skip
    weight = array(SPEC.streams, SPEC.width, dtype=jnp.bfloat16)
    experts = array(ROWS, 7, SPEC.width, dtype=SPEC.type)

    def both(memory, ring, start, streams, partials, q_weight, k_weight, coefficients, output):
        rows = fused.lookup(SPEC, memory, ring, start, ROWS)
        return rows, fused.merge(SPEC, streams, partials, q_weight, k_weight, coefficients, output)

    made = compile_for_gpu.kernels(
        both, memory, array(256, dtype=jnp.int32), array(dtype=jnp.int32),
        array(ROWS, SPEC.streams, SPEC.width, dtype=SPEC.type), array(4, ROWS, (SPEC.streams + 1) * SPEC.width),
        weight, weight, array(ROWS, 24), Output(experts=experts, count=array(dtype=jnp.int32)),
        capability=capability,
    )  # fmt: skip
    assert sorted(kernel.name for kernel in made) == ["lookup", "merge"]
    assert [kernel.spilled_bytes for kernel in made] == [0, 0]
