"""Device functions that kernels share, in Triton's interpreter: waiting for other programs, and number formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from pallas_kernels import device_barrier, device_numbers, formats, launch


@triton.jit
def hand_over(counters_in, handed, received, counters, PROGRAMS: tl.constexpr, WAITERS: tl.constexpr):
    """The first programs write their number; the others wait for all of them and add up what they find."""
    program = tl.program_id(0)
    if program < PROGRAMS:
        tl.store(handed + program, program + 1)
        device_barrier.arrive(counters, 1)
    else:
        device_barrier.wait(counters, 1, PROGRAMS)
        place = tl.arange(0, 16)
        found = tl.load(handed + place, mask=place < PROGRAMS, other=0)
        tl.store(received + program - PROGRAMS, tl.sum(found, axis=0))
        device_barrier.leave(counters, 1, WAITERS)


@triton.jit
def take_ticket(counters_in, lasts, counters, PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    last = device_barrier.is_last(counters, 0, PROGRAMS)
    tl.store(lasts + program, last.to(tl.int32))


@triton.jit
def meet(counters_in, counters, PROGRAMS: tl.constexpr):
    device_barrier.barrier(counters, 0, tl.program_id(0), PROGRAMS)


def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("programs,waiters", [(1, 1), (5, 3), (13, 1)])
def test_a_latch_hands_over_and_is_left_at_zero(programs, waiters):
    counters = device_barrier.counters(2)
    for _ in range(2):
        _, received, counters = launch.call(
            hand_over, counters, grid=(programs + waiters,),
            outputs=[array(16), array(waiters), array(64)], aliases={0: 2}, PROGRAMS=programs, WAITERS=waiters,
        )  # fmt: skip
        assert np.all(received == programs * (programs + 1) // 2)
        assert not np.any(counters)


@pytest.mark.parametrize("programs", [1, 2, 7])
def test_exactly_one_program_is_the_last_and_the_ticket_is_left_at_zero(programs):
    counters = device_barrier.counters(1)
    for _ in range(2):
        lasts, counters = launch.call(
            take_ticket, counters, grid=(programs,), outputs=[array(programs), array(32)], aliases={0: 1},
            PROGRAMS=programs,
        )  # fmt: skip
        assert list(lasts) == [0] * (programs - 1) + [1]
        assert not np.any(counters)


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_a_barrier_flips_one_bit(programs):
    """Programs run one after another here and do not wait; what they count is the same."""
    counters = device_barrier.counters(1)
    for expected in (-(2**31), 0) if programs > 1 else (0, 0):
        (counters,) = launch.call(
            meet, counters, grid=(programs,), outputs=[array(32)], aliases={0: 0}, PROGRAMS=programs
        )
        assert list(counters) == [expected] + [0] * 31


@triton.jit
def round_rows(x, activations, narrow, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)[None, :]
    values = tl.load(x + at)
    tl.store(activations + at, device_numbers.round_activations(values, 1))
    tl.store(narrow + at, device_numbers.rounded(values, tl.bfloat16))


@triton.jit
def cut_numbers(x, high, middle, low, N: tl.constexpr):
    at = tl.arange(0, N)
    first, second, third = device_numbers.thirds(tl.load(x + at))
    tl.store(high + at, first)
    tl.store(middle + at, second)
    tl.store(low + at, third)


@triton.jit
def decode_bytes(payload, fractions, scales, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(fractions + at, device_numbers.decode_e4m3(tl.load(payload + at)))
    tl.store(scales + at, device_numbers.decode_e8m0(tl.load(payload + at)))


def hard_rows() -> np.ndarray:
    """Rows [?, 32] of every size: ties, subnormals, saturation, the block maximum next to a power of two, zeros."""
    random = np.random.default_rng(0)
    halves = np.arange(32, dtype=np.float32) / 2 * np.float32(0.125)
    edges = np.float32(448) * np.float32(2) ** np.arange(-12, 4, dtype=np.float32)
    rows = [random.normal(size=32) * 2.0**power for power in range(-16, 10)]
    rows += [np.concatenate([[np.float32(edge)], 7.5 * halves[1:]]) for edge in edges]
    rows += [np.concatenate([[np.nextafter(np.float32(edge), np.float32(step))], halves[1:]])
             for edge in edges for step in (0, 1e9)]  # fmt: skip
    return np.stack([*rows, np.zeros(32), np.full(32, -1e-5), np.full(32, 3e8)]).astype(np.float32)


def test_roundings_equal_formats_bit_for_bit():
    rows = hard_rows()
    activations, narrow = launch.call(
        round_rows, jnp.asarray(rows), grid=(len(rows),),
        outputs=[array(*rows.shape, dtype=jnp.float32)] * 2, N=32,
    )  # fmt: skip
    np.testing.assert_array_equal(activations, formats.fp8_round_trip(jnp.asarray(rows), 32))
    np.testing.assert_array_equal(narrow, rows.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_nan_is_not_rounded_away():
    rows = np.ones((1, 32), np.float32)
    rows[0, 3] = np.nan
    activations, narrow = launch.call(
        round_rows, jnp.asarray(rows), grid=(1,), outputs=[array(1, 32, dtype=jnp.float32)] * 2, N=32
    )
    assert list(np.flatnonzero(np.isnan(activations))) == [3] == list(np.flatnonzero(np.isnan(narrow)))


def test_decoded_bytes_equal_formats():
    payload = np.arange(256, dtype=np.uint8)
    fractions, scales = launch.call(
        decode_bytes, jnp.asarray(payload), grid=(1,), outputs=[array(256, dtype=jnp.float32)] * 2, N=256
    )
    finite = (payload & 0x7F) != 0x7F
    expected = payload.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(fractions)[finite], expected[finite])
    np.testing.assert_array_equal(scales[:255], formats.e8m0_to_float(jnp.asarray(payload))[:255])


def test_three_bfloat16_numbers_hold_a_float32():
    random = np.random.default_rng(4)
    values = (random.normal(size=1024) * 2.0 ** random.integers(-40, 40, 1024)).astype(np.float32)
    values[:4] = [0, 1 + 2**-23, -(2 - 2**-23), 1.5]
    parts = launch.call(
        cut_numbers, jnp.asarray(values), grid=(1,), outputs=[array(1024, dtype=jnp.float32)] * 3, N=1024
    )
    parts = np.asarray(parts)
    np.testing.assert_array_equal(parts.astype(ml_dtypes.bfloat16).astype(np.float32), parts)
    np.testing.assert_array_equal(parts.astype(np.float64).sum(axis=0), values)
