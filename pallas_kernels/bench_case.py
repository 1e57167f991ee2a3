"""One operation at one model's shapes as a case to check and to time, and random operands for it.

Knows: no operation. Does not know: how time is taken, or how a case is compiled for what is being done with it. Each
operation's `bench.cases()` makes its cases; `registry` lists them all.

A chain of calls walks through weights or caches that together exceed every cache, and each call depends on the one
before it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats, launch, tiles
from pallas_kernels.tiles import PackedMatrix
from pallas_kernels.tuning import Choice

MODELS = ("v4-flash", "v4.1-flash", "demo")
Outputs = dict[str, jax.Array]

# Errors that a right body may have, as `error` counts them.
EXACT = 0.0
SUMS = 1e-5  # float32 sums of the same numbers in another order
HALVES = 4e-3  # such sums rounded to bfloat16: a few roundings fall to the other side, 2^-8 apart
ROUNDED = 1e-2  # and then to E4M3: one row's element in forty may fall to the other side, 2^-4 apart
ROUNDED_FP4 = 3e-2  # to E2M1: its steps are 2^-2 to 2^-1 apart

_WALK, _MOST_CALLS = 1 << 29, 32  # bytes of different weights that a chain walks through
# Roundings of a definition are real only where XLA may not keep a number more exactly than its type.
EXACT_TYPES = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class PublicProduct:
    """The products of a case as public kernels know them: rows of activations by weights [rows, columns].

    Attributes:
      format: of the weights, 'bf16', 'fp8' or 'fp4'.
      sizes: (rows, columns) of each weight, or of each expert's.
      experts, routed: different experts, and rows that go to them altogether; 0 for a plain product of 8 rows.
    """

    format: str
    sizes: tuple[tuple[int, int], ...]
    experts: int = 0
    routed: int = 0

    def asked(self, name: str) -> dict[str, Any]:
        """As JSON, with the name of the case."""
        return {"name": name} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class OperationCase:
    """An operation with operands of one model's shapes.

    Attributes:
      operation: its folder in pallas_kernels.
      name: the model first, then what is computed.
      kernels: names of the kernels of one call, as a profile shows them.
      bytes: what one call has to read: weights, scales, tables and cached rows, and where an operation has little of
        these its products and streams too.
      calls: calls of a chain.
      operands: operands(calls) gives what all calls share, and what each of them has of its own.
      fused: (shared, own) -> the outputs by name, and the shared operands of the next call, which depend on them.
      reference: (shared, own) -> the same outputs by the operation's definition.
      tolerances: the largest `error` of each output.
      interpreted: whether an interpreter can run the body at this size (Triton's has no tensor core instructions).
      capability: the one compute capability that the fused body is written for, None if it is for all of them.
      choices: tile choices worth trying, by their name in the operation's tuning files. Of a name that several cases
        have, all must have the same.
      public: what public kernels could compute in its place, to time them beside it.
    """

    operation: str
    name: str
    kernels: tuple[str, ...]
    bytes: int
    calls: int
    operands: Callable[[int], tuple[Any, Sequence[Any]]]
    fused: Callable[[Any, Any], tuple[Outputs, Any]]
    reference: Callable[[Any, Any], Outputs]
    tolerances: Mapping[str, float]
    interpreted: bool = False
    capability: str | None = None
    choices: Mapping[str, Sequence[Choice]] = dataclasses.field(default_factory=dict)
    public: PublicProduct | None = None

    @property
    def model(self) -> str:
        return model_of(self.name)

    def shapes(self, calls: int = 1) -> tuple[Any, Sequence[Any]]:
        """The operands of a chain as shapes; nothing is computed."""
        return jax.eval_shape(lambda: self.operands(calls))

    def chain(self, shared: Any, walked: Sequence[Any]) -> Any:
        """A call for each of `walked`, one behind the other: the last call's `shared` for a next one."""
        for own in walked:
            _, shared = self.fused(shared, own)
        return shared

    def compiled_pair(self) -> Callable[[], "Pair"]:
        """Compiles both bodies for the default device; the result runs them on the same operands."""
        shared, (own,) = self.shapes()
        options = EXACT_TYPES | ({"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {})
        reference = jax.jit(self.reference).lower(shared, own).compile(compiler_options=options)
        fused = self.fused if launch.INTERPRETED else jax.jit(self.fused).lower(shared, own).compile()

        def run() -> Pair:
            shared, (own,) = self.operands(1)
            made = fused(shared, own)[0]
            repeats = launch.INTERPRETED or same_bits(made, fused(shared, own)[0])
            return Pair(made, reference(shared, own), repeats)

        return run

    def pair(self) -> "Pair":
        """What the fused body and the definition give on the same operands."""
        return self.compiled_pair()()


class Pair(NamedTuple):
    """Outputs of both bodies; whether a second fused call gave the same bits (not tried in the interpreter)."""

    fused: Outputs
    reference: Outputs
    repeats: bool


def same_bits(first: Outputs, second: Outputs) -> bool:
    def bits(array: jax.Array) -> bytes:
        return np.asarray(array).tobytes()

    return all(bits(value) == bits(second[name]) for name, value in first.items())


def model_of(name: str) -> str:
    """The model that a case or a specification of this name belongs to."""
    return name.split()[0]


def calls_for(size: int) -> int:
    """How many calls of a chain walk through more than the caches hold, when each reads `size` bytes of its own."""
    return max(4, min(_MOST_CALLS, _WALK // size))


def error(found: jax.Array, expected: jax.Array) -> float:
    """||found - expected|| / ||expected||; of integers the share that differs. Infinite where `found` is not finite."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        raise ValueError(f"found shape {found.shape}, expected {expected.shape}")
    if expected.dtype.kind in "iu":
        return float(np.mean(found != expected))
    found, expected = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    if not np.all(np.isfinite(found)):
        return float("inf")
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays or shapes of a tree."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def nudged(x: jax.Array, by: jax.Array) -> jax.Array:
    """`x` made to depend on `by`, a number or a column for each row, without moving."""
    return x + (1e-30 * by.astype(jnp.float32)).astype(x.dtype)


def normal(seed: int, *shape: int, dtype=jnp.float32, scale: float = 1.0) -> jax.Array:
    """Random numbers of a normal distribution."""
    return _normal(key(seed), shape, jnp.dtype(dtype), scale)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype, scale: float) -> jax.Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random_fp4(seed: int, shape: PackedMatrix) -> PackedMatrix:
    """Packed FP4 weights of any codes, with scales of 2^-11 to 2^-4."""
    return _random_fp4(key(seed), shape.words.shape, shape.scales.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_fp4(key: jax.Array, words: tuple[int, ...], scales: tuple[int, ...]) -> PackedMatrix:
    first, second = jax.random.split(key)
    fields = jax.random.randint(second, (4, *scales), 116, 124) - tiles.FP4_SCALE_BIAS
    packed = sum(fields[i] << bit for i, bit in enumerate(tiles.FP4_SCALE_BITS))
    return PackedMatrix(_bits(first, words), packed.astype(jnp.int32))


def random_fp8(seed: int, shape: PackedMatrix, block: int) -> PackedMatrix:
    """Packed FP8 weights, finite, with scales of 2^-12 to 2^-8 (one for all blocks of a chunk if `block` is 128)."""
    return _random_fp8(key(seed), shape.words.shape, shape.scales.shape, block)


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
    return _random_bf16(key(seed), shape.shape)


@functools.partial(jax.jit, static_argnums=1)
def _random_bf16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)


def random_rows(seed: int, shape: jax.ShapeDtypeStruct, block: int | None = None) -> jax.Array:
    """Activations of a normal distribution, rounded in blocks where the operation expects rounded ones."""
    x = jax.random.normal(key(seed), shape.shape)
    if shape.dtype == jnp.float16:
        x = formats.fp8_round_trip(x, min(block, shape.shape[-1]))
    return x.astype(shape.dtype)


def key(seed: int) -> jax.Array:
    """A key of the generator that compiles and runs fastest."""
    return jax.random.key(seed, impl="rbg")


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)
