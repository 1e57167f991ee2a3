"""The experts' reference on packed weights against the model's own modules, and its list of experts."""

import dataclasses
import functools

import expert_cases
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.experts import reference
from pallas_kernels.experts.specs import ExpertSpec
from v4flash.config import ModelConfig
from v4flash.model.experts import Experts, SharedExpert, summed
from v4flash.model.numerics import Numerics

# Sums of a few hundred float32 products in another order, seen through one rounding to FP8: a hidden number that lies
# on a tie may round the other way, which moves an output by one part in a few thousand of its size.
FLOAT32_TOLERANCE = 2e-4
# The same with roundings to bfloat16 (2^-9) of gate, up, hidden and the output, any of which may go the other way.
BFLOAT16_TOLERANCE = 6e-3

SMALL = {
    "blocks of 128": ExpertSpec(256, 256, 8, 2, 128),
    "blocks of 32": ExpertSpec(128, 96, 8, 2, 32),
    "short rows": ExpertSpec(128, 96, 8, 3, 128),
}


@functools.cache
def _config(spec: ExpertSpec) -> ModelConfig:
    config = ModelConfig.from_file("configs/models/twin.json")
    return dataclasses.replace(
        config,
        hidden_size=spec.width,
        moe_intermediate_size=spec.channels,
        weight_block_size=spec.block,
        swiglu_limit=spec.limit,
    )


def _model_output(spec: ExpertSpec, dtype, x, ids, weights) -> jax.Array:
    """What the model's modules compute from the published weights."""
    numerics = Numerics(dtype=dtype, quantise=True, packed=True)
    routed, shared = Experts(_config(spec), numerics, spec.experts), SharedExpert(_config(spec), numerics)
    for module, parts in zip((routed, shared), expert_cases.published(spec, 0), strict=True):
        for i, name in enumerate(("w1", "w3", "w2")):
            linear = getattr(module, name)
            linear.weight[...], linear.scale[...] = parts[2 * i], parts[2 * i + 1]

    @nnx.jit
    def output(routed, shared):
        return (summed(routed.run_chosen(x, ids, weights)) + shared(x).astype(jnp.float32)).astype(dtype)

    return output(routed, shared)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reference_output(spec: ExpertSpec, dtype, x, routed, shared, routes) -> jax.Array:
    rounded = formats.fp8_round_trip(x, min(spec.block, spec.width)).astype(jnp.float16)
    hidden = reference.gate_up(rounded, routed, shared, routes, limit=spec.limit, dtype=dtype)
    partial = reference.down(
        hidden, routed, shared, routes, chosen=spec.chosen, round_block=spec.block, dtype=dtype
    )
    return reference.combined(partial)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("blocks of 128", jnp.float32),
        ("blocks of 128", jnp.bfloat16),
        ("blocks of 32", jnp.float32),
        ("short rows", jnp.bfloat16),
    ],
)
def test_reference_is_the_models_experts(name, dtype):
    spec = SMALL[name]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(8, spec.width)), dtype)
    ids = jnp.asarray(np.stack([rng.permutation(spec.experts)[: spec.chosen] for _ in range(8)]), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    expected = np.asarray(_model_output(spec, dtype, x, ids, weights), np.float32)

    routed, shared = expert_cases.packed(spec, 0)
    routes = reference.routes(ids, weights, jnp.ones(8, bool), spec.entries)
    found = np.asarray(_reference_output(spec, dtype, x, routed, shared, routes), np.float32)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (FLOAT32_TOLERANCE if dtype == jnp.float32 else BFLOAT16_TOLERANCE)


def test_routes_list_each_expert_once():
    ids = jnp.asarray([[3, 1], [1, 3], [7, 1], [5, 5]] + [[0, 2]] * 4, jnp.int32)
    weights = jnp.arange(16, dtype=jnp.float32).reshape(8, 2) + 1
    live = jnp.arange(8) < 4
    routes = reference.routes(ids, weights, live, 8)
    assert routes.expert_ids.tolist() == [1, 3, 5, 5, 7, -1, -1, -1]
    assert routes.count.tolist() == [5]
    slot, weight = np.asarray(routes.slot), np.asarray(routes.weight)
    assert slot[0, :4].tolist() == [1, 0, 1, -1]
    assert weight[0, :4].tolist() == [2, 3, 6, 0]
    assert slot[1, :4].tolist() == [0, 1, -1, -1]
    assert (slot[2, 3], slot[3, 3], weight[2, 3], weight[3, 3]) == (0, 1, 7, 8)  # the row that chose 5 twice
    assert (slot[:, 4:] == -1).all() and not weight[:, 4:].any() and (slot[5:] == -1).all()


def test_dead_rows_leave_no_entry():
    routes = reference.routes(jnp.zeros((8, 2), jnp.int32), jnp.ones((8, 2)), jnp.zeros(8, bool), 4)
    assert routes.count.tolist() == [0] and routes.expert_ids.tolist() == [-1] * 4
    assert not reference.listed(routes).any()


def test_rounding_to_odd_keeps_later_ties():
    exact = np.random.default_rng(2).normal(size=4096).astype(np.float32)
    exact[:64] = (
        1 + 2.0**-4 + np.arange(-32, 32) * 2.0**-20
    )  # around a tie of a number with three fraction bits
    exact[64:128] = exact[:64] * 2.0**-16
    kept = np.asarray(reference.sticky_half(jnp.asarray(exact)), np.float32)
    for bits in (3, 5):
        unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - bits)
        assert np.array_equal(np.round(kept / unit), np.round(exact / unit))
    assert np.asarray(reference.sticky_half(jnp.asarray([1e6, -1e-9, 0.0]))).tolist() == [
        65504,
        -(2.0**-24),
        0,
    ]
