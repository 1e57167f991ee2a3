"""The meaning of a sublayer boundary against the model's own modules."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from pallas_kernels.hyper_connections import reference
from pallas_kernels.hyper_connections.reference import Output, Projection
from pallas_kernels.hyper_connections.specs import SPECS, BoundarySpec
from v4flash.config import ModelConfig
from v4flash.model.backbone import first_stream, stream_mean
from v4flash.model.fused.specs import boundary_spec
from v4flash.model.hyper_connections import collapse
from v4flash.model.numerics import Numerics

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
ROWS = 8
# float32 sums in another order: a few roundings of 2^-24, and one more division.
TOLERANCE = 2e-6


def spec_of(config: ModelConfig, quantise: bool = False) -> BoundarySpec:
    return boundary_spec(config, Numerics(jnp.float32, quantise))


def projection_of(module) -> Projection:
    return Projection(module.fn[...], module.base[...], module.scale[...])


def noise(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def by_the_model(backbone, layer, start, partials):
    """What the model makes of two sublayers that answer `partials`: their inputs, and all that follows."""
    seen = []

    def body(parts):
        return lambda x: (seen.append(x), jnp.sum(parts, axis=0))[1]

    streams, pre = start, first_stream(ROWS, start.shape[1])
    streams, pre = layer.sublayer(layer.hc_attn, layer.attn_norm, body(partials[0]), streams, pre)
    streams, pre = layer.sublayer(layer.hc_ffn, layer.ffn_norm, body(partials[1]), streams, pre)
    head = backbone.hc_head
    hidden = collapse(pre, streams) if head is None else head(streams)
    return *seen, streams, hidden, backbone.norm(hidden), stream_mean(streams)


def by_the_reference(spec, backbone, layer, start, partials):
    """The same from three boundaries."""
    head = backbone.hc_head
    first = reference.boundary(
        spec, start, layer.attn_norm.weight[...], projection_of(layer.hc_attn),
        reference.first_coefficients(ROWS, spec),
    )  # fmt: skip
    second = reference.boundary(
        spec, first.streams, layer.ffn_norm.weight[...], projection_of(layer.hc_ffn), first.coefficients,
        Output(partials[0]),
    )  # fmt: skip
    end = reference.boundary(
        spec, second.streams, backbone.norm.weight[...], None if head is None else projection_of(head),
        second.coefficients, Output(partials[1]), last=True, tap=True,
    )  # fmt: skip
    return first.x, second.x, end.streams, end.hidden, end.x, end.tap


@pytest.mark.parametrize("family", toy_models.FAMILIES)
def test_two_sublayers_and_the_end_equal_the_model(family):
    toy = toy_models.toy(family)
    spec, backbone = spec_of(toy.config), toy.model.backbone
    arguments = noise(0, ROWS, spec.streams, spec.width), noise(1, 2, 3, ROWS, spec.width)
    expected = jax.jit(lambda *given: by_the_model(backbone, backbone.layers[1], *given))(*arguments)
    found = jax.jit(lambda *given: by_the_reference(spec, backbone, backbone.layers[1], *given))(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("family", toy_models.FAMILIES)
def test_rounded_rows_are_what_the_models_products_read(family):
    toy = toy_models.toy(family, quantise=True)
    x = noise(3, ROWS, toy.config.hidden_size) * 3
    spec, product = spec_of(toy.config, quantise=True), toy.model.backbone.layers[0].attn.wq_a
    found = jax.jit(lambda x: reference.round_input(x, spec))(x)
    np.testing.assert_array_equal(np.asarray(found, np.float32), jax.jit(product.rounded_input)(x))


def test_embedded_tokens_equal_the_models():
    toy = toy_models.toy("v4")
    tokens = jnp.asarray([5, 0, 95, 7, 7, 1, 2, 3], jnp.int32)
    backbone = toy.model.backbone
    found = reference.embedded(backbone.embed[...], tokens, spec_of(toy.config))
    np.testing.assert_array_equal(found, backbone.embedded(tokens))


@pytest.mark.parametrize("family", toy_models.FAMILIES)
def test_experts_are_added_as_the_model_adds_them(family):
    toy = toy_models.toy(family)
    ffn = toy.model.backbone.layers[-1].ffn
    x, tokens = noise(4, ROWS, toy.config.hidden_size), jnp.zeros((ROWS,), jnp.int32)

    @jax.jit
    def both(x, tokens):
        """The model's output with five live rows, and each expert's part of it."""
        ids, weights = ffn.gate(x, tokens)
        parts = [ffn.experts.run_chosen(x, ids, weights), ffn.shared_experts(x)[:, None]]
        return ffn(x, tokens, jnp.arange(ROWS) < 5)[0], jnp.concatenate(parts, axis=1)

    expected, parts = both(x, tokens)
    parts = parts.at[5:, :-1].set(jnp.nan)  # nobody may read the dead rows' experts
    assert_close(reference.output_rows(Output(experts=parts, count=jnp.int32(5)), jnp.float32), expected)


@pytest.mark.parametrize(
    "name,file",
    [("v4-flash", "v4-flash-0731"), ("v4.1-flash", "v4.1-flash"), ("demo", "demo"), ("twin", "twin")],
)
def test_specs_are_those_of_the_configurations(name, file):
    config = ModelConfig.from_file(CONFIGS / f"{file}.json")
    found, expected = SPECS[name], spec_of(config, quantise=True)
    assert (found.width, found.streams, found.delayed, found.block) == (
        expected.width, expected.streams, expected.delayed, expected.block,
    )  # fmt: skip
    assert (found.norm_eps, found.mix_eps, found.iterations) == (
        expected.norm_eps, expected.mix_eps, expected.iterations,
    )  # fmt: skip
