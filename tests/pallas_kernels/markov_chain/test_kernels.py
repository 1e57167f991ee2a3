"""The fused Markov chain: its meaning in Triton's interpreter, and its compiled form at the published shapes."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.markov_chain import fused, specs
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.sampling_law.reference import Filters

TOKENS = 7


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


PROGRAMS = {False: fused.GREEDY_PROGRAMS, True: fused.DRAWN_PROGRAMS}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("spec", specs.SPECS.values(), ids=specs.SPECS)
def test_slices_cover_the_vocabulary(spec, drawn):
    tiles = fused.layout(spec, PROGRAMS[drawn])
    assert (
        tiles["G"] * tiles["TILES"] * tiles["BV"]
        >= spec.vocabulary
        > (tiles["G"] - 1) * tiles["TILES"] * tiles["BV"]
    )
    assert tiles["TILES"] * tiles["BV"] == tiles["OWN"] * tiles["BLOCK"]
    assert tiles["G"] <= PROGRAMS[drawn]


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("drawn", [False, True])
def test_nothing_spills(drawn, capability):
    spec = specs.V4_FLASH
    table = array(spec.vocabulary, spec.rank, dtype=jnp.bfloat16)
    filters = Filters(array(), array(dtype=jnp.int32), array(), array())
    draw = Draw(filters, array(TOKENS, 2)) if drawn else None

    def chain(base, anchor, embed, head, count, counters, draw):
        return fused.chain(spec, base, anchor, embed, head, count, counters, draw)

    made = compile_for_gpu.kernels(
        chain, array(TOKENS, spec.vocabulary), array(dtype=jnp.int32), table, table, array(dtype=jnp.int32),
        array(32, dtype=jnp.int32), draw, capability=capability,
    )  # fmt: skip
    assert [kernel.name for kernel in made] == ["chain"]
    assert made[0].spilled_bytes == 0
    # Programs wait for each other; all must find room on the smallest GPU in mind at once.
    at_once = compile_for_gpu.programs_at_once(made[0], fused.WARPS)
    assert PROGRAMS[drawn] <= compile_for_gpu.PROCESSORS * at_once
