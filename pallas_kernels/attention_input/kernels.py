"""The boundary in front of attention and the products behind it in one launch, in Triton.

Knows: how the programs of one launch share the work (reference.py says what it computes). Does not know: shapes of a
model, or how the launch is made (fused.py).

    programs                  work                                           waits for
    0 .. G-1                  columns of the boundary                        nobody
    then R * SHARES           share of a row: collapse, norm, rounding       all column programs
    then R                    one row: coefficients for the next boundary    all column programs
    then BF16, then FP8       a tile of weight rows and a share of columns   all row programs

The products' weights do not depend on the rows: a program loads its first ones before it waits. So memory is
read while the boundary, a chain of short steps, is under way. Row programs arrive at LINES lines, so that each is
polled by a share of the many product programs only.

The first programs are those of hyper_connections/, the last ones those of dense/kernels.py.
"""

import triton
import triton.language as tl

from pallas_kernels.dense.kernels import waiting_bf16_program, waiting_fp8_program
from pallas_kernels.device_barrier import LINE, arrive_at, leave
from pallas_kernels.device_numbers import thirds
from pallas_kernels.hyper_connections.column_kernels import column_program
from pallas_kernels.hyper_connections.kernels import coefficient_program, row_program

ROWS_DONE = tl.constexpr(1)  # the first line of the latch between row programs and product programs


@triton.jit
def store_terms(
    row, share, x, terms, R: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Writes a share of a float32 row of x, which this program wrote, as three bfloat16 rows that add up to it."""
    tl.debug_barrier()
    for first in tl.static_range(0, D // SHARES, AT_ONCE):
        at = row * D + share * (D // SHARES) + first + tl.arange(0, AT_ONCE)
        parts = thirds(tl.load(x + at))
        for term in tl.static_range(3):
            tl.store(terms + term * (R * D) + at, parts[term].to(tl.bfloat16))


@triton.jit
def boundary_and_products(
    parts, live, given, table, tokens, fn, base, scale, norm, words, scales, weight, streams_in, counters_in,
    streams, coefficients, hidden, x, rounded_x, tap, sums, terms, low, exact, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, EMBED: tl.constexpr, DELAYED: tl.constexpr, TAP: tl.constexpr,
    ROUND: tl.constexpr, B: tl.constexpr, NB: tl.constexpr, SHARES: tl.constexpr, NORM_EPS: tl.constexpr,
    MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr, LINES: tl.constexpr, TILES: tl.constexpr,
    SPLITS: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, BF16_TILES: tl.constexpr,
    BF16_SPLITS: tl.constexpr, HELD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One boundary and its products; grid D // BD + R * SHARES + R + BF16_TILES * BF16_SPLITS + TILES * SPLITS."""
    G: tl.constexpr = D // BD
    ROW_PROGRAMS: tl.constexpr = R * SHARES
    program = tl.program_id(0)
    if program < G:
        column_program(
            program, parts, live, given, table, tokens, fn, streams, hidden, tap, sums, counters,
            R, D, S, BD, W, MIXES, PARTS, EXPERTS, EMBED, DELAYED, TAP, WARPS,
        )  # fmt: skip
    elif program < G + ROW_PROGRAMS:
        row, share = (program - G) // SHARES, (program - G) % SHARES
        row_program(
            row, share, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
            R, D, S, G, W, SHARES, DELAYED, False, ROUND, B, NB, NORM_EPS, MIX_EPS, 0,
        )  # fmt: skip
        if TERMS > 1:
            store_terms(row, share, x, terms, R, D, SHARES, NB * B)
        arrive_at(counters, ROWS_DONE, LINES)
        leave(counters, 0, ROW_PROGRAMS + R)
    elif program < G + ROW_PROGRAMS + R:
        coefficient_program(
            program - G - ROW_PROGRAMS, base, scale, coefficients, sums, counters,
            R, D, S, G, W, NORM_EPS, MIX_EPS, ITERATIONS,
        )  # fmt: skip
        leave(counters, 0, ROW_PROGRAMS + R)
    else:
        number = program - G - ROW_PROGRAMS - R
        BF16_PROGRAMS: tl.constexpr = BF16_TILES * BF16_SPLITS
        PROGRAMS: tl.constexpr = BF16_PROGRAMS + TILES * SPLITS
        line = number % LINES
        own = counters + line * LINE
        waiters = (PROGRAMS + LINES - 1 - line) // LINES
        if number < BF16_PROGRAMS:
            if BF16_TILES:
                waiting_bf16_program(
                    number, terms if TERMS > 1 else x, weight, exact, own,
                    ROWS_DONE, ROW_PROGRAMS, waiters, D, BF16_TILES, BF16_SPLITS, TERMS, HELD > 0, WARPS,
                )  # fmt: skip
        else:
            waiting_fp8_program(
                number - BF16_PROGRAMS, rounded_x, words, scales, low, own,
                ROWS_DONE, ROW_PROGRAMS, waiters, D // 32, TILES, SPLITS, SCALED, False, 1, HELD, WARPS,
            )  # fmt: skip
