"""The programs of a boundary that work on columns, in Triton.

Knows: what concerns a few columns of all rows and streams alone. Does not know: the rest of a launch (kernels.py), or
what is computed (reference.py).

A thread has the same C = BD // (4 * WARPS) columns of one row in every stream, so that output and streams meet in its
registers and each number is loaded once. For the products with `fn` its numbers already lie as a tensor core wants
them: a step's 16 columns are, in lane q, pairs of streams of one column (`register_mma` names lanes).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import arrive
from pallas_kernels.device_numbers import rounded
from pallas_kernels.register_mma import bf16, lanes


@triton.jit
def near(pointer, C: tl.constexpr):
    """C (1 or 2) numbers side by side as float32, in one load each thread; two must begin at a multiple of two."""
    if C == 1:
        return (tl.load(pointer).to(tl.float32),)
    elif pointer.dtype.element_ty == tl.bfloat16:
        word = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True))
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        word = tl.load(pointer.to(tl.pointer_type(tl.int64), bitcast=True))
        first, second = word.to(tl.int32), (word >> 32).to(tl.int32)
        return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def put(pointer, values, C: tl.constexpr):
    """Stores C numbers side by side, already rounded to the pointer's type."""
    if C == 2 and pointer.dtype.element_ty == tl.bfloat16:
        tl.store(pointer.to(tl.pointer_type(tl.int32), bitcast=True), bf16.pair(values[0], values[1]))
    else:
        for c in tl.static_range(C):
            tl.store(pointer + c, values[c].to(pointer.dtype.element_ty))


@triton.jit
def output_parts(
    parts,
    row,
    column,
    R: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    C: tl.constexpr,
):
    """The parts of a sublayer's output at C columns of rows. What dead rows hold is among them: a mask would wait."""
    STEP: tl.constexpr = D if EXPERTS else R * D
    parts += row * (PARTS * D if EXPERTS else D) + column
    read = ()
    for part in tl.static_range(PARTS):
        read = read + (near(parts + part * STEP, C),)
    return read


@triton.jit
def output_sum(
    read, row, live, PARTS: tl.constexpr, EXPERTS: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr
):
    """What `output_parts` read, added up, as kept in DTYPE; of experts, rows from `live` on have none of the routed."""
    made = ()
    for c in tl.static_range(C):
        if EXPERTS:
            total = tl.zeros_like(read[0][c])
            for part in tl.static_range(PARTS - 1):
                total += tl.where(row < live, read[part][c], 0.0)
            total += read[PARTS - 1][c]
        else:
            total = read[0][c]
            for part in tl.static_range(1, PARTS):
                total += read[part][c]
        made = made + (rounded(total, DTYPE),)
    return made


@triton.jit
def _coefficients(pre, S: tl.constexpr):
    """A row's coefficients: pre [S], post [S], comb [S * S], in loads of four."""
    made = ()
    for four in tl.static_range((2 + S) * S // 4):
        x = lanes.load_four(pre + 4 * four)
        made = made + (x[0], x[1], x[2], x[3])
    return made


@triton.jit
def _spread(mix, old, output, S: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    """The new streams: post times output plus comb times the old ones, [S][C]; mix from `_coefficients`."""
    made = ()
    for s in tl.static_range(S):
        values = ()
        for c in tl.static_range(C):
            mixed = mix[2 * S + s] * old[0][c]
            for j in tl.static_range(1, S):
                mixed += mix[(2 + j) * S + s] * old[j][c]
            values = values + (rounded(mix[S + s] * output[c] + mixed, DTYPE),)
        made = made + (values,)
    return made


@triton.jit
def _words(values, S: tl.constexpr, C: tl.constexpr, THIRDS: tl.constexpr):
    """Pairs of streams of each column as words of bf16 pairs, four with zeros behind them; a tuple for each third."""
    high = ()
    middle = ()
    low = ()
    zero = tl.zeros_like(values[0][0]).to(tl.int32)
    for c in tl.static_range(C):
        for s in tl.static_range(0, S, 2):
            if THIRDS:
                word = bf16.pair_of_thirds(values[s][c], values[s + 1][c])
                middle = middle + (word[1],)
                low = low + (word[2],)
                high = high + (word[0],)
            else:
                high = high + (bf16.pair(values[s][c], values[s + 1][c]),)
    for _ in tl.static_range(4 - S * C // 2):
        high = high + (zero,)
        if THIRDS:
            middle = middle + (zero,)
            low = low + (zero,)
    if THIRDS:
        return low, middle, high
    else:
        return (high,)


@triton.jit
def _products(weights, new, S: tl.constexpr, C: tl.constexpr, EIGHTS: tl.constexpr, DTYPE: tl.constexpr):
    """Six sums of each lane: rows of `fn` in EIGHTS eights times the rows' numbers; nothing of either is lost."""
    TERMS: tl.constexpr = 1 if DTYPE == tl.bfloat16 else 3
    zero = tl.zeros_like(new[0][0])
    none = zero.to(tl.int32)
    nothing = (none, none, none, none)
    upper = (zero, zero, zero, zero)
    lower = upper
    rows = _words(new, S, C, TERMS > 1)
    eights = ()
    for eight in tl.static_range(EIGHTS):
        eights = eights + (_words(weights[eight * S : eight * S + S], S, C, True),)
    for third in tl.static_range(3):
        second = nothing
        if EIGHTS > 1:
            second = eights[1][third]
        for term in tl.static_range(TERMS):
            upper = bf16.step(eights[0][third], second, rows[term], upper)
            if EIGHTS > 2:
                lower = bf16.step(eights[2][third], nothing, rows[term], lower)
    return upper[0], upper[1], upper[2], upper[3], lower[0], lower[1]


@triton.jit
def column_program(
    program, parts, live, given, table, tokens, fn, streams, hidden, tap, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, EMBED: tl.constexpr, DELAYED: tl.constexpr, TAP: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Everything that concerns BD columns alone, then arrives at line 0."""
    DTYPE: tl.constexpr = streams.dtype.element_ty
    C: tl.constexpr = BD // (4 * WARPS)
    EIGHTS: tl.constexpr = (MIXES + 7) // 8
    warp, row, q = lanes.position(WARPS)
    column = program * BD + (warp * 4 + q) * C
    own_streams = streams + row * (S * D) + column
    pre = given + row * ((2 + S) * S)

    # All loads are made at once. Those of the weights, which nobody has read for long, stand in front of the first use.
    new = ()
    if EMBED:
        token = tl.load(tokens + row).to(tl.int64)
        embedded = near(table + token * D + column, C)
    else:
        for s in tl.static_range(S):
            new = new + (near(own_streams + s * D, C),)
    if PARTS > 0 or DELAYED:
        mix = _coefficients(pre, S)
    if PARTS > 0:
        read = output_parts(parts, row, column, R, D, PARTS, EXPERTS, C)
        alive = row
        if EXPERTS:
            alive = tl.load(live + row * 0)
    weights = ()
    for eight in tl.static_range(EIGHTS):
        place = tl.minimum(eight * 8 + row, MIXES - 1) * (S * D) + column
        for s in tl.static_range(S):
            weights = weights + (near(fn + place + s * D, C),)
    lanes.fence(row)
    if EMBED:
        values = ()
        for c in tl.static_range(C):
            values = values + (rounded(embedded[c], DTYPE),)
        for _ in tl.static_range(S):
            new = new + (values,)
    if PARTS > 0:
        new = _spread(mix, new, output_sum(read, row, alive, PARTS, EXPERTS, DTYPE, C), S, C, DTYPE)
    if EMBED or PARTS > 0:
        for s in tl.static_range(S):
            put(own_streams + s * D, new[s], C)

    zero = tl.zeros_like(new[0][0])
    squares = zero
    hidden_squares = zero
    means = ()
    collapsed = ()
    for c in tl.static_range(C):
        total = zero
        collapse = zero
        for s in tl.static_range(S):
            squares += new[s][c] * new[s][c]
            total += new[s][c]
            if DELAYED:
                collapse += mix[s] * new[s][c]
        means = means + (rounded(total / S, DTYPE),)
        collapse = rounded(collapse, DTYPE)
        hidden_squares += collapse * collapse
        collapsed = collapsed + (collapse,)
    if TAP:
        put(tap + row * D + column, means, C)
    if DELAYED:
        put(hidden + row * D + column, collapsed, C)

    made = (zero, zero, zero, zero, zero, zero)
    if MIXES > 0:
        made = _products(weights, new, S, C, EIGHTS, DTYPE)
    if MIXES > 0 or DELAYED:
        # Rows 24 and beyond do not exist; two of their sums are used for what else is added over the warps.
        channel, other, owner = lanes.places(WARPS)
        first, second = lanes.sum_over_warps(
            (made[0], made[1], made[2], made[3], made[4], made[5], squares, hidden_squares), WARPS
        )
        of_row = lanes.sum_of_quad(second)
        own = sums + program * (R * W)
        if MIXES > 0:
            tl.store(own + other * W + channel, first, mask=owner & (channel < MIXES))
            if MIXES > 16:
                tl.store(own + other * W + 16 + channel, second, mask=owner & (16 + channel < MIXES))
            tl.store(own + row * W + (W - 1), of_row, mask=(warp == 2) & (q == 0))
        if DELAYED:
            at = sums + D // BD * (R * W) + row * (D // BD) + program
            tl.store(at, of_row, mask=(warp == 3) & (q == 0))
    arrive(counters, 0)
