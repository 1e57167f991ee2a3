"""How a model computes: number types, simulated quantisation, and the form its weights are kept in.

Knows: the choices that change the arithmetic of every part, and the shared small operations (norm, linear,
rotary tables). Does not know: any layer.
"""

import dataclasses
import math
from collections.abc import Callable

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.config import ModelConfig, RopeConfig


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Choices that hold for a whole model.

    Attributes:
      dtype: type of activations and caches, float32 or bfloat16.
      quantise: apply the reference's activation, cache and index rounding (`qat` mode); False is `exact`.
      packed: keep quantised weights in their stored payload and decode them inside the computation; False
        keeps weights already decoded to `dtype` (small models, training).
    """

    dtype: jnp.dtype = jnp.float32
    quantise: bool = False
    packed: bool = True

    @property
    def precision(self):
        """Full float32 products where float32 is asked for (no TF32 or bf16 passes on a GPU)."""
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    @property
    def plain(self):
        """Type of the weights that are published in bf16."""
        return jnp.bfloat16 if self.packed else self.dtype

    def product(self, equation: str, *operands: jax.Array) -> jax.Array:
        """An einsum that accumulates in float32 and returns float32."""
        return jnp.einsum(equation, *operands, precision=self.precision, preferred_element_type=jnp.float32)

    def exact_product(self, equation: str, *operands: jax.Array) -> jax.Array:
        """An einsum the reference insists on computing in float32, whatever `dtype` is."""
        operands = [operand.astype(jnp.float32) for operand in operands]
        return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's type.

    An all-zero row gives zeros for any eps. Source: DeepSeek inference/model.py.
    """
    wide = x.astype(jnp.float32)
    wide = wide * inverse_rms(wide, eps)
    if weight is not None:
        wide = wide * weight.astype(jnp.float32)
    return wide.astype(x.dtype)


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """rsqrt(mean(x^2) + eps) over the last axis (kept), float32; finite for all-zero rows."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return jax.lax.rsqrt(jnp.maximum(mean + eps, jnp.finfo(jnp.float32).tiny))


class Norm(nnx.Module):
    """A weighted RMS norm; parameter `weight` [width]."""

    def __init__(self, width: int, eps: float, numerics: Numerics):
        self.weight = nnx.Param(jnp.ones((width,), numerics.plain))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Linear(nnx.Module):
    """y = x W^T without bias; W [N, K] stored as block FP8 ('fp8'), FP4 ('fp4') or plain bf16 ('bf16').

    `experts` adds a leading axis. In decoded form quantised weights are arrays of the computation's type and
    carry no scale. `round_input` says that the reference quantises the activations of this product.
    """

    def __init__(
        self,
        n: int,
        k: int,
        storage: str,
        config: ModelConfig,
        numerics: Numerics,
        *,
        experts: int | None = None,
        round_input: bool = True,
    ):
        lead = () if experts is None else (experts,)
        self.storage = storage
        self.block = config.weight_block_size
        self.numerics = numerics
        self.round_input = round_input and storage != "bf16"
        scale = None
        if storage == "bf16":
            self.weight = nnx.Param(jnp.zeros((*lead, n, k), numerics.plain))
        elif not numerics.packed:
            self.weight = nnx.Param(jnp.zeros((*lead, n, k), numerics.dtype))
        elif storage == "fp8":
            self.weight = nnx.Param(jnp.zeros((*lead, n, k), jnp.float8_e4m3fn))
            scale = nnx.Param(jnp.zeros((*lead, -(-n // self.block), -(-k // self.block)), jnp.uint8))
        elif storage == "fp4":
            self.weight = nnx.Param(jnp.zeros((*lead, n, k // 2), jnp.uint8))
            scale = nnx.Param(jnp.zeros((*lead, n, k // formats.FP4_GROUP), jnp.uint8))
        else:
            raise ValueError(f"storage is {storage!r}, expected fp8, fp4 or bf16")
        self.scale = scale

    def decoded(self, index: jax.Array | None = None) -> jax.Array:
        """The weight in the computation's type; `index` picks experts (any integer array) before decoding."""
        return self._decoded(lambda array: array if index is None else array[index])

    def decoded_rows(self, expert: jax.Array, start: jax.Array, count: int) -> jax.Array:
        """`count` rows of one expert's weight from row `start` on; whole blocks of rows, where blocks share a scale."""

        def rows(array: jax.Array) -> jax.Array:
            each = self.weight.shape[-2] // array.shape[-2]
            sizes = (1, count // each, array.shape[-1])
            return jax.lax.dynamic_slice(array, (expert, start // each, 0), sizes)[0]

        return self._decoded(rows)

    def _decoded(self, part: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A part of the weight, picked from the stored payload and from its scales alike."""
        weight = part(self.weight[...])
        if self.scale is None:
            return weight.astype(self.numerics.dtype)
        scale = part(self.scale[...])
        if self.storage == "fp8":
            return formats.decode_fp8(weight, scale, self.block).astype(self.numerics.dtype)
        return formats.decode_fp4(weight, scale).astype(self.numerics.dtype)

    def rounded_input(self, x: jax.Array) -> jax.Array:
        """Activations as the reference feeds them to this product."""
        x = x.astype(self.numerics.dtype)
        if self.numerics.quantise and self.round_input:
            return formats.fp8_round_trip(x, min(self.block, x.shape[-1]))
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.numerics.product("...k,nk->...n", self.rounded_input(x), self.decoded())
        return y.astype(self.numerics.dtype)


def rope_frequencies(rope: RopeConfig, dims: int) -> np.ndarray:
    """Angular frequency of each pair [dims / 2], float32, with YaRN interpolation where `factor` > 1.

    Source: YaRN as used by DeepSeek inference/model.py (no magnitude scaling).
    """
    frequencies = rope.theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
    if rope.factor == 1.0:
        return frequencies.astype(np.float32)

    def corrected(rotations: float) -> float:
        return (
            dims
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(corrected(rope.beta_fast)), 0)
    high = min(math.ceil(corrected(rope.beta_slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (frequencies / rope.factor * ramp + frequencies * (1 - ramp)).astype(np.float32)


def rotate(
    x: jax.Array, positions: jax.Array, frequencies: np.ndarray, *, inverse: bool = False
) -> jax.Array:
    """Rotates the last 2 * len(frequencies) dims of x by position, as adjacent (even, odd) pairs.

    Args: x [T, ..., d]; positions int32 [T]. Angles are the float32 product position * frequency.
    """
    dims = 2 * frequencies.shape[0]
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 2), -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    sin = -sin if inverse else sin
    kept, turned = x[..., :-dims], x[..., -dims:].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([kept, turned.astype(x.dtype)], axis=-1)
