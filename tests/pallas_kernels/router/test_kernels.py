"""The fused router: its meaning in Triton's interpreter, and its compiled form at the published shapes."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hyper_connections import fused as boundaries
from pallas_kernels.hyper_connections import specs as boundary_specs
from pallas_kernels.hyper_connections.reference import Output, Projection
from pallas_kernels.router import fused, specs
from pallas_kernels.router.reference import Gate

ROWS = 8
COUNTERS = jax.ShapeDtypeStruct((96,), jnp.int32)
# Programs of the joined launch that others wait for should all find room on the smallest GPU in mind at once.


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gate_of(spec: specs.RouterSpec, hashed: bool = False) -> Gate:
    weight = array(spec.experts, spec.width, dtype=jnp.bfloat16)
    table = array(1000, spec.chosen, dtype=jnp.int32)
    return Gate(weight, None, table) if hashed else Gate(weight, array(spec.experts))


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("spec,hashed", [(specs.V41_FLASH, False), (specs.V4_FLASH, True)])
def test_nothing_spills(spec, hashed, capability):
    made = compile_for_gpu.kernels(
        lambda x, gate, count, counters, tokens: fused.route(spec, x, gate, count, counters, tokens),
        array(ROWS, spec.width, dtype=jnp.bfloat16), gate_of(spec, hashed), array(dtype=jnp.int32), COUNTERS,
        array(ROWS, dtype=jnp.int32), capability=capability,
    )  # fmt: skip
    assert [kernel.name for kernel in made] == ["route"]
    assert made[0].spilled_bytes == 0


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize(
    "spec,router",
    [
        (boundary_specs.V4_FLASH, specs.V4_FLASH),
        pytest.param(boundary_specs.V41_FLASH, specs.V41_FLASH, marks=pytest.mark.slow),  # half a minute each
    ],
)
def test_the_joined_launch_spills_nothing_and_nobody_waits_for_room(spec, router, capability):
    width, mixes = spec.width, spec.mixes

    def joined(streams, norm, projection, gate, count, counters, coefficients, output):
        return fused.boundary_and_route(
            spec, router, streams, norm, projection, gate, count, counters, coefficients, output
        )

    (made,) = compile_for_gpu.kernels(
        joined, array(ROWS, spec.streams, width, dtype=spec.type), array(width),
        Projection(array(mixes, spec.streams * width), array(mixes), array(3)), gate_of(router),
        array(dtype=jnp.int32), COUNTERS, array(ROWS, mixes), Output(array(8, ROWS, width)),
        capability=capability,
    )  # fmt: skip
    assert made.spilled_bytes == 0
    resident = compile_for_gpu.programs_at_once(made, fused.JOINED.warps)
    first = width // fused.JOINED.columns + ROWS * (boundaries.SHARES + 1)
    assert first <= compile_for_gpu.PROCESSORS * resident
