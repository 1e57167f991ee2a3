"""The fused laws of rows: their meaning in Triton's interpreter, and their compiled form at the published shape."""

from pathlib import Path

import compile_for_gpu
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling_law import fused, reference
from pallas_kernels.sampling_law.reference import Filters
from v4flash.speculative.filters import SamplingParams, target_law

VOCABULARY = 129280
OPTIONS = [{}, {"temperature": 1.7, "min_p": 0.2}, {"top_k": 9}, {"top_k": 30, "top_p": 0.6, "min_p": 0.02}]


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_interpreted_kernels_mean_the_reference():
    interpreter.run(Path(__file__).with_name("interpreted_checks.py"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_is_the_sampling_law(options):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)) * 2
    params = SamplingParams.make(**options)
    np.testing.assert_allclose(
        reference.laws(logits, Filters.of(params)), target_law(logits, params), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 4160])
def test_slices_cover_the_vocabulary(vocabulary, rows):
    tiles = fused.slices(vocabulary, fused.PROGRAMS // rows)
    slice_tokens = tiles["OWN"] * tiles["BLOCK"]
    assert tiles["G"] * slice_tokens >= vocabulary > (tiles["G"] - 1) * slice_tokens
    assert rows * tiles["G"] <= fused.PROGRAMS


@pytest.mark.parametrize("capability", compile_for_gpu.CAPABILITIES)
@pytest.mark.parametrize("rows", [1, 8])
def test_nothing_spills(rows, capability):
    filters = Filters(array(), array(dtype=jnp.int32), array(), array())
    made = compile_for_gpu.kernels(
        fused.laws, array(rows, VOCABULARY), filters, array(8 * 32, dtype=jnp.int32), capability=capability
    )
    assert [kernel.name for kernel in made] == ["sampling_law"]
    assert made[0].spilled_bytes == 0
    # Programs wait for each other; all must find room on the smallest GPU in mind at once.
    at_once = compile_for_gpu.programs_at_once(made[0], fused.WARPS)
    assert fused.PROGRAMS <= compile_for_gpu.PROCESSORS * at_once
