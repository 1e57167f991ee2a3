"""Engram: a hashed n-gram memory added to the residual streams of a few V4.1 layers.

Knows: the hashing constants that follow from the configuration, the table rows of each position, and the
gated update. Does not know: how the token map is derived from a tokenizer (checkpoint/engram_map.py).

Source: DeepSeek inference/engram.py. Products of a 17-bit id and a 47-bit multiplier need 64 bits; they are
kept here as two uint32 halves so that no 64-bit mode is required on any device.
"""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.config import EngramConfig, ModelConfig
from v4flash.model.numerics import Linear, Numerics, inverse_rms
from v4flash.state import ring_read

TABLE_GROUP = 32
_MINIMUM_DOT = 1e-6
_SEED = 10007


@functools.cache
def multipliers(engram: EngramConfig, layer: int) -> tuple[int, ...]:
    """Odd hashing multipliers of one layer, one for each n-gram offset."""
    bound = ((2**63 - 1) // engram.compressed_vocab_size) // 2
    draws = np.random.default_rng(_SEED * layer).integers(
        0, bound, size=engram.max_ngram_size, dtype=np.int64
    )
    return tuple(int(draw) * 2 + 1 for draw in draws)


@functools.cache
def table_primes(engram: EngramConfig) -> dict[int, tuple[tuple[int, ...], ...]]:
    """For each Engram layer, the primes [n-gram size - 2][head] that size its sub-tables; no prime is reused."""
    used: set[int] = set()
    tables = {}
    for layer in engram.layer_ids:
        sizes = []
        for _ in range(engram.max_ngram_size - 1):
            candidate, primes = engram.vocab_size - 1, []
            while len(primes) < engram.n_heads:
                candidate += 1
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    primes.append(candidate)
            sizes.append(tuple(primes))
        tables[layer] = tuple(sizes)
    return tables


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def _product(value: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) uint32 halves of value * factor for value < 2^20 and a product below 2^63."""
    limbs = [(factor >> shift) & 0xFFF for shift in (0, 12, 24)] + [factor >> 36]
    value = value.astype(jnp.uint32)
    parts, carry = [], jnp.zeros_like(value)
    for limb in limbs:
        part = value * jnp.uint32(limb) + carry
        parts.append(part)
        carry = part >> 12
    low = (parts[0] & 0xFFF) | ((parts[1] & 0xFFF) << 12) | (parts[2] << 24)
    high = ((parts[2] >> 8) & 0xF) | (parts[3] << 4)
    return high, low


def _remainder(high: jax.Array, low: jax.Array, modulus: int) -> jax.Array:
    """(high * 2^32 + low) mod modulus in uint32 steps that never overflow."""
    bits = next((step for step in (8, 4, 2, 1) if modulus <= 1 << (32 - step)), None)
    if bits is None:
        raise ValueError(f"Engram table size {modulus} exceeds 2^31")
    rest = high % jnp.uint32(modulus)
    for shift in range(32 - bits, -1, -bits):
        rest = ((rest << bits) | ((low >> shift) & ((1 << bits) - 1))) % jnp.uint32(modulus)
    return rest


def table_rows(engram: EngramConfig, layer: int, history: jax.Array) -> jax.Array:
    """Table rows int32 [T, columns] of each position of one layer.

    `history` int32 [T, max_ngram_size]: compressed ids at offsets 0, 1, ... back; positions before the start
    hold the pad id. Column (n - 2) * heads + k is the n-gram hash modulo that head's prime, plus its offset.
    """
    rows, offset = [], 0
    high = low = jnp.zeros(history.shape[:1], jnp.uint32)
    factors, primes = multipliers(engram, layer), table_primes(engram)[layer]
    for back, factor in enumerate(factors):
        part_high, part_low = _product(history[:, back], factor)
        high, low = high ^ part_high, low ^ part_low
        if back == 0:
            continue
        for prime in primes[back - 1]:
            rows.append(_remainder(high, low, prime).astype(jnp.int32) + offset)
            offset += prime
    return jnp.stack(rows, axis=1)


def gated_update(
    streams: jax.Array, key: jax.Array, value: jax.Array, q_weight: jax.Array, k_weight: jax.Array, eps: float
) -> jax.Array:
    """x_s + sigmoid(signed sqrt of the scaled similarity of stream and key) * value, per stream.

    Args: streams, key [T, S, D]; value [T, D]; q_weight, k_weight [S, D]. The sign of zero is +1.
    """
    x, k = streams.astype(jnp.float32), key.astype(jnp.float32)
    weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    dot = jnp.sum(x * weight * k, axis=-1, keepdims=True) * inverse_rms(x, eps) * inverse_rms(k, eps)
    dot = dot * x.shape[-1] ** -0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), _MINIMUM_DOT))
    gate = jax.nn.sigmoid(jnp.where(dot < 0, -root, root))
    return (x + gate * value.astype(jnp.float32)[:, None]).astype(streams.dtype)


class EngramTable(nnx.Module):
    """Rows of the memory: E4M3 payload [rows, head_dim] with one scale byte per 32, or decoded."""

    def __init__(self, rows: int, width: int, numerics: Numerics):
        self.numerics = numerics
        scale = None
        if numerics.packed:
            self.weight = nnx.Param(jnp.zeros((rows, width), jnp.float8_e4m3fn))
            scale = nnx.Param(jnp.zeros((rows, width // TABLE_GROUP), jnp.uint8))
        else:
            self.weight = nnx.Param(jnp.zeros((rows, width), numerics.dtype))
        self.scale = scale

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Decoded rows for ids [T, C]: [T, C, width], in the computation's type."""
        rows = self.weight[...][ids].astype(jnp.float32)
        if self.scale is not None:
            rows = rows * jnp.repeat(formats.e8m0_to_float(self.scale[...][ids]), TABLE_GROUP, axis=-1)
        return rows.astype(self.numerics.dtype)


class Engram(nnx.Module):
    """The memory of one layer; parameters embed, wkv [(S + 1) D, columns * head_dim], q_weight, k_weight [S, D]."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics):
        engram = config.engram
        rows = engram.num_embeddings[engram.layer_ids.index(layer)]
        needed = sum(sum(primes) for primes in table_primes(engram)[layer])
        if needed != rows:
            raise ValueError(f"engram_num_embeddings of layer {layer} is {rows}, the hash needs {needed}")
        width = config.hidden_size
        self.config, self.layer = config, layer
        self.embed = EngramTable(rows, engram.head_dim, numerics)
        self.wkv = Linear(
            (config.hc_mult + 1) * width, engram.columns * engram.head_dim, "fp8", config, numerics
        )
        self.q_weight = nnx.Param(jnp.ones((config.hc_mult, width), numerics.plain))
        self.k_weight = nnx.Param(jnp.ones((config.hc_mult, width), numerics.plain))

    def __call__(self, streams: jax.Array, history: jax.Array) -> jax.Array:
        """Streams [T, S, D] with the memory of their n-grams added; history as in `table_rows`."""
        config = self.config
        rows = self.embed(table_rows(config.engram, self.layer, history)).reshape(streams.shape[0], -1)
        kv = self.wkv(rows).reshape(streams.shape[0], config.hc_mult + 1, config.hidden_size)
        return gated_update(
            streams, kv[:, :-1], kv[:, -1], self.q_weight[...], self.k_weight[...], config.rms_norm_eps
        )


def compressed_history(
    engram: EngramConfig, token_map: jax.Array, ring: jax.Array, positions: jax.Array
) -> jax.Array:
    """Compressed ids [T, max_ngram_size] at each position and the ones before it.

    Args: token_map int32 [V]; ring int32 [R] of token ids with this pass's rows already written.
    """
    back = positions[:, None] - jnp.arange(engram.max_ngram_size, dtype=jnp.int32)
    ids = token_map[ring_read(ring, back)]
    return jnp.where(back >= 0, ids, token_map[engram.pad_token_id])
