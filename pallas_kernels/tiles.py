"""Tiles of 32 rows in which packed weights lie, and the packing of FP4 and FP8 matrices into them.

Knows: the bits and the order of a packed tile, and how to read it back. Does not know: what a matrix is for, or
how a kernel multiplies (`register_mma` shows why lanes own what they own).

Columns are padded with zeros to whole chunks of 128, rows to whole tiles of 32. A tile is contiguous.

    FP4 words   int32 [tiles, K / 32, 32 lanes, 4]    16 bytes a lane and block, 512 a warp
    FP4 scales  int32 [tiles, K / 128, 8, 4]          one word: rows g, g + 8, g + 16, g + 24 of a 32-column block
    FP8 words   int32 [tiles, K / 64, 4, 32 lanes, 4] rows g, g + 8, ...: 8 columns of one block, 8 of the next
    FP8 scales  int32 [tiles, K / 64]                 one word: 16 rows, the next 16, in one block; the same in the next
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats

ROWS = 8  # activation rows of a product
TILE = 32
BLOCK = 32
CHUNK = 128
LANES = 32
FP4_SCALE_BIAS = (
    50  # a packed exponent is the scale byte minus this: 64 to fit 7 bits, less the 14 of FP4_SHIFT
)
FP4_SHIFT = 14  # an unpacked FP4 code read as fp16 is the weight times 2^-14
FP4_GAIN = 2.0**64  # what sums over packed exponents must be multiplied with
HIDDEN_GAIN = (
    2.0**7
)  # the experts' hidden rows are kept in fp16 times this: every E4M3 step of a rounded row fits
_NEUTRAL = 127
# Bit positions of the four exponents of a word: the first becomes a float by one shift, the last by one mask.
FP4_SCALE_BITS = (0, 9, 16, 23)


class PackedMatrix(NamedTuple):
    """Packed words and scales of an FP4 or FP8 matrix, or of a stack of them with leading axes."""

    words: jax.Array
    scales: jax.Array

    @property
    def bytes(self) -> int:
        """Size in memory, scales included."""
        return 4 * (self.words.size + self.scales.size)


def padded(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padded(x.shape[axis], multiple) - x.shape[axis])
    return jnp.pad(x, widths)


def fp4_shape(rows: int, columns: int, *lead: int) -> PackedMatrix:
    """Shapes of a packed FP4 matrix."""
    count, chunks = padded(rows, TILE) // TILE, padded(columns, CHUNK) // CHUNK
    return PackedMatrix(
        jax.ShapeDtypeStruct((*lead, count, 4 * chunks, LANES, 4), jnp.int32),
        jax.ShapeDtypeStruct((*lead, count, chunks, 8, 4), jnp.int32),
    )


def fp8_shape(rows: int, columns: int, *lead: int) -> PackedMatrix:
    """Shapes of a packed FP8 matrix."""
    count, chunks = padded(rows, TILE) // TILE, padded(columns, CHUNK) // CHUNK
    return PackedMatrix(
        jax.ShapeDtypeStruct((*lead, count, 2 * chunks, 4, LANES, 4), jnp.int32),
        jax.ShapeDtypeStruct((*lead, count, 2 * chunks), jnp.int32),
    )


def pack_fp4(weight: jax.Array, scale: jax.Array, name: str = "weight") -> PackedMatrix:
    """FP4 weight [..., N, K/2] uint8 (low nibble first) with scale bytes [..., N, K/32] as tiles.

    The scale of a block of zeros is dropped. Raises ValueError where another one is outside 2^-76 .. 2^50: packed
    exponents have 7 bits. K must be a multiple of 32, N of 16.
    """
    n, k = weight.shape[-2], 2 * weight.shape[-1]
    if k % BLOCK or scale.shape != (*weight.shape[:-1], k // BLOCK):
        raise ValueError(
            f"{name} has scales of shape {scale.shape} for {n} rows of {k} columns, expected one per row "
            f"and {BLOCK} columns"
        )
    lowest, highest = FP4_SCALE_BIAS + 1, FP4_SCALE_BIAS + 127
    scale = _scales_in_use(weight, scale)
    if (worst := _misfit(scale, lowest, highest)) is not None:
        raise ValueError(
            f"{name} has an FP4 scale byte of {worst}, expected {lowest} to {highest} "
            f"(2^{lowest - 127} to 2^{highest - 127}); packed exponents have 7 bits"
        )
    return _packed_fp4(weight, scale)


def _misfit(scale: jax.Array, lowest: int, highest: int) -> int | None:
    """A scale byte outside the range, if there is one; shapes without values have none."""
    if isinstance(scale, jax.core.Tracer):
        return None
    wrong = np.asarray((scale < lowest) | (scale > highest))
    return int(np.asarray(scale)[wrong][0]) if np.any(wrong) else None


@jax.jit
def _scales_in_use(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale bytes with a neutral one where all weights of the block are zero, whatever their signs."""
    codes = weight.reshape(*scale.shape, BLOCK // 2) & 0x77
    return jnp.where(jnp.any(codes != 0, axis=-1), scale, jnp.uint8(_NEUTRAL))


@jax.jit
def _packed_fp4(weight: jax.Array, scale: jax.Array) -> PackedMatrix:
    lead = weight.shape[:-2]
    weight = _pad(_pad(weight, -1, CHUNK // 2), -2, TILE)
    tiles, blocks = weight.shape[-2] // TILE, weight.shape[-1] * 2 // BLOCK
    code = jnp.stack([weight & 0xF, weight >> 4], axis=-1)
    # Rows 16 * half + 8 * eight + g; columns 8 * q + 4 * step + 2 * pair + odd.
    code = code.reshape(
        -1, tiles, 2, 2, 8, blocks, 4, 2, 2, 2
    )  # [.., half, eight, g, block, q, step, pair, odd]
    code = code.transpose(
        0, 1, 5, 4, 6, 2, 7, 9, 3, 8
    )  # [.., tile, block, g, q, half, step, odd, eight, pair]
    sign, size = code >> 3, code & 7
    byte = (sign[..., 0] << 7) | (size[..., 0] << 1) | (size[..., 1] << 4) | sign[..., 1]
    byte = byte[..., ::-1]  # byte 2 * odd + (1 - eight)
    words = jax.lax.bitcast_convert_type(byte.reshape(*lead, tiles, blocks, LANES, 4, 4), jnp.int32)
    field = _pad(_pad(scale.astype(jnp.int32) - FP4_SCALE_BIAS, -1, CHUNK // BLOCK), -2, TILE)
    field = field.reshape(*lead, tiles, 4, 8, blocks // 4, 4)  # [.., tile, row / 8, g, chunk, block]
    field = jnp.moveaxis(field, -4, -1).swapaxes(-4, -3)
    return PackedMatrix(
        words, jnp.sum(field << jnp.array(FP4_SCALE_BITS, jnp.int32), axis=-1, dtype=jnp.int32)
    )


def unpack_fp4(packed: PackedMatrix) -> jax.Array:
    """The weights of FP4 tiles as float32 [..., N, K], padding included."""
    words, scales = packed
    lead, (tiles, blocks) = words.shape[:-4], words.shape[-4:-2]
    byte = jax.lax.bitcast_convert_type(words, jnp.uint8)
    byte = byte.reshape(-1, tiles, blocks, 8, 4, 2, 2, 2, 2)[..., ::-1]
    first = (byte >> 7 << 3) | (byte >> 1 & 7)
    code = jnp.stack([first, ((byte & 1) << 3) | (byte >> 4 & 7)], axis=-1)
    # [.., tile, block, g, q, half, step, odd, eight, pair] back to rows and columns
    code = code.transpose(0, 1, 5, 8, 3, 2, 4, 6, 9, 7)
    table = jnp.asarray(formats.E2M1_VALUES + tuple(-v for v in formats.E2M1_VALUES), jnp.float32)
    values = table[code.reshape(*lead, tiles * TILE, blocks, BLOCK)]
    field = (scales[..., None] >> jnp.array(FP4_SCALE_BITS, jnp.int32)) & 0x7F
    field = jnp.moveaxis(field.swapaxes(-4, -3), -1, -4).reshape(*lead, tiles * TILE, blocks)
    exponent = jnp.where(field > 0, field + FP4_SCALE_BIAS, 0)
    scale = jax.lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)
    return (values * scale[..., None]).reshape(*lead, tiles * TILE, blocks * BLOCK)


def pack_fp8(weight: jax.Array, scale: jax.Array, block: int, name: str = "weight") -> PackedMatrix:
    """FP8 weight [..., N, K] E4M3 with scale bytes [..., ceil(N/block), ceil(K/block)] as tiles.

    `block` is 128 or 32. Raises ValueError where a scale byte is 0 or 255 (2^-127 and NaN).
    """
    n, k = weight.shape[-2:]
    if block not in (BLOCK, CHUNK) or scale.shape[-2:] != (-(-n // block), -(-k // block)):
        raise ValueError(
            f"{name} has scales of shape {scale.shape} for {n} rows of {k} columns in blocks of {block}, "
            f"expected one per block of 32 x 32 or 128 x 128"
        )
    rows = scales_of_halves(scale, block, n)
    return pack_fp8_halves(weight, rows, block, name)


def scales_of_halves(scale: jax.Array, block: int, n: int) -> jax.Array:
    """Scale bytes per block of rows as bytes per 16 rows."""
    return jnp.repeat(scale, block // 16, axis=-2)[..., : -(-n // 16), :]


def pack_fp8_halves(weight: jax.Array, scale: jax.Array, block: int, name: str = "weight") -> PackedMatrix:
    """`pack_fp8` with scale bytes per 16 rows [..., ceil(N/16), ceil(K/block)]."""
    if (worst := _misfit(scale, 1, 254)) is not None:
        raise ValueError(f"{name} has an FP8 scale byte of {worst}, expected 1 to 254 (2^-126 to 2^127)")
    return _packed_fp8(weight, scale, block)


@functools.partial(jax.jit, static_argnums=2)
def _packed_fp8(weight: jax.Array, scale: jax.Array, block: int) -> PackedMatrix:
    lead, k = weight.shape[:-2], weight.shape[-1]
    byte = jax.lax.bitcast_convert_type(weight, jnp.uint8)
    byte = _pad(_pad(byte, -1, CHUNK), -2, TILE)
    tiles, halves = byte.shape[-2] // TILE, byte.shape[-1] // (2 * BLOCK)
    byte = byte.reshape(
        -1, tiles, 4, 8, halves, 2, 4, 8
    )  # [.., tile, row / 8, g, half chunk, block, q, column]
    byte = byte.transpose(0, 1, 4, 2, 3, 6, 5, 7)
    words = jax.lax.bitcast_convert_type(byte.reshape(*lead, tiles, halves, 4, LANES, 4, 4), jnp.int32)
    wide = jnp.repeat(scale, block // BLOCK, axis=-1)[..., : -(-k // BLOCK)]
    wide = _pad(_pad(wide, -1, CHUNK // BLOCK), -2, 2)
    wide = wide.reshape(*lead, tiles, 2, halves, 2)
    wide = jnp.moveaxis(wide, -3, -1).reshape(*lead, tiles, halves, 4)
    return PackedMatrix(words, jax.lax.bitcast_convert_type(wide, jnp.int32))


def unpack_fp8(packed: PackedMatrix) -> jax.Array:
    """The weights of FP8 tiles as float32 [..., N, K], padding included."""
    words, scales = packed
    lead, (tiles, halves) = words.shape[:-5], words.shape[-5:-3]
    byte = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1, tiles, halves, 4, 8, 4, 2, 8)
    byte = byte.transpose(0, 1, 3, 4, 2, 6, 5, 7).reshape(*lead, tiles * TILE, halves * 2 * BLOCK)
    values = jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, tiles, halves * 2, 2)
    scale = scale.swapaxes(-2, -1).reshape(*lead, tiles * 2, halves * 2).astype(jnp.uint32) << 23
    scale = jax.lax.bitcast_convert_type(scale, jnp.float32)
    return values * jnp.repeat(jnp.repeat(scale, 16, axis=-2), BLOCK, axis=-1)
