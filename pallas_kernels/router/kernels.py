"""The fused router, and the boundary in front of it in the same launch, in Triton.

Knows: how the programs of one launch share the work (reference.py says what it computes). Does not know: shapes of a
model, or how the launch is made (fused.py).

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

ROWS_DONE = tl.constexpr(1)  # line of the latch between row programs and gate programs
GATE_DONE = tl.constexpr(2)  # line of the ticket of the gate programs
LANES = tl.constexpr(128)  # experts that a warp holds of a row at once: 16 bytes a thread
CHUNK = tl.constexpr(128)  # columns of one warp's product: warps that shared them would all do the same
SMALLEST = tl.constexpr(-(2**31))
NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def small_items(bias, table, tokens, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HASHED: tl.constexpr):
    """What `selection` needs besides the logits: the biases for every row, or the K experts [R] of its token.

    Nobody has read them for long, so that they take their time; every gate program asks before it waits for others.
    """
    row = tl.arange(0, R)
    items = ()
    if HASHED:
        token = tl.load(tokens + row)
        for k in tl.static_range(K):
            items = items + (tl.load(table + token * K + k),)
    else:
        for chunk in tl.static_range((E + LANES - 1) // LANES):
            expert = chunk * LANES + tl.arange(0, LANES)[None, :]
            real = (expert < E) & (row >= 0)[:, None]
            # For every row, so that biases are spread over the threads as logits are.
            items = items + (tl.load(bias + expert + row[:, None] * 0, mask=real, other=0.0),)
    return items


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
def softplus(x):
    """log(1 + exp(x)); log1p by the ratio that cancels the rounding of 1 + t."""
    t = tl.exp(-tl.abs(x))
    u = 1.0 + t
    tail = tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def ordered(x):
    """int32 that compare as float32 `x` do; NaN, which only dead rows hold, has some place too."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def selection(
    logits, items, live, expert_ids, count, weight, slot, ids,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, HASHED: tl.constexpr,
    SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """Scores, choice, weights and the list of entries, by one program; the first `live` rows are live.

    A warp holds whole rows, LANES experts at a time, so that the search for a row's largest score stays inside it;
    integers, because a warp finds the largest of those in one instruction.
    """
    CHUNKS: tl.constexpr = (E + LANES - 1) // LANES
    row = tl.arange(0, R)
    read = ()
    for chunk in tl.static_range(CHUNKS):
        expert = chunk * LANES + tl.arange(0, LANES)[None, :]
        real = (expert < E) & (row >= 0)[:, None]
        at = logits + row[:, None] * E + expert
        for split in tl.static_range(SPLITS):
            read = read + (tl.load(at + split * (R * E), mask=real, other=0.0, cache_modifier=".cg"),)
    scores = ()
    keys = ()
    for chunk in tl.static_range(CHUNKS):
        expert = chunk * LANES + tl.arange(0, LANES)[None, :]
        total = read[chunk * SPLITS]
        for split in tl.static_range(1, SPLITS):
            total += read[chunk * SPLITS + split]
        score = tl.sqrt(softplus(total))
        scores = scores + (score.to(tl.int32, bitcast=True),)
        if not HASHED:
            keys = keys + (tl.where(expert < E, ordered(score + items[chunk]), SMALLEST),)

    # [R, 8]: the choices of a row side by side, and their scores.
    place = tl.arange(0, 8)[None, :]
    chosen = tl.zeros((R, 8), tl.int32)
    own = tl.zeros((R, 8), tl.int32)
    mention = tl.zeros((R, 8), tl.int32)
    earlier = ()
    for k in tl.static_range(K):
        if HASHED:
            one = items[k]
            before = tl.zeros((R,), tl.int32)
            for other in tl.static_range(k):
                before += (earlier[other] == one).to(tl.int32)
            earlier = earlier + (one,)
            mention = tl.where(place == k, before[:, None], mention)
        else:
            largest = keys[0]
            for chunk in tl.static_range(1, CHUNKS):
                largest = tl.maximum(largest, keys[chunk])
            largest = tl.max(largest, axis=1)[:, None]
            lowest = tl.full((R, LANES), E - 1, tl.int32)
            for chunk in tl.static_range(CHUNKS):
                expert = chunk * LANES + tl.arange(0, LANES)[None, :]
                lowest = tl.minimum(lowest, tl.where(keys[chunk] == largest, expert, E - 1))
            one = tl.min(lowest, axis=1)
        bits = tl.zeros((R, LANES), tl.int32)
        left = ()
        for chunk in tl.static_range(CHUNKS):
            expert = chunk * LANES + tl.arange(0, LANES)[None, :]
            taken = expert == one[:, None]
            bits = tl.where(taken, scores[chunk], bits)
            if not HASHED:
                left = left + (tl.where(taken, SMALLEST, keys[chunk]),)
        keys = left
        chosen = tl.where(place == k, one[:, None], chosen)
        own = tl.where(place == k, tl.max(bits, axis=1)[:, None], own)

    used = (place < K) & (row >= 0)[:, None]
    alive = used & (row < live)[:, None]
    score = own.to(tl.float32, bitcast=True)
    share = score / (tl.sum(tl.where(used, score, 0.0), axis=1)[:, None] + SUM_EPS) * SCALING
    tl.store(ids + row[:, None] * K + place, tl.where(alive, chosen, -1), mask=used)

    # An expert has one entry, or as many as one row mentions it (only a table does so more than once): an entry is
    # a pair of an expert and the number of its mention within the row. Entries come in ascending order.
    entry = tl.reshape(tl.where(alive, chosen * 8 + mention, NOBODY), (R * 8,))
    index = tl.arange(0, R * 8)
    same = entry[:, None] == entry[None, :]
    first = tl.max((same & (index[:, None] < index[None, :])).to(tl.int32), axis=0) == 0
    first = first & (entry < NOBODY)
    smaller = (entry[None, :] < entry[:, None]) & first[None, :]
    mine = tl.reshape(tl.sum(smaller.to(tl.int32), axis=1), (R, 8))
    listed = tl.sum(first.to(tl.int32), axis=0)
    tl.store(count, listed)
    tl.store(expert_ids + index, -1, mask=(index >= listed) & (index < R * K))
    tl.store(expert_ids + mine, chosen, mask=alive)
    tl.store(weight + mine * R + row[:, None], share, mask=alive)
    tl.store(slot + mine * R + row[:, None], place + tl.zeros_like(mine), mask=alive)


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
