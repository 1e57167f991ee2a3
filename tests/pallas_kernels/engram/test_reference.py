"""The meaning of the Engram kernels against the model's own module."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import toy_models

from pallas_kernels.engram import reference
from pallas_kernels.engram.reference import Memory
from pallas_kernels.engram.specs import SPECS, EngramSpec
from v4flash.config import ModelConfig
from v4flash.model import engram as model_engram
from v4flash.model.engram import compressed_history
from v4flash.model.fused.model import engram_memory
from v4flash.model.fused.specs import engram_spec
from v4flash.model.numerics import Numerics

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
ROWS = 8
QUANTISED = Numerics(jnp.float32, quantise=True)
# float32 sums over the width in another order.
TOLERANCE = 2e-6


def test_lookup_and_merge_equal_the_models():
    toy = toy_models.toy("v41", quantise=True)
    config, backbone, index = toy.config, toy.model.backbone, 1
    module, spec = backbone.layers[index].engram, engram_spec(toy.config, QUANTISED)
    memory = engram_memory(config, index, module.embed.weight[...], None, backbone.token_map[...])
    random = np.random.default_rng(0)
    ring = jnp.asarray(random.integers(0, config.vocab_size, 24), jnp.int32)

    @jax.jit
    def by_the_model(streams, start):
        """The product's rounded input, the product, and the streams behind it."""
        positions = start + jnp.arange(ROWS, dtype=jnp.int32)
        history = compressed_history(config.engram, backbone.token_map[...], ring, positions)
        rows = module.embed(model_engram.table_rows(config.engram, index, history)).reshape(ROWS, -1)
        return module.wkv.rounded_input(rows), module.wkv(rows), module(streams, history)

    lookup = jax.jit(reference.lookup, static_argnums=(0, 4))
    merge = jax.jit(reference.merge, static_argnums=0)
    streams = jnp.asarray(random.normal(size=(ROWS, spec.streams, spec.width)).astype(np.float32))
    for start in (0, 2, 45):
        rounded, product, expected = by_the_model(streams, jnp.int32(start))
        found = lookup(spec, memory, ring, jnp.int32(start), ROWS)
        np.testing.assert_array_equal(np.asarray(found, np.float32), rounded)
        found = merge(spec, streams, product[None], module.q_weight[...], module.k_weight[...])
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_packed_rows_are_decoded():
    random = np.random.default_rng(1)
    spec = EngramSpec(64, 2, 1, 64, 0, block=0, dtype="float32")
    payload = jnp.asarray([[0x38, 0xB8] * 32], jnp.uint8)  # 1 and -1
    memory = Memory(
        payload, jnp.asarray([[128, 126]], jnp.uint8), jnp.arange(9), jnp.ones((2, 2), jnp.uint32),
        jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32),
    )  # fmt: skip
    ring = jnp.asarray(random.integers(0, 9, 8), jnp.int32)
    found = reference.lookup(spec, memory, ring, jnp.int32(0), 8)
    assert np.asarray(found).tolist() == [[2.0, -2.0] * 16 + [0.5, -0.5] * 16] * 8


def test_specs_are_those_of_the_configurations():
    for name, dtype in (("v4.1-flash", jnp.bfloat16), ("demo", jnp.float32)):
        assert SPECS[name] == engram_spec(
            ModelConfig.from_file(CONFIGS / f"{name}.json"), Numerics(dtype, quantise=True)
        )
