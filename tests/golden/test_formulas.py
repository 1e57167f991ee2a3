"""Single formulas against tables of other implementations: rotation, streams, routing, experts, n-gram memory.

The number formats of the same file are compared in tests/pallas_kernels, its acceptance laws in
tests/speculative.
"""

import dataclasses
import json

import golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from toy_models import toy

from pallas_kernels import formats as number_formats
from v4flash.checkpoint.published import TOKEN_MAP_NAME
from v4flash.config import EngramConfig, ModelConfig, RopeConfig
from v4flash.model.engram import compressed_history, gated_update, multipliers, table_primes, table_rows
from v4flash.model.experts import Router, clamped_swiglu
from v4flash.model.hyper_connections import collapse, split_coefficients, spread
from v4flash.model.numerics import Numerics, rope_frequencies, rotate

# Float32 results of a few operations each.
RELATIVE = 1e-6
# Cosines and sines near position 2^20, where the float32 angle itself is what is compared.
CIRCLE = 2e-7
ROPES = {
    "yarn160000": RopeConfig(160000.0, factor=16.0, original_max_position_embeddings=65536),
    "rope10000": RopeConfig(10000.0),
}
DIMS = 64
# The published V4.1 memory.
ENGRAM = EngramConfig(
    layer_ids=(1, 14), num_embeddings=(384006168, 384016682), max_ngram_size=4, vocab_size=16_000_000, n_heads=8,
    head_dim=256, pad_token_id=2, compressed_vocab_size=99092,
)  # fmt: skip


def assert_close(found, expected, relative: float = RELATIVE, err_msg: str = "") -> None:
    """Equal to a relative error, or to that part of the largest number of the row (sums cancel)."""
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    difference = np.abs(np.asarray(found, np.float64) - expected)
    assert (difference <= relative * np.maximum(scale, np.finfo(np.float32).tiny)).all(), (
        f"{err_msg} {(difference / scale).max()}"
    )


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies(formats, name):
    np.testing.assert_allclose(rope_frequencies(ROPES[name], DIMS), formats[f"{name}.freqs"], rtol=RELATIVE)


def test_yarn_changes_only_the_slow_pairs(formats):
    exact = formats["yarn160000.freqs64"].view(np.float64).reshape(-1)
    found = rope_frequencies(ROPES["yarn160000"], DIMS)
    np.testing.assert_allclose(found, exact, rtol=RELATIVE)
    low, high = formats["yarn160000.low_high"]
    plain = rope_frequencies(RopeConfig(160000.0), DIMS)
    np.testing.assert_array_equal(found[: low + 1], plain[: low + 1])
    np.testing.assert_allclose(found[high:], plain[high:] / 16, rtol=RELATIVE)
    assert (found[low + 1 : high] < plain[low + 1 : high]).all()


@pytest.mark.parametrize("name", ROPES)
def test_rotation_up_to_the_longest_context(formats, name):
    positions, frequencies = formats["rope.positions"], rope_frequencies(ROPES[name], DIMS)
    unit = np.tile(np.float32([1, 0]), (len(positions), DIMS // 2))
    turned = np.asarray(jax.jit(lambda x, p: rotate(x, p, frequencies))(unit, positions))
    np.testing.assert_allclose(turned[:, 0::2], formats[f"{name}.cos"], rtol=0, atol=CIRCLE)
    np.testing.assert_allclose(turned[:, 1::2], formats[f"{name}.sin"], rtol=0, atol=CIRCLE)


@pytest.mark.parametrize("inverse", [False, True])
def test_rotated_vectors(formats, inverse):
    frequencies = rope_frequencies(ROPES["yarn160000"], DIMS)
    found = jax.jit(lambda x, p: rotate(x, p, frequencies, inverse=inverse))(
        formats["rope.x"], formats["rope.positions"]
    )
    expected = formats["rope.y_yarn160000" + "_inverse" * inverse]
    np.testing.assert_array_equal(np.asarray(found)[:, :-DIMS], expected[:, :-DIMS])
    assert_close(found, expected)


def test_stream_coefficients(formats):
    pre, post, comb = jax.jit(split_coefficients, static_argnums=(3, 4, 5))(
        formats["sinkhorn.mixes"], formats["sinkhorn.scale"], formats["sinkhorn.base"], 4, 20, 1e-6
    )
    for name, found in {"pre": pre, "post": post, "comb": comb}.items():
        assert_close(found, formats[f"sinkhorn.{name}"], err_msg=name)
    streams = formats["sinkhorn.streams"]
    assert_close(collapse(pre, jnp.asarray(streams)), formats["sinkhorn.collapsed"])
    spread_streams = spread(post, comb, jnp.asarray(formats["sinkhorn.sublayer_out"]), jnp.asarray(streams))
    assert_close(spread_streams, formats["sinkhorn.new_streams"])


def test_router(formats):
    logits = formats["router.logits"]
    experts = logits.shape[1]
    config = dataclasses.replace(toy("v41").config, hidden_size=experts, routed_scaling_factor=1.5)
    router = Router(config, Numerics(packed=False), experts=experts, chosen=3, hashed=False)
    # The identity as the weight: the rows are the logits.
    router.weight[...] = jnp.eye(experts)
    router.bias[...] = jnp.asarray(formats["router.bias"])
    assert_close(router.scores(jnp.asarray(logits)), formats["router.scores"])
    ids, weights = router(jnp.asarray(logits), jnp.zeros((len(logits),), jnp.int32))
    np.testing.assert_array_equal(ids, formats["router.ids_top3"])
    assert_close(weights, formats["router.weights"])


def test_clamped_swiglu(formats):
    found = clamped_swiglu(jnp.asarray(formats["swiglu.gate"]), jnp.asarray(formats["swiglu.up"]), 10.0)
    np.testing.assert_allclose(found, formats["swiglu.out"], rtol=RELATIVE, atol=0)


def test_memory_constants_of_the_published_model(formats):
    primes = table_primes(ENGRAM)
    for row, layer in enumerate(ENGRAM.layer_ids):
        assert list(multipliers(ENGRAM, layer)) == formats["engram.multipliers"][row].tolist()
        assert [list(sizes) for sizes in primes[layer]] == formats["engram.primes"][row].tolist()
        sizes = np.array([size for group in primes[layer] for size in group])
        assert (np.cumsum(sizes) - sizes).tolist() == formats["engram.offsets"][row].tolist()
        assert sizes.sum() == ENGRAM.num_embeddings[row]


def test_memory_rows_of_the_published_model(formats):
    ids = formats["engram.compressed_ids"].astype(np.int32)
    padded = np.concatenate([np.full(3, ENGRAM.pad_token_id, np.int32), ids])
    history = np.stack([padded[3 - back : len(padded) - back] for back in range(4)], axis=1)
    for row, layer in enumerate(ENGRAM.layer_ids):
        found = table_rows(ENGRAM, layer, jnp.asarray(history))
        np.testing.assert_array_equal(found, formats["engram.rows"][:, row])


def test_memory_rows_of_the_small_model():
    results, folder = golden.read("v41-tiny/golden"), golden.CUT / "v41-tiny"
    engram = ModelConfig.from_file(folder).engram
    token_map = jnp.asarray(json.loads((folder / TOKEN_MAP_NAME).read_text()), jnp.int32)
    for n in (1, 2, 3, 33, 300):
        ids, expected = jnp.asarray(results[f"L{n}.ids"]), results[f"L{n}.engram_rows"]
        history = compressed_history(engram, token_map, ids, jnp.arange(max(0, n - 4), n))
        for at, layer in enumerate(engram.layer_ids):
            np.testing.assert_array_equal(table_rows(engram, layer, history), expected[:, at])


def test_memory_update(formats):
    payload = formats["engram_update.rows"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.asarray(number_formats.e8m0_to_float(jnp.asarray(formats["engram_update.row_scale"])))
    rows = (payload * scale).reshape(len(payload), -1)
    kv = (rows.astype(np.float64) @ formats["engram_update.wkv"].T.astype(np.float64)).astype(np.float32)
    kv = jnp.asarray(kv.reshape(len(rows), 5, -1))
    streams = jnp.asarray(formats["engram_update.streams"])
    weights = formats["engram_update.q_weight"], formats["engram_update.k_weight"]
    out = gated_update(streams, kv[:, :4], kv[:, 4], *map(jnp.asarray, weights), 1e-20)
    assert_close(out, formats["engram_update.out"])
    # With a value of one the update is the gate itself.
    gate = (
        gated_update(streams, kv[:, :4], jnp.ones_like(kv[:, 4]), *map(jnp.asarray, weights), 1e-20) - streams
    )
    expected = np.broadcast_to(formats["engram_update.gate"][..., None], gate.shape)
    largest = np.abs(np.asarray(streams)).max() + 1
    np.testing.assert_allclose(gate, expected, rtol=0, atol=RELATIVE * largest)
