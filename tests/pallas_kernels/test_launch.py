"""How a launch is lowered: slices become offsets, what is updated in place stays itself, no number is a parameter."""

import re

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

from pallas_kernels import launch


@triton.jit
def add(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out_ptr + place, tl.load(a_ptr + place) + tl.load(b_ptr + place))


@triton.jit
def scaled(a_ptr, factor, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out_ptr + place, factor * tl.load(a_ptr + place))


def summed(a, b, **options):
    return launch.call(add, a, b, grid=(1,), outputs=[jax.ShapeDtypeStruct((32,), b.dtype)], N=32, **options)[
        0
    ]


def lowered(function, *shapes, dtype=jnp.float32) -> str:
    """StableHLO of a function for an H200; a function of its own, for traces are kept."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with launch.compiling_for(90):
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def call(text: str) -> tuple[list[str], str]:
    """Names of the operands of the only launch, and its line."""
    (line,) = [line for line in text.splitlines() if f"@{launch.TARGET}" in line or launch.TARGET in line]
    return re.search(r"\(([^)]*)\)", line)[1].split(", "), line


def test_a_slice_is_handed_over_as_the_array_and_an_offset():
    operands, line = call(lowered(lambda arena, b: summed(arena[64:96], b), (128,), (32,)))
    assert operands[:2] == ["%arg0", "%arg1"]
    assert "add.s64" in line and ", 256;" in line


def test_slices_of_slices_and_shapes_add_up():
    def function(arena, b):
        return summed(arena[32:96].reshape(2, 32)[1:2].reshape(32), b)

    operands, line = call(lowered(function, (128,), (32,)))
    assert operands[0] == "%arg0" and ", 256;" in line


def test_rows_of_a_matrix_are_contiguous_and_columns_are_not():
    rows, line = call(lowered(lambda m, b: summed(m[3:4].reshape(32), b), (8, 32), (32,)))
    assert rows[0] == "%arg0" and ", 384;" in line
    columns, line = call(lowered(lambda m, b: summed(m[:, 1:2].reshape(32), b), (32, 8), (32,)))
    assert columns[0] != "%arg0" and "add.s64 %rd1, %rd1" not in line
    strided, _ = call(lowered(lambda arena, b: summed(arena[::2], b), (64,), (32,)))
    assert strided[0] != "%arg0"


@pytest.mark.parametrize(("dtype", "size"), [(jnp.int8, 1), (jnp.bfloat16, 2), (jnp.int32, 4)])
def test_offsets_count_bytes(dtype, size):
    _, line = call(lowered(lambda arena, b: summed(arena[32:64], b), (64,), (32,), dtype=dtype))
    assert f", {32 * size};" in line


def test_an_operand_that_is_updated_in_place_is_never_a_larger_array():
    operands, line = call(lowered(lambda arena, b: summed(arena[64:96], b, aliases={0: 0}), (128,), (32,)))
    assert operands[0] != "%arg0"
    assert "output_tuple_indices = []" in line or "output_operand_alias" in line


def test_an_array_that_is_computed_is_itself():
    operands, _ = call(lowered(lambda arena, b: summed((2 * arena)[64:96], b), (128,), (32,)))
    assert operands[0] != "%arg0" and operands[1] == "%arg1"


def test_a_number_is_no_parameter():
    def function(a):
        return launch.call(scaled, a, 3.0, grid=(1,), outputs=[jax.ShapeDtypeStruct((32,), a.dtype)], N=32)[0]

    with pytest.raises(ValueError, match="make it a tl.constexpr"):
        lowered(function, (32,))
