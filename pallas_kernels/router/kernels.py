"""The fused router, and the boundary in front of it in the same launch, in Triton.

Knows: how the programs of one launch share the work (reference.py says what it computes). Does not know: shapes of a
model, or how the launch is made (fused.py).

    gate programs     BE experts by a slice of K columns: partial logits [R, BE]
    the last of them  adds the slices, scores, choice, weights, and the list of distinct experts

With the boundary, the programs of hyper_connections/kernels.py come first; gate programs have their weights under
way from the start and wait for the row programs. Everyone waits for smaller numbers only.
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import arrive, is_last, leave, wait
from pallas_kernels.device_numbers import INTERPRETED
from pallas_kernels.hyper_connections.kernels import coefficient_program, column_program, row_program

ROWS_DONE = tl.constexpr(1)  # line of the latch between row programs and gate programs
GATE_DONE = tl.constexpr(2)  # line of the ticket of the gate programs


@triton.jit
def gate_program(
    program, weight, x, logits, counters,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, GATES: tl.constexpr,
    AWAITED: tl.constexpr,
):  # fmt: skip
    """Partial logits [R, BE] over BK columns, behind `AWAITED` row programs; true in the last of GATES programs."""
    SPLITS: tl.constexpr = D // BK
    expert = (program // SPLITS) * BE + tl.arange(0, BE)
    split = program % SPLITS
    column = split * BK + tl.arange(0, BK)
    row = tl.arange(0, R)
    own = tl.load(weight + expert[:, None] * D + column[None, :], mask=(expert < E)[:, None], other=0.0)
    if AWAITED > 0:
        wait(counters, ROWS_DONE, AWAITED)
    rows = tl.trans(tl.load(x + row[:, None] * D + column[None, :], cache_modifier=".cg"))
    exact: tl.constexpr = (weight.dtype.element_ty == tl.bfloat16) and (x.dtype.element_ty == tl.bfloat16)
    if exact and not INTERPRETED:
        part = tl.dot(own, rows)
    else:
        part = tl.dot(own.to(tl.float32), rows.to(tl.float32), input_precision="ieee")
    at = (split * R + row[None, :]) * E + expert[:, None]
    tl.store(logits + at, part, mask=(expert < E)[:, None] & (row >= 0)[None, :])
    return is_last(counters, GATE_DONE, GATES)


@triton.jit
def softplus(x):
    """log(1 + exp(x)); log1p by the ratio that cancels the rounding of 1 + t."""
    t = tl.exp(-tl.abs(x))
    u = 1.0 + t
    tail = tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def selection(
    logits, bias, table, tokens, live, expert_ids, count, weight, slot, ids, places,
    R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, HASHED: tl.constexpr,
    SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """Scores, choice, weights and the list of entries, by one program."""
    ENTRIES: tl.constexpr = R * K
    row = tl.arange(0, R)
    expert = tl.arange(0, EP)
    real = (expert < E)[None, :] & (row >= 0)[:, None]
    alive = row < tl.load(live)
    at = row[:, None] * E + expert[None, :]
    total = tl.load(logits + at, mask=real, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(logits + split * (R * E) + at, mask=real, other=0.0, cache_modifier=".cg")
    score = tl.sqrt(softplus(total))

    times = tl.zeros((R, EP), tl.int32)
    chosen = ()
    if HASHED:
        token = tl.load(tokens + row)
        for k in tl.static_range(K):
            one = tl.load(table + token * K + k)
            times += (expert[None, :] == one[:, None]).to(tl.int32)
            chosen = chosen + (one,)
    else:
        left = score + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
        left = tl.where(real, left, float("-inf"))
        for _ in tl.static_range(K):
            _, one = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
            one = tl.minimum(one, E - 1)  # whatever NaN does to comparisons, this is an expert
            taken = expert[None, :] == one[:, None]
            times += taken.to(tl.int32)
            left = tl.where(taken, float("-inf"), left)
            chosen = chosen + (one,)

    # An expert has one entry, or as many as one row mentions it (only a table does so more than once).
    entries = tl.max(tl.where(alive[:, None], times, 0), axis=0)
    tl.store(count, tl.sum(entries, axis=0))
    place = tl.cumsum(entries, axis=0) - entries
    tl.store(places + expert, place, mask=expert < E)
    tl.store(logits + at, score, mask=real)
    entry = tl.arange(0, R * 8)
    tl.store(expert_ids + entry, -1, mask=entry < ENTRIES)
    cell = entry[None, :] * R + row[:, None]
    inside = (entry < ENTRIES)[None, :] & (row >= 0)[:, None]
    tl.store(weight + cell, 0.0, mask=inside)
    tl.store(slot + cell, -1, mask=inside)
    tl.debug_barrier()

    # From here on each row looks up its own few experts, through memory.
    own = ()
    for k in tl.static_range(K):
        own = own + (tl.load(logits + row * E + chosen[k]),)
    whole = own[0]
    for k in tl.static_range(1, K):
        whole += own[k]
    for k in tl.static_range(K):
        mine = tl.load(places + chosen[k])
        for earlier in tl.static_range(k):
            mine += (chosen[k] == chosen[earlier]).to(tl.int32)
        tl.store(expert_ids + mine, chosen[k], mask=alive)
        tl.store(weight + mine * R + row, own[k] / (whole + SUM_EPS) * SCALING, mask=alive)
        tl.store(slot + mine * R + row, k, mask=alive)
        tl.store(ids + row * K + k, tl.where(alive, chosen[k], -1))


@triton.jit
def route(
    x, weight, bias, table, tokens, live, counters_in,
    expert_ids, count, route_weight, slot, ids, logits, places, counters,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, HASHED: tl.constexpr, SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """The router alone; grid ceil(E / BE) * D // BK."""
    GATES: tl.constexpr = (E + BE - 1) // BE * (D // BK)
    if gate_program(tl.program_id(0), weight, x, logits, counters, R, D, E, BE, BK, GATES, 0):
        selection(
            logits, bias, table, tokens, live, expert_ids, count, route_weight, slot, ids, places,
            R, E, EP, K, D // BK, HASHED, SCALING, SUM_EPS,
        )  # fmt: skip


@triton.jit
def boundary_and_route(
    parts, given, table_in, row_tokens, fn, base, scale, norm, streams_in, weight, bias, table,
    tokens, live, counters_in,
    streams, coefficients, hidden, x, rounded_x, tap, sums, expert_ids, count, route_weight, slot, ids, logits, places,
    counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, DELAYED: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr,
    NB: tl.constexpr, NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, HASHED: tl.constexpr,
    SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """The boundary in front of a mixture of experts, then its router; grid D // BD + 2 R + ceil(E / BE) * D // BK."""
    G: tl.constexpr = D // BD
    GATES: tl.constexpr = (E + BE - 1) // BE * (D // BK)
    program = tl.program_id(0)
    if program < G:
        column_program(
            program, parts, live, given, table_in, row_tokens, fn, streams, hidden, tap, sums, counters,
            R, D, S, BD, W, MIXES, PARTS, EXPERTS, False, DELAYED, False,
        )  # fmt: skip
    elif program < G + R:
        row_program(
            program - G, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
            R, D, S, G, W, MIXES, DELAYED, False, ROUND, B, NB, NORM_EPS, MIX_EPS,
        )  # fmt: skip
        arrive(counters, ROWS_DONE)
        leave(counters, 0, 2 * R)
    elif program < G + 2 * R:
        coefficient_program(
            program - G - R, base, scale, coefficients, sums, counters,
            R, D, S, G, W, DELAYED, NORM_EPS, MIX_EPS, ITERATIONS,
        )  # fmt: skip
        leave(counters, 0, 2 * R)
    else:
        gate = program - G - 2 * R
        if gate_program(gate, weight, x, logits, counters, R, D, E, BE, BK, GATES, R):
            selection(
                logits, bias, table, tokens, live, expert_ids, count, route_weight, slot, ids, places,
                R, E, EP, K, D // BK, HASHED, SCALING, SUM_EPS,
            )  # fmt: skip
        leave(counters, ROWS_DONE, GATES)
