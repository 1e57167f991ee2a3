"""The fused output projection compiles for both GPUs at real shapes without spilling a register."""

import compile_for_gpu
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention_output import fused
from pallas_kernels.attention_output.specs import SPECS
from pallas_kernels.device_barrier import LINE_WORDS

# Of eight warps, so that four programs fit on a processor of 65536 registers; or two, where few programs walk over all
# tiles.
REGISTERS = {"v4-flash": 128, "v4.1-flash": 64}


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("model", ["v4-flash", pytest.param("v4.1-flash", marks=pytest.mark.slow)])
def test_no_spills_at_real_shapes(model, capability):
    first, second = SPECS[model].first, SPECS[model].second

    def project(heads, near, far, counters):
        return fused.project(
            heads, near, far, counters, groups=first.groups, scale_block=first.block,
            round_block=first.block, dtype=jnp.bfloat16,
        )  # fmt: skip

    words = fused.counter_lines(first.rows, first.block) * LINE_WORDS
    (kernel,) = compile_for_gpu.kernels(
        project, first.input(), first.matrix(), second.matrix(), jax.ShapeDtypeStruct((words,), jnp.int32),
        capability=capability,
    )  # fmt: skip
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= REGISTERS[model]
