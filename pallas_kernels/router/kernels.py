"""The fused router, and the boundary in front of it in the same launch, in Triton.

Knows: how the programs of one launch share the work (reference.py says what it computes). Does not know: how experts
are chosen from the logits (selection.py), shapes of a model, or how the launch is made (fused.py).

    gate programs     BE experts by a slice of K columns: partial logits [R, BE]
    the last of them  adds the slices, scores, choice, weights, and the list of distinct experts

With the boundary, the programs of hyper_connections/ come first; gate programs have their weights under
way from the start and wait for the row programs, or with delayed mixing only for the column programs. Everyone
waits for smaller numbers only.
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import is_last, leave, wait
from pallas_kernels.device_numbers import INTERPRETED, rounded
from pallas_kernels.hyper_connections.column_kernels import column_program
from pallas_kernels.hyper_connections.kernels import coefficient_program, hidden_inverses, row_program
from pallas_kernels.router.selection import selection, small_items

ROWS_DONE = tl.constexpr(1)  # line of the latch between row programs and gate programs
GATE_DONE = tl.constexpr(2)  # line of the ticket of the gate programs
CHUNK = tl.constexpr(128)  # columns of one warp's product: warps that shared them would all do the same


@triton.jit
def gate_program(
    program, weight, x, norm, sums, logits, route_weight, slot, counters,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    GATES: tl.constexpr, LINE: tl.constexpr, AWAITED: tl.constexpr, DELAYED: tl.constexpr, W: tl.constexpr,
    NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Partial logits [R, BE] over BK columns; true in the last of GATES programs.

    Waits for `AWAITED` programs at a line if there are any: those that write the rows x, or with delayed mixing those
    that write the hidden rows, which x then is; these are normed here as row programs do.
    The first one also empties the table of weights and slots, of which `selection` writes what is used.
    """
    SPLITS: tl.constexpr = D // BK
    expert = (program // SPLITS) * BE + tl.arange(0, BE)
    split = program % SPLITS
    OWN: tl.constexpr = BK if BK < CHUNK else CHUNK
    chunk = tl.arange(0, BK // OWN)[:, None, None]
    column = split * BK + chunk * OWN + tl.arange(0, OWN)[None, None, :]
    row = tl.arange(0, R)
    real = (expert < E)[None, :, None] & (column >= 0)
    own = tl.load(weight + expert[None, :, None] * D + column, mask=real, other=0.0)
    if program == 0:
        cell = tl.arange(0, R * R * 8)
        tl.store(route_weight + cell, 0.0, mask=cell < R * K * R)
        tl.store(slot + cell, -1, mask=cell < R * K * R)
    if DELAYED:
        factors = tl.load(norm + column).to(tl.float32)
    if AWAITED > 0:
        wait(counters, LINE, AWAITED)
    rows = tl.load(x + row[None, :, None] * D + column, cache_modifier=".cg")
    DTYPE: tl.constexpr = x.dtype.element_ty
    if DELAYED:
        inverse = hidden_inverses(sums, AWAITED, R, D, W, NORM_EPS)[None, :, None]
        rows = rounded(rows.to(tl.float32) * inverse * factors, DTYPE).to(DTYPE)
    rows = tl.permute(rows, (0, 2, 1))
    exact: tl.constexpr = (weight.dtype.element_ty == tl.bfloat16) and (DTYPE == tl.bfloat16)
    if exact and not INTERPRETED:
        parts = tl.dot(own, rows)
    else:
        parts = tl.dot(own.to(tl.float32), rows.to(tl.float32), input_precision="ieee")
    part = tl.sum(parts, axis=0)
    at = (split * R + row[None, :]) * E + expert[:, None]
    tl.store(logits + at, part, mask=(expert < E)[:, None] & (row >= 0)[None, :])
    return is_last(counters, GATE_DONE, GATES)


@triton.jit
def route(
    x, weight, bias, table, tokens, live, counters_in,
    expert_ids, count, route_weight, slot, ids, logits, counters,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, HASHED: tl.constexpr, SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """The router alone; grid ceil(E / BE) * D // BK."""
    GATES: tl.constexpr = (E + BE - 1) // BE * (D // BK)
    items = small_items(bias, table, tokens, R, E, K, HASHED)
    alive = tl.load(live)
    if gate_program(
        tl.program_id(0), weight, x, x, logits, logits, route_weight, slot, counters,
        R, D, E, K, BE, BK, GATES, 0, 0, False, 0, 0.0,
    ):  # fmt: skip
        selection(
            logits, items, alive, expert_ids, count, route_weight, slot, ids,
            R, E, K, D // BK, HASHED, SCALING, SUM_EPS,
        )  # fmt: skip


@triton.jit
def boundary_and_route(
    parts, given, table_in, row_tokens, fn, base, scale, norm, streams_in, weight, bias, table,
    tokens, live, counters_in,
    streams, coefficients, hidden, x, rounded_x, tap, sums, expert_ids, count, route_weight, slot, ids, logits,
    counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, DELAYED: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr,
    NB: tl.constexpr, SHARES: tl.constexpr, NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr,
    ITERATIONS: tl.constexpr, WARPS: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, HASHED: tl.constexpr,
    SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """The boundary in front of a mixture of experts, then its router.

    Grid D // BD + R * SHARES + R + ceil(E / BE) * D // BK.
    """
    G: tl.constexpr = D // BD
    ROW_PROGRAMS: tl.constexpr = R * SHARES
    GATES: tl.constexpr = (E + BE - 1) // BE * (D // BK)
    # With delayed mixing the gate needs no more than the column programs' rows, else the row programs'.
    LINE: tl.constexpr = 0 if DELAYED else ROWS_DONE
    AWAITED: tl.constexpr = G if DELAYED else ROW_PROGRAMS
    WAITERS: tl.constexpr = ROW_PROGRAMS + R + (GATES if DELAYED else 0)
    program = tl.program_id(0)
    if program < G:
        column_program(
            program, parts, live, given, table_in, row_tokens, fn, streams, hidden, tap, sums, counters,
            R, D, S, BD, W, MIXES, PARTS, EXPERTS, False, DELAYED, False, WARPS,
        )  # fmt: skip
    elif program < G + ROW_PROGRAMS:
        number = program - G
        row_program(
            number // SHARES, number % SHARES, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
            R, D, S, G, W, SHARES, DELAYED, False, ROUND, B, NB, NORM_EPS, MIX_EPS, 0 if DELAYED else ROWS_DONE,
        )  # fmt: skip
        leave(counters, 0, WAITERS)
    elif program < G + ROW_PROGRAMS + R:
        coefficient_program(
            program - G - ROW_PROGRAMS, base, scale, coefficients, sums, counters,
            R, D, S, G, W, NORM_EPS, MIX_EPS, ITERATIONS,
        )  # fmt: skip
        leave(counters, 0, WAITERS)
    else:
        gate = program - G - ROW_PROGRAMS - R
        items = small_items(bias, table, tokens, R, E, K, HASHED)
        alive = tl.load(live)
        if gate_program(
            gate, weight, hidden if DELAYED else x, norm, sums, logits, route_weight, slot, counters,
            R, D, E, K, BE, BK, GATES, LINE, AWAITED, DELAYED, W, NORM_EPS,
        ):  # fmt: skip
            selection(
                logits, items, alive, expert_ids, count, route_weight, slot, ids,
                R, E, K, D // BK, HASHED, SCALING, SUM_EPS,
            )  # fmt: skip
        leave(counters, LINE, WAITERS if DELAYED else GATES)
