"""Packed FP4 and FP8 tiles: reading them back gives the published format's numbers, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats, tiles


def _bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def every_byte(*shape: int) -> jnp.ndarray:
    """Bytes in which each value occurs."""
    rng = np.random.default_rng(0)
    made = rng.integers(0, 256, shape, dtype=np.uint8)
    made.reshape(-1)[:256] = np.arange(256)
    return jnp.asarray(made)


def e4m3(*shape: int) -> jnp.ndarray:
    """E4M3 numbers, every finite one among them."""
    byte = np.asarray(every_byte(*shape)).copy()
    byte[(byte & 0x7F) == 0x7F] = 0x80
    return jnp.asarray(byte.view(formats.jnp.float8_e4m3fn))


def scales(low: int, high: int, *shape: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(1).integers(low, high + 1, shape, dtype=np.uint8))


@pytest.mark.parametrize(("lead", "n", "k"), [((), 64, 256), ((3,), 32, 96), ((2,), 48, 128)])
def test_fp4_tiles_hold_the_published_numbers(lead, n, k):
    weight, scale = every_byte(*lead, n, k // 2), scales(51, 177, *lead, n, k // 32)
    packed = tiles.pack_fp4(weight, scale)
    shape = tiles.fp4_shape(n, k, *lead)
    assert (packed.words.shape, packed.scales.shape) == (shape.words.shape, shape.scales.shape)
    unpacked = np.asarray(tiles.unpack_fp4(packed))
    assert np.array_equal(_bits(unpacked[..., :n, :k]), _bits(formats.decode_fp4(weight, scale)))
    assert not unpacked[..., n:, :].any() and not unpacked[..., k:].any()


@pytest.mark.parametrize(
    ("lead", "n", "k", "block"),
    [((), 64, 256, 128), ((), 256, 384, 128), ((2,), 96, 96, 32), ((), 64, 160, 32), ((), 48, 96, 128)],
)
def test_fp8_tiles_hold_the_published_numbers(lead, n, k, block):
    weight, scale = e4m3(*lead, n, k), scales(1, 254, *lead, -(-n // block), -(-k // block))
    packed = tiles.pack_fp8(weight, scale, block)
    shape = tiles.fp8_shape(n, k, *lead)
    assert (packed.words.shape, packed.scales.shape) == (shape.words.shape, shape.scales.shape)
    unpacked = np.asarray(tiles.unpack_fp8(packed))
    assert np.array_equal(_bits(unpacked[..., :n, :k]), _bits(formats.decode_fp8(weight, scale, block)))
    assert not unpacked[..., n:, :].any() and not unpacked[..., k:].any()


def test_the_scale_of_an_empty_block_may_be_anything():
    weight = np.full((32, 32), 0x11, np.uint8)
    weight[3, :16] = 0x80  # zeros of both signs
    scale = np.full((32, 2), 127, np.uint8)
    scale[3, 0] = 5
    unpacked = np.asarray(tiles.unpack_fp4(tiles.pack_fp4(jnp.asarray(weight), jnp.asarray(scale))))
    assert not unpacked[3, :32].any() and (unpacked[4, :32] == 0.5).all()


@pytest.mark.parametrize("byte", [50, 178])
def test_fp4_scales_out_of_range_are_refused(byte):
    scale = np.full((32, 2), 120, np.uint8)
    scale[7, 1] = byte
    with pytest.raises(ValueError, match=rf"w1 has an FP4 scale byte of {byte}, expected 51 to 177"):
        tiles.pack_fp4(jnp.full((32, 32), 0x11, jnp.uint8), jnp.asarray(scale), "w1")


@pytest.mark.parametrize("byte", [0, 255])
def test_fp8_scales_out_of_range_are_refused(byte):
    with pytest.raises(ValueError, match=f"FP8 scale byte of {byte}"):
        tiles.pack_fp8(e4m3(32, 32), jnp.full((1, 1), byte, jnp.uint8), 32)
