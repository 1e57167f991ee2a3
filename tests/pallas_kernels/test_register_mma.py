"""Each instruction sequence of the weight-streaming kernels, run by the PTX emulator on one warp."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import formats, tiles
from pallas_kernels.register_mma import text

LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4
# A sum of 32 products of float32 terms, in two orders.
SUM_TOLERANCE = 1e-6
# FP4 sums are kept divided by 2^64; below 2^-126 a float32 has steps of 2^-149.
FP4_STEP = 2.0**-85


def _run(assembly: str, outputs: int, kind: str, inputs: list[np.ndarray]) -> np.ndarray:
    kinds = ["=&" + kind] * outputs + ["f" if x.dtype == np.float32 else "r" for x in inputs]
    return np.stack(ptx_emulator.run(assembly, ",".join(kinds), inputs))


def _columns(rows: np.ndarray) -> list[np.ndarray]:
    """16-bit rows [8, 32] as the four words of each lane: its 8 consecutive columns of row g."""
    words = np.ascontiguousarray(rows).view(np.int32).reshape(8, 4, 4)
    return [words[G, Q, i] for i in range(4)]


def _sums(lanes: np.ndarray) -> np.ndarray:
    """Lane sums [8 or 4, 32] as [weight rows, 8]."""
    made = np.zeros((4 * len(lanes), 8), np.float32)
    for slot, values in enumerate(lanes):
        made[16 * (slot // 4) + 8 * (slot // 2 % 2) + G, 2 * Q + slot % 2] = values
    return made


def _activations(dtype) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(8, 32)).astype(dtype)


def test_fp4_block_multiplies_every_code():
    """Each word is made of all codes in every place; scales cover the whole packed range."""
    rng = np.random.default_rng(3)
    x = _activations(np.float16)
    for start in range(0, 256, 16):
        byte = (np.arange(32 * 16).reshape(32, 16) * 7 + start).astype(np.uint8)
        scale = rng.integers(110, 130, (32, 4), dtype=np.uint8)
        scale[:2] = [[51] * 4, [177] * 4]
        wide = jnp.asarray(np.concatenate([byte] * 4, axis=1))
        words, scales = tiles.pack_fp4(wide, jnp.asarray(scale))
        lanes = np.asarray(words)[0, 2]
        fields = np.asarray(scales)[0, 0]
        inputs = [np.ascontiguousarray(lanes[:, i]) for i in range(4)] + _columns(x)
        inputs += [fields[G, i] for i in range(4)] + [np.zeros(32, np.float32)] * 8
        found = _sums(_run(text.fp4_block(2), 8, "f", inputs)).astype(np.float64) * tiles.FP4_GAIN
        weight = np.asarray(formats.decode_fp4(wide, jnp.asarray(scale)), np.float64)[:, 64:96]
        size = np.abs(weight) @ np.abs(x.astype(np.float64)).T
        assert (np.abs(found - weight @ x.astype(np.float64).T) <= SUM_TOLERANCE * size + 32 * FP4_STEP).all()


def test_fp4_words_unpack_exactly():
    """One-hot activations read single weights back: every code, both signs, in every place of a word."""
    for column in range(32):
        x = np.zeros((8, 32), np.float16)
        x[:, column] = 1
        byte = ((np.arange(32)[:, None] + np.arange(16)) * 17 % 256).astype(np.uint8)
        weight, scale = np.concatenate([byte] * 4, axis=1), np.full((32, 4), 127, np.uint8)
        words, scales = tiles.pack_fp4(jnp.asarray(weight), jnp.asarray(scale))
        lanes, fields = np.asarray(words)[0, 0], np.asarray(scales)[0, 0]
        inputs = [np.ascontiguousarray(lanes[:, i]) for i in range(4)] + _columns(x)
        inputs += [fields[G, i] for i in range(4)] + [np.zeros(32, np.float32)] * 8
        found = _sums(_run(text.fp4_block(0), 8, "f", inputs)) * np.float32(tiles.FP4_GAIN)
        expected = np.asarray(formats.decode_fp4(jnp.asarray(weight), jnp.asarray(scale)))[:, column]
        assert np.array_equal(found, np.repeat(expected[:, None], 8, axis=1))


def test_fp8_step_multiplies_every_number():
    byte = np.arange(16 * 32).astype(np.uint8).reshape(16, 32)
    byte[(byte & 0x7F) == 0x7F] = 0x80
    weight = byte.view(ml_dtypes.float8_e4m3fn)
    x = _activations(np.float16)
    words = byte.view(np.int32).reshape(16, 4, 2)
    inputs = [words[G, Q, 0], words[G, Q, 1], words[G + 8, Q, 0], words[G + 8, Q, 1]]
    inputs += _columns(x) + [np.full(32, 0.5, np.float32)] * 4
    found = _sums(_run(text.fp8_step(), 4, "f", inputs))
    expected = weight.astype(np.float64) @ x.astype(np.float64).T + 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=SUM_TOLERANCE * np.abs(expected).max())


def test_bf16_step():
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(16, 32)).astype(ml_dtypes.bfloat16)
    x = _activations(ml_dtypes.bfloat16)
    words = weight.view(np.int32).reshape(16, 4, 4)
    inputs = [words[G, Q, i] for i in range(4)] + [words[G + 8, Q, i] for i in range(4)]
    inputs += _columns(x) + [np.full(32, 0.25, np.float32)] * 4
    found = _sums(_run(text.bf16_step(), 4, "f", inputs))
    expected = weight.astype(np.float64) @ x.astype(np.float64).T + 0.25
    np.testing.assert_allclose(found, expected, rtol=0, atol=SUM_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("together", [128, 32])
@pytest.mark.parametrize("exponent", range(-28, 8, 3))
def test_late_rounding_is_the_published_one(together, exponent):
    """fp16 rows rounded to odd, with the peaks beside them, round as the unrounded float32 rows do."""
    from pallas_kernels.experts.reference import sticky_half

    rng = np.random.default_rng(exponent + 100)
    exact = (rng.normal(size=(8, 128)) * 2.0**exponent).astype(np.float32)
    exact[0, :3] = 0
    # A maximum exactly at the largest number, just below and just above.
    exact[1, ::32] = 448 * 2.0 ** (exponent - 7)
    exact[2, ::32] = np.nextafter(np.float32(448 * 2.0 ** (exponent - 7)), np.float32(0))
    exact[3, ::32] = np.nextafter(np.float32(448 * 2.0 ** (exponent - 7)), np.float32(np.inf))
    exact[1:4] = np.clip(exact[1:4], -np.abs(exact[1:4, :1]), np.abs(exact[1:4, :1]))
    kept = np.asarray(sticky_half(jnp.asarray(exact) * tiles.HIDDEN_GAIN))
    peaks = np.abs(kept).reshape(8, 16, 8).max(axis=2)
    peak = peaks.view(np.int32).reshape(8, 4, 2)
    found = np.zeros((8, 128), np.float32)
    for block in range(4):
        wanted = np.full(32, block, np.int32)
        inputs = [peak[G, Q, 0], peak[G, Q, 1], wanted]
        factors = list(_run(text.rounding_scales(together == 128), 2, "r", inputs))
        words = _run(text.round_words(), 4, "r", _columns(kept[:, 32 * block : 32 * block + 32]) + factors)
        halves = words.T.copy().view(np.float16).reshape(8, 4, 8)
        found[:, 32 * block : 32 * block + 32] = halves.reshape(8, 32)
    expected = np.asarray(formats.fp8_round_trip(jnp.asarray(exact), together))
    # Kept rows have steps of 2^-31 too, as fine as the finest ones of a block at the floor: for numbers below 2^-26
    # the first rounding leaves less than the two bits that the second one needs.
    slack = np.where(np.abs(exact) < 2.0**-26, 2.0**-30, 0)
    assert (np.abs(found / np.float32(tiles.HIDDEN_GAIN) - expected) <= slack).all()


def test_bf16_activations_as_fp16():
    x = np.array([0, 1, -2.5, 65280, 2.0**-17, 3 * 2.0**-18, 2.0**-30, -0.0], ml_dtypes.bfloat16)
    words = np.tile(x.view(np.int32), (32, 1))
    found = _run(text.half_from_bfloat(4), 4, "r", [np.ascontiguousarray(words[:, i]) for i in range(4)])
    halves = found[:, 0].copy().view(np.float16)
    assert (np.abs(halves.astype(np.float64) - x.astype(np.float64)) <= 2.0**-25).all()
    assert np.array_equal(halves[:6].astype(np.float64), x[:6].astype(np.float64))


def test_thirds_of_a_pair_add_up_to_it():
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(2, 32)) * 2.0 ** rng.integers(-60, 60, (2, 32))).astype(np.float32)
    words = _run(text.bf16_thirds(), 3, "r", list(x)).view(ml_dtypes.bfloat16).reshape(3, 32, 2)
    parts = words.astype(np.float64)
    np.testing.assert_array_equal(parts.sum(0).T, x)
    assert (np.abs(parts[1]) <= np.abs(parts[0]) / 128).all() and (
        np.abs(parts[2]) <= np.abs(parts[1]) / 128
    ).all()
    (pair,) = _run(text.bf16_pair(), 1, "r", list(x)).view(ml_dtypes.bfloat16).reshape(1, 32, 2)
    np.testing.assert_array_equal(pair, words[0])


def test_sum_of_quad():
    x = np.random.default_rng(5).normal(size=32).astype(np.float32)
    (found,) = _run(text.sum_of_quad(), 1, "f", [x])
    np.testing.assert_allclose(found, np.repeat(x.reshape(8, 4).sum(1), 4), rtol=1e-6)


def test_peak_of_channels():
    numbers = np.random.default_rng(5).integers(0, 0x7C00, 64).astype(np.int32)
    found = _run(text.peak_of_channels(), 1, "r", [numbers])[0]
    expected = numbers.reshape(2, 8, 4).max(axis=1)
    assert np.array_equal(found.reshape(2, 8, 4), np.repeat(expected[:, None], 8, axis=1))


@pytest.mark.parametrize("warps", [4, 8])
def test_sum_over_warps(warps):
    sums = np.random.default_rng(6).normal(size=(8, 32 * warps)).astype(np.float32)
    first, second = _run(text.sum_over_warps(warps), 2, "f", list(sums))
    total = sums.reshape(8, warps, 32).sum(axis=1)
    for warp in range(warps):
        mine = slice(32 * warp, 32 * warp + 32)
        np.testing.assert_allclose(first[mine], total[warp % 4], rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)
        np.testing.assert_allclose(second[mine], total[4 + warp % 4], rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)


def test_guarded_loads_give_zeros_and_read_nothing():
    memory = np.arange(4 * 16, dtype=np.int32)
    where = np.full(32, memory.ctypes.data, np.uint64)
    blocks = np.tile(np.array([4, 2, 0, -1], np.int32), 8)
    where[blocks <= 0] = 16  # an address that cannot be read
    kinds = ",".join(["=&r"] * 16 + ["l", "r"])
    found = np.stack(ptx_emulator.run(text.loads(4, 64, ".ca", guarded=True), kinds, [where, blocks]))
    assert np.array_equal(found[:, 0], np.concatenate([memory[16 * i : 16 * i + 4] for i in range(4)]))
    assert np.array_equal(found[:, 1], np.where(np.arange(16) < 8, found[:, 0], 0))
    assert not found[:, 2:4].any()
