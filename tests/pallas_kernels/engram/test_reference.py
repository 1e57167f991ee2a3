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

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
ROWS = 8
# float32 sums over the width in another order.
TOLERANCE = 2e-6


def spec_of(config: ModelConfig, dtype: str = "float32") -> EngramSpec:
    engram = config.engram
    return EngramSpec(
        config.hidden_size, engram.max_ngram_size, engram.n_heads, engram.head_dim, engram.pad_token_id,
        config.weight_block_size, config.hc_mult, config.rms_norm_eps, dtype,
    )  # fmt: skip


def memory_of(config: ModelConfig, layer: int, table, token_map) -> Memory:
    factors = model_engram.multipliers(config.engram, layer)
    halves = [[factor & 0xFFFFFFFF, factor >> 32] for factor in factors]
    primes = [prime for sizes in model_engram.table_primes(config.engram)[layer] for prime in sizes]
    offsets = np.cumsum([0, *primes[:-1]])
    return Memory(
        table, None, token_map, jnp.asarray(halves, jnp.uint32), jnp.asarray(primes, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
    )  # fmt: skip


def test_lookup_and_merge_equal_the_models():
    toy = toy_models.toy("v41", quantise=True)
    config, backbone, index = toy.config, toy.model.backbone, 1
    module, spec = backbone.layers[index].engram, spec_of(toy.config)
    memory = memory_of(config, index, module.embed.weight[...], backbone.token_map[...])
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
    for name, dtype in (("v4.1-flash", "bfloat16"), ("demo", "float32")):
        assert SPECS[name] == spec_of(ModelConfig.from_file(CONFIGS / f"{name}.json"), dtype)
