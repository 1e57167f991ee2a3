"""What a kernel benchmark needs of an operation: a chain of calls to time, and random packed weights to feed it.

Knows: no operation. Does not know: how time is taken. Each operation's `bench.bench_case(spec)` makes a case.

A case walks through weights that together exceed every cache, and each call depends on the one before it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats, tiles
from pallas_kernels.tiles import PackedMatrix


class BenchCase(NamedTuple):
    """A chain to time.

    Attributes:
      chain: jitted; `chain(*arguments)` makes `calls` calls of the operation.
      bytes: weights and scales that one call has to read.
      kernels: names of the kernels of one call.
    """

    chain: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    calls: int
    bytes: int
    kernels: tuple[str, ...]


def random_fp4(seed: int, shape: PackedMatrix) -> PackedMatrix:
    """Packed FP4 weights of any codes, with scales of 2^-11 to 2^-4."""
    return _random_fp4(_key(seed), shape.words.shape, shape.scales.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_fp4(key: jax.Array, words: tuple[int, ...], scales: tuple[int, ...]) -> PackedMatrix:
    first, second = jax.random.split(key)
    fields = jax.random.randint(second, (4, *scales), 116, 124) - tiles.FP4_SCALE_BIAS
    packed = sum(fields[i] << bit for i, bit in enumerate(tiles.FP4_SCALE_BITS))
    return PackedMatrix(_bits(first, words), packed.astype(jnp.int32))


def random_fp8(seed: int, shape: PackedMatrix, block: int) -> PackedMatrix:
    """Packed FP8 weights, finite, with scales of 2^-12 to 2^-8 (one for all blocks of a chunk if `block` is 128)."""
    return _random_fp8(_key(seed), shape.words.shape, shape.scales.shape, block)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_fp8(key: jax.Array, words: tuple[int, ...], scales: tuple[int, ...], block: int) -> PackedMatrix:
    first, second = jax.random.split(key)
    byte = jax.random.randint(second, (*scales, 4), 115, 120).astype(jnp.uint8)
    if block == tiles.CHUNK:
        byte = jnp.broadcast_to(byte[..., :1], byte.shape)
        byte = jnp.repeat(byte[..., ::2, :], 2, axis=-2)
    finite = _bits(first, words) & jnp.int32(-0x01010102)  # no byte of seven ones
    return PackedMatrix(finite, jax.lax.bitcast_convert_type(byte, jnp.int32))


def random_bf16(seed: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """BF16 weights of a normal distribution, small enough that sums over a row stay near one."""
    return _random_bf16(_key(seed), shape.shape)


@functools.partial(jax.jit, static_argnums=1)
def _random_bf16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)


def random_rows(seed: int, shape: jax.ShapeDtypeStruct, block: int | None = None) -> jax.Array:
    """Activations of a normal distribution, rounded in blocks where the operation expects rounded ones."""
    x = jax.random.normal(_key(seed), shape.shape)
    if shape.dtype == jnp.float16:
        x = formats.fp8_round_trip(x, min(block, shape.shape[-1]))
    return x.astype(shape.dtype)


def _key(seed: int) -> jax.Array:
    """A key of the generator that compiles and runs fastest."""
    return jax.random.key(seed, impl="rbg")


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)
