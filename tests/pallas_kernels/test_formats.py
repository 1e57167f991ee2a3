"""Number formats against tables and round trips computed by other implementations, bit for bit.

The golden values come from PyTorch's casts (E4M3, E8M0) and the published rounding rules.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import formats

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "formats.safetensors"
_NUMPY = {"F32": np.float32, "I8": np.uint8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}

# A dot product in float32 against one in another order: a few roundings of relative size 2^-24.
PRODUCT_TOLERANCE = 1e-5
# The transform sums 128 float32 terms in another order than the golden one: a few roundings of 2^-24, relative to
# the length of the vector.
HADAMARD_TOLERANCE = 1e-6


# Compiled, as the model uses them.
fp8_round_trip = jax.jit(formats.fp8_round_trip, static_argnums=1)
fp4_index_round_trip = jax.jit(formats.fp4_index_round_trip, static_argnums=1)
fp4_entry_round_trip = jax.jit(formats.fp4_entry_round_trip, static_argnums=1)
fp8_weight_round_trip = jax.jit(formats.fp8_weight_round_trip, static_argnums=1)
fp4_weight_round_trip = jax.jit(formats.fp4_weight_round_trip)
decode_fp8 = jax.jit(formats.decode_fp8, static_argnums=2)
decode_fp4 = jax.jit(formats.decode_fp4)
encode_fp8 = jax.jit(formats.encode_fp8, static_argnums=1)
encode_fp4 = jax.jit(formats.encode_fp4)
e2m1_to_float = jax.jit(formats.e2m1_to_float)
e8m0_to_float = jax.jit(formats.e8m0_to_float)
hadamard_transform = jax.jit(formats.hadamard_transform)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    raw = GOLDEN.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(raw[start + begin : start + end], _NUMPY[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def e4m3(payload: np.ndarray) -> np.ndarray:
    return payload.view(ml_dtypes.float8_e4m3fn)


def assert_bits(found, expected: np.ndarray) -> None:
    """Equal bit patterns, except that NaN equals NaN and zeros may differ in sign."""
    found = np.asarray(found)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_all_256_e4m3_payloads(golden):
    values = e4m3(golden["fp8.bytes"]).astype(np.float32)
    assert_bits(jnp.asarray(e4m3(golden["fp8.bytes"])).astype(jnp.float32), golden["fp8.values"])
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert values[0x38] == 1.0


def test_all_256_scale_bytes(golden):
    values = e8m0_to_float(jnp.asarray(golden["e8m0.bytes"]))
    expected = golden["e8m0.values"]
    assert np.asarray(values).tobytes()[: 255 * 4] == expected.tobytes()[: 255 * 4]
    assert np.isnan(values[255])
    assert float(values[120]) == 2.0**-7
    assert float(values[127]) == 1.0


def test_all_256_packed_fp4_bytes(golden):
    packed = jnp.asarray(golden["fp4.packed"])[:, None]
    assert_bits(e2m1_to_float(packed), golden["fp4.values"])


def test_the_low_nibble_is_the_even_element():
    assert e2m1_to_float(jnp.asarray([0x21], jnp.uint8)).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("block", [128, 32])
def test_block_scaled_fp8_weights(golden, block):
    prefix = f"fp8w{block}"
    weight, scale = e4m3(golden[f"{prefix}.weight"]), golden[f"{prefix}.scale"]
    decoded = decode_fp8(jnp.asarray(weight), jnp.asarray(scale), block)
    assert_bits(decoded, golden[f"{prefix}.values"])
    product = jnp.matmul(golden[f"{prefix}.x"], decoded.T, precision=jax.lax.Precision.HIGHEST)
    expected = golden[f"{prefix}.y"]
    np.testing.assert_allclose(product, expected, atol=PRODUCT_TOLERANCE * np.abs(expected).max())


def test_fp4_weights(golden):
    decoded = decode_fp4(jnp.asarray(golden["fp4w.weight"]), jnp.asarray(golden["fp4w.scale"]))
    assert_bits(decoded, golden["fp4w.values"])


@pytest.mark.parametrize("block", [128, 32])
def test_activation_round_trip(golden, block):
    rounded = fp8_round_trip(jnp.asarray(golden["act.x"]), block)
    assert_bits(rounded, golden[f"act{block}.values"])
    payload, scale = e4m3(golden[f"act{block}.payload"]).astype(np.float32), golden[f"act{block}.scale"]
    wide = np.repeat(np.asarray(e8m0_to_float(jnp.asarray(scale))), block, axis=-1)
    assert_bits(payload * wide, golden[f"act{block}.values"])


@pytest.mark.parametrize("block", [128, 32])
def test_activation_round_trip_in_bfloat16(golden, block):
    x = jnp.asarray(golden["actbf16.x"]).astype(jnp.bfloat16)
    rounded = fp8_round_trip(x, block)
    assert rounded.dtype == jnp.bfloat16
    assert_bits(rounded.astype(jnp.float32), golden[f"actbf16_{block}.values"])


def test_window_rows_of_v4_leave_the_rotated_dims(golden):
    x, expected = jnp.asarray(golden["kv.x"]), golden["kv_v4.values"]
    assert_bits(fp8_round_trip(x[:, :448], 64), expected[:, :448])
    assert_bits(x[:, 448:], expected[:, 448:])


def test_window_rows_of_v41_are_rounded_whole(golden):
    assert_bits(fp8_round_trip(jnp.asarray(golden["kv.x"]), 32), golden["kv_v41_window.values"])


def test_compressed_entries_of_v41(golden):
    rounded = fp4_entry_round_trip(jnp.asarray(golden["kv_v41_compressed.x"]), 16)
    assert_bits(rounded, golden["kv_v41_compressed.values"])
    table = np.array([*formats.E2M1_VALUES, *(-value for value in formats.E2M1_VALUES)], np.float32)
    scale = np.repeat(e4m3(golden["kv_v41_compressed.scale"]).astype(np.float32), 16, axis=-1)
    assert_bits(table[golden["kv_v41_compressed.codes"]] * scale, golden["kv_v41_compressed.values"])


def test_index_vectors(golden):
    assert_bits(fp4_index_round_trip(jnp.asarray(golden["idx.x"]), 32), golden["idx.values"])


def test_hadamard(golden):
    assert_bits(formats.hadamard_matrix(128)[:4], golden["hadamard128"])
    y = hadamard_transform(jnp.asarray(golden["hadamard.x"]))
    length = np.linalg.norm(golden["hadamard.y"], axis=-1, keepdims=True)
    np.testing.assert_allclose(y / length, golden["hadamard.y"] / length, rtol=0, atol=HADAMARD_TOLERANCE)
    assert_bits(fp4_index_round_trip(jnp.asarray(golden["hadamard.y"]), 32), golden["hadamard.then_fp4"])


def test_the_hadamard_matrix_is_orthonormal():
    matrix = formats.hadamard_matrix(64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=HADAMARD_TOLERANCE)
    with pytest.raises(ValueError, match="expected a power of two"):
        formats.hadamard_matrix(96)


def test_encoding_the_golden_weights_returns_their_values(golden):
    for prefix, block in (("fp8w128", 128), ("fp8w32", 32)):
        values = jnp.asarray(golden[f"{prefix}.values"])
        assert_bits(fp8_weight_round_trip(values, block), golden[f"{prefix}.values"])
    assert_bits(fp4_weight_round_trip(jnp.asarray(golden["fp4w.values"])), golden["fp4w.values"])


def test_encoded_scales_are_the_published_rule():
    weight = jnp.zeros((32, 32), jnp.float32).at[3, 4].set(448.0 * 2**-9)
    payload, scale = encode_fp8(weight, 32)
    assert scale.tolist() == [[127 - 9]]
    assert float(payload[3, 4]) == 448.0
    _, scale = encode_fp8(weight * (1 + 2**-20), 32)
    assert scale.tolist() == [[127 - 8]]


def test_every_e2m1_code_survives_encoding():
    values = jnp.asarray([*formats.E2M1_VALUES, *(-value for value in formats.E2M1_VALUES)] * 2, jnp.float32)[
        None
    ]
    packed, scale = encode_fp4(values)
    assert (packed.shape, scale.tolist()) == ((1, 16), [[127]])
    assert packed[0, 0] == 0x10
    assert_bits(decode_fp4(packed, scale), np.asarray(values))


@pytest.mark.parametrize(
    ("rounding", "block"),
    [(fp8_round_trip, 32), (fp4_index_round_trip, 32), (fp4_entry_round_trip, 16)],
)
def test_gradients_pass_straight_through(rounding, block):
    x = jnp.linspace(-3.0, 5.0, 64).reshape(2, 32)
    gradient = jax.grad(lambda value: jnp.sum(rounding(value, block) * x))(x)
    np.testing.assert_array_equal(gradient, x)


def test_a_block_that_does_not_divide_the_axis_is_named():
    with pytest.raises(ValueError, match="last axis is 48, expected a multiple of the block 32"):
        fp8_round_trip(jnp.zeros((2, 48)), 32)


def test_e4m3_rounding_is_the_conversion_of_the_format():
    """Every payload, every midpoint of two neighbours and both sides of it, and numbers of every size."""
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    middle = (grid[1:] + grid[:-1]) / 2
    random = np.random.default_rng(0)
    sizes = random.normal(size=4096) * 2.0 ** random.integers(-14, 10, 4096)
    x = np.concatenate(
        [grid, middle, np.nextafter(middle, 1e9), np.nextafter(middle, -1e9), sizes, [-0.0, np.inf]]
    )
    x = x.astype(np.float32)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = np.asarray(jax.jit(formats.round_e4m3)(x))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.isnan(formats.round_e4m3(jnp.float32(np.nan)))
