"""The meaning of routing against the model's own router."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from pallas_kernels.router import reference
from pallas_kernels.router.reference import Gate
from pallas_kernels.router.specs import SPECS, RouterSpec
from v4flash.config import ModelConfig
from v4flash.model.fused.specs import router_spec

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
ROWS = 8


@pytest.mark.parametrize("family,layer", [("v4", 0), ("v4", 3), ("v41", 2)])
def test_choices_and_weights_equal_the_models(family, layer):
    toy = toy_models.toy(family)
    router = toy.model.backbone.layers[layer].ffn.gate
    random = np.random.default_rng(layer)
    x = jnp.asarray(random.normal(size=(ROWS, toy.config.hidden_size)).astype(np.float32))
    tokens = jnp.asarray(random.integers(0, toy.config.vocab_size, ROWS), jnp.int32)
    expected_ids, expected_weights = jax.jit(lambda x, tokens: router(x, tokens))(x, tokens)
    spec = router_spec(toy.config, toy.config.n_routed_experts, router.chosen)
    hashed = router.tid2eid is not None
    gate = Gate(
        router.weight[...], None if hashed else router.bias[...], router.tid2eid[...] if hashed else None
    )
    ids, weights = jax.jit(reference.choose, static_argnums=0)(spec, x, gate, tokens)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)  # a few roundings of 2^-24

    route = jax.jit(reference.route, static_argnums=0)
    routes, listed_ids = route(spec, x, gate, jnp.int32(3), tokens)
    np.testing.assert_array_equal(listed_ids, np.where(np.arange(ROWS)[:, None] < 3, expected_ids, -1))
    distinct = sorted(set(np.asarray(expected_ids[:3]).ravel().tolist()))
    assert list(np.asarray(routes.expert_ids)[: len(distinct)]) == distinct
    dense = np.zeros((ROWS, toy.config.n_routed_experts), np.float32)
    np.put_along_axis(dense[:3], np.asarray(ids)[:3], np.asarray(weights)[:3], axis=1)
    np.testing.assert_array_equal(np.asarray(routes.weight)[: len(distinct)], dense.T[distinct])


def test_equal_scores_go_to_the_lower_id():
    spec = RouterSpec(64, 8, 3)
    gate = Gate(jnp.zeros((8, 64)), jnp.asarray([0, 1, 0, 1, 0, 0, 0, 0], jnp.float32))
    ids, _ = reference.choose(spec, jnp.ones((8, 64)), gate, None)
    assert np.asarray(ids).tolist() == [[1, 3, 0]] * 8


@pytest.mark.parametrize(
    "name,file",
    [("v4-flash", "v4-flash-0731"), ("v4.1-flash", "v4.1-flash"), ("demo", "demo"), ("twin", "twin")],
)
def test_specs_are_those_of_the_configurations(name, file):
    config = ModelConfig.from_file(CONFIGS / f"{file}.json")
    assert SPECS[name] == router_spec(config, config.n_routed_experts, config.num_experts_per_tok)
    if f"{name} drafter" in SPECS:
        draft = config.draft
        assert SPECS[f"{name} drafter"] == router_spec(
            config, draft.n_routed_experts, draft.num_experts_per_tok
        )
