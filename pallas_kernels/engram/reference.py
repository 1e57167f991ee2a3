"""What an Engram layer does before and after its product, in plain jax.numpy.

Knows: which table rows a position reads, how they become the input of the product, and the gated update of the
streams. Does not know: the product between the two (`dense`), or where the primes come from.

    tokens --map, hash--> table rows --decode, round--> rows --wkv--> key [S, D], value [D]
    streams + gate(streams, key) * value

Source: DeepSeek inference/engram.py. A hash is a 64-bit number, kept here as two uint32 halves.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.engram.specs import EngramSpec
from pallas_kernels.hyper_connections.reference import inverse_rms

TABLE_GROUP = 32
MINIMUM_DOT = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The table of one layer and the constants of its hashes.

    Attributes:
      payload: uint8 [rows, W], E4M3 bytes, or float [rows, W] already decoded.
      scale: uint8 [rows, W / 32], E8M0 bytes, or None.
      token_map: int32 [V], compressed ids.
      multipliers: uint32 [ngrams, 2], low and high halves, one for each token of an n-gram.
      primes: int32 [C], the size of each hash's sub-table; offsets: int32 [C], where it starts.
    """

    payload: jax.Array
    scale: jax.Array | None
    token_map: jax.Array
    multipliers: jax.Array
    primes: jax.Array
    offsets: jax.Array


def history(spec: EngramSpec, memory: Memory, ring: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """Compressed ids int32 [R, ngrams] at positions start, start + 1, ... and the ones before each.

    `ring` int32 [N] holds token ids by position modulo N, this pass's rows included.
    """
    back = start + jnp.arange(rows)[:, None] - jnp.arange(spec.ngrams)
    tokens = jnp.where(back >= 0, ring[back % ring.shape[0]], spec.pad)
    return memory.token_map[tokens]


def table_rows(spec: EngramSpec, memory: Memory, ids: jax.Array) -> jax.Array:
    """Table rows int32 [R, C]: of each n-gram size, the product hash modulo each head's prime, plus its offset."""
    high = low = jnp.zeros(ids.shape[:1], jnp.uint32)
    hashes = []
    for place in range(spec.ngrams):
        more_high, more_low = _product(ids[:, place].astype(jnp.uint32), *memory.multipliers[place])
        high, low = high ^ more_high, low ^ more_low
        hashes += [(high, low)] * (spec.heads if place else 0)
    rests = [
        _remainder(*halves, prime.astype(jnp.uint32))
        for halves, prime in zip(hashes, memory.primes, strict=True)
    ]
    return jnp.stack(rests, axis=1).astype(jnp.int32) + memory.offsets


def _product(value: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) halves of value * (high * 2^32 + low), modulo 2^64, for value < 2^32, by 16-bit digits."""
    small, large = value & 0xFFFF, value >> 16
    bottom, top = low & 0xFFFF, low >> 16
    first, cross, turned = small * bottom, small * top, large * bottom
    middle = (first >> 16) + (cross & 0xFFFF) + (turned & 0xFFFF)
    carried = large * top + (cross >> 16) + (turned >> 16) + (middle >> 16)
    return carried + value * high, (first & 0xFFFF) | (middle << 16)


def _remainder(high: jax.Array, low: jax.Array, modulus: jax.Array) -> jax.Array:
    """(high * 2^32 + low) mod modulus, bit by bit, for a modulus below 2^31."""

    def take(bit, rest):
        word = jnp.where(bit < 32, high, low)
        return ((rest << 1) | ((word >> (31 - bit % 32).astype(jnp.uint32)) & 1)) % modulus

    return jax.lax.fori_loop(0, 64, take, jnp.zeros_like(low))


def lookup(spec: EngramSpec, memory: Memory, ring: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """The product's input, float16 [R, C * W]: the decoded table rows side by side, rounded as activations."""
    chosen = table_rows(spec, memory, history(spec, memory, ring, start, rows))
    if memory.scale is None:
        values = memory.payload[chosen].astype(jnp.float32)
    else:
        payload = jax.lax.bitcast_convert_type(memory.payload[chosen], jnp.float8_e4m3fn).astype(jnp.float32)
        values = payload * jnp.repeat(formats.e8m0_to_float(memory.scale[chosen]), TABLE_GROUP, axis=-1)
    values = values.astype(spec.type).reshape(rows, -1)
    if spec.block:
        values = formats.fp8_round_trip(values, min(spec.block, values.shape[1]))
    return values.astype(jnp.float16)


def merge(
    spec: EngramSpec, streams: jax.Array, partials: jax.Array, q_weight: jax.Array, k_weight: jax.Array
) -> jax.Array:
    """Streams [R, S, D] with the memory added.

    Args: partials float32 [P, R, (S + 1) D], the product in parts: S keys, then the value; q_weight, k_weight
    [S, D]. The sign of a zero similarity is +1.
    """
    product = jnp.sum(partials, axis=0).astype(spec.type).reshape(-1, spec.streams + 1, spec.width)
    x, key = streams.astype(jnp.float32), product[:, :-1].astype(jnp.float32)
    value = product[:, -1:].astype(jnp.float32)
    weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    dot = (
        jnp.sum(x * weight * key, axis=-1, keepdims=True)
        * inverse_rms(x, spec.eps)
        * inverse_rms(key, spec.eps)
    )
    dot = dot * spec.width**-0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), MINIMUM_DOT))
    gate = jax.nn.sigmoid(jnp.where(dot < 0, -root, root))
    return (x + gate * value).astype(streams.dtype)
