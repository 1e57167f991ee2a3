"""The two Triton kernels of a Sinkhorn balancing that is differentiated (balancing.py says what they compute).

Knows: the work of one program, TOKENS matrices of SIZE * SIZE numbers. Does not know: shapes of a model.

    balance            grid (T / TOKENS,)   balanced matrices, and the factors that every half step multiplied by
    balance_gradient   grid (T / TOKENS,)   from those, the gradient of the first matrices
"""

import triton
import triton.language as tl


@triton.jit
def _places(T, ITERATIONS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """(where a program's matrices lie [TOKENS, SIZE, SIZE], which are there, where the first factors lie, which)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    line = tl.arange(0, SIZE)
    matrices = token[:, None, None] * (SIZE * SIZE) + line[None, :, None] * SIZE + line[None, None, :]
    live = (token < T)[:, None, None] & (line[None, :, None] >= 0) & (line[None, None, :] >= 0)
    factors = token[:, None] * ((2 * ITERATIONS - 1) * SIZE) + line[None, :]
    return matrices, live, factors, (token < T)[:, None] & (line[None, :] >= 0)


@triton.jit
def balance(
    given, made, factors,
    T: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Columns are divided by their sums, then rows and columns in turn."""
    place, live, sums, there = _places(T, ITERATIONS, SIZE, TOKENS)
    matrix = tl.load(given + place, mask=live, other=1.0)
    factor = 1 / (tl.sum(matrix, axis=1) + EPS)
    matrix = matrix * factor[:, None, :]
    tl.store(factors + sums, factor, mask=there)
    for step in range(1, 2 * ITERATIONS - 1, 2):
        factor = 1 / (tl.sum(matrix, axis=2) + EPS)
        matrix = matrix * factor[:, :, None]
        tl.store(factors + step * SIZE + sums, factor, mask=there)
        factor = 1 / (tl.sum(matrix, axis=1) + EPS)
        matrix = matrix * factor[:, None, :]
        tl.store(factors + (step + 1) * SIZE + sums, factor, mask=there)
    tl.store(made + place, matrix, mask=live)


@triton.jit
def balance_gradient(
    made, factors, slope, gradient,
    T: tl.constexpr, ITERATIONS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The half steps backwards; the matrix before each is the one behind it over the factors."""
    place, live, sums, there = _places(T, ITERATIONS, SIZE, TOKENS)
    matrix = tl.load(made + place, mask=live, other=1.0)
    wanted = tl.load(slope + place, mask=live, other=0.0)
    for back in range(ITERATIONS - 1):
        step = 2 * (ITERATIONS - 1 - back)
        factor = tl.load(factors + step * SIZE + sums, mask=there, other=1.0)
        wanted = (wanted - tl.sum(wanted * matrix, axis=1)[:, None, :]) * factor[:, None, :]
        matrix = matrix / factor[:, None, :]
        factor = tl.load(factors + (step - 1) * SIZE + sums, mask=there, other=1.0)
        wanted = (wanted - tl.sum(wanted * matrix, axis=2)[:, :, None]) * factor[:, :, None]
        matrix = matrix / factor[:, :, None]
    factor = tl.load(factors + sums, mask=there, other=1.0)
    wanted = (wanted - tl.sum(wanted * matrix, axis=1)[:, None, :]) * factor[:, None, :]
    tl.store(gradient + place, wanted, mask=live)
