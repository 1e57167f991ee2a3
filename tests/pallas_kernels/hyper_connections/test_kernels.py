"""The fused boundary: its meaning in Triton's interpreter, and its compiled form at the published shapes."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hyper_connections import fused, specs
from pallas_kernels.hyper_connections.reference import Output, Projection

# (model, rows, parts of the output, of experts, the boundary behind the last layer)
BOUNDARIES = [
    (specs.V4_FLASH, 8, 7, True, False), (specs.V4_FLASH, 8, 7, True, True), (specs.V41_FLASH, 8, 8, False, False),
]  # fmt: skip


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("spec,rows,parts,experts,last", BOUNDARIES)
def test_nothing_spills(spec, rows, parts, experts, last, capability):
    width, mixes = spec.width, spec.streams if last else spec.mixes
    projection = Projection(array(mixes, spec.streams * width), array(mixes), array(1 if last else 3))
    output = Output(partials=array(parts, rows, width))
    if experts:
        output = Output(experts=array(rows, parts, width, dtype=spec.type), count=array(dtype=jnp.int32))

    def boundary(streams, norm, projection, counters, coefficients, output):
        return fused.boundary(
            spec, streams, norm, projection, counters, coefficients, output, last=last, tap=True
        )

    made = compile_for_gpu.kernels(
        boundary, array(rows, spec.streams, width, dtype=spec.type), array(width, dtype=jnp.bfloat16),
        None if last and spec.delayed else projection, array(32, dtype=jnp.int32), array(rows, spec.mixes), output,
        capability=capability,
    )  # fmt: skip
    assert [kernel.name for kernel in made] == ["boundary"]
    assert made[0].spilled_bytes == 0
