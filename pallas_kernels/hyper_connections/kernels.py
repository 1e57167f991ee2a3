"""The fused boundary between two sublayers, in Triton.

Knows: how the programs of one launch share a boundary (reference.py says what it computes). Does not know: shapes of
a model, or how the launch is made (fused.py).

    programs            work                                                        waits for
    0 .. G-1            BD columns of every row and stream: put the output          nobody
                        together, spread, store; partial products with fn (column_kernels.py)
    then R * SHARES     a share of one row: collapse, norm, rounding                all column programs
    then R              one row: coefficients for the next boundary                 all column programs

With delayed mixing a column program already collapses its columns; row programs only norm them. Without, each of a
row's programs collapses the whole row, for its norm; only what follows is shared. Sinkhorn, a long chain of tiny
steps, runs beside the row programs and nobody inside the launch waits for it.

Partial sums, float32 [G, R, W]: the M products, and at W - 1 the sum of squares of the streams. Behind them, [R, G],
the sums of squares of hidden rows collapsed by the column programs. All are added in an order that depends on nothing:
same input, same bits.

The functions are used a second time by the launch that also routes (router/kernels.py).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import arrive, leave, wait
from pallas_kernels.device_numbers import INTERPRETED, inverse_rms, round_activations, rounded
from pallas_kernels.hyper_connections.column_kernels import column_program

SUMMED_AT_ONCE = tl.constexpr(64)


@triton.jit
def summed(sums, row, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The partial sums [W] of one row, added over the column programs."""
    # Columns that nobody wrote are loaded too, and dropped by whoever takes an entry: a mask would split the loads.
    column = tl.arange(0, W)
    total = tl.zeros((SUMMED_AT_ONCE, W), tl.float32)
    for first in tl.static_range(0, G, SUMMED_AT_ONCE):
        program = (first + tl.arange(0, SUMMED_AT_ONCE))[:, None]
        at = sums + (program * R + row) * W + column[None, :]
        if first + SUMMED_AT_ONCE <= G:
            total += tl.load(at, cache_modifier=".cg")
        else:
            total += tl.load(at, mask=program < G, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit
def hidden_inverses(
    sums, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, W: tl.constexpr, NORM_EPS: tl.constexpr
):
    """Inverse root mean squares [R] of the hidden rows of delayed mixing; the same bits in every program."""
    row = tl.arange(0, R)[:, None]
    total = tl.zeros((R, SUMMED_AT_ONCE), tl.float32)
    for first in tl.static_range(0, G, SUMMED_AT_ONCE):
        program = first + tl.arange(0, SUMMED_AT_ONCE)[None, :]
        at = sums + G * (R * W) + row * G + program
        total += tl.load(at, mask=(program < G) & (row >= 0), other=0.0, cache_modifier=".cg")
    return inverse_rms(tl.sum(total, axis=1), D, NORM_EPS)


@triton.jit
def entry(values, index: tl.constexpr, W: tl.constexpr):
    """One element of a vector [W], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, W) == index, values, 0.0), axis=0)


@triton.jit
def collapsed(pre, read, S: tl.constexpr, DTYPE: tl.constexpr):
    """The streams `read` weighted by the scalars `pre`, as kept in DTYPE."""
    value = pre[0] * read[0].to(tl.float32)
    for s in tl.static_range(1, S):
        value += pre[s] * read[s].to(tl.float32)
    return rounded(value, DTYPE)


@triton.jit
def stream_turns(streams, inside, D: tl.constexpr, S: tl.constexpr, TURNS: tl.constexpr, STEP: tl.constexpr):
    """TURNS turns of STEP columns of a row's S streams, from the pointer on: for each the S streams at `inside`."""
    turns = ()
    for turn in tl.static_range(TURNS):
        read = ()
        for s in tl.static_range(S):
            read = read + (tl.load(streams + s * D + turn * STEP + inside, cache_modifier=".cg"),)
        turns = turns + (read,)
    return turns


@triton.jit
def row_program(
    row, share, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, G: tl.constexpr, W: tl.constexpr, SHARES: tl.constexpr,
    DELAYED: tl.constexpr, HIDDEN: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr, NB: tl.constexpr,
    NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr, HANDED: tl.constexpr,
):  # fmt: skip
    """Waits for all columns; collapses, norms and rounds one of SHARES shares of a row, NB blocks of B columns a turn.

    Arrives at line HANDED, unless that is 0, as soon as the normed columns are written.
    """
    DTYPE: tl.constexpr = streams.dtype.element_ty
    TURNS: tl.constexpr = D // (SHARES * NB * B)
    inside = tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :]
    column = tl.arange(0, W)
    begin = share * (D // SHARES)
    weights = ()
    for turn in tl.static_range(TURNS):
        weights = weights + (tl.load(norm + begin + turn * (NB * B) + inside),)
    if not DELAYED:
        first = tl.load(scale)
        bases = tl.load(base + column, mask=column < S, other=0.0)
    wait(counters, 0, G)

    # All of it is on its way before the first sum, which the coefficients need, comes together.
    kept = ()
    if DELAYED:
        for turn in tl.static_range(TURNS):
            at = hidden + row * D + begin + turn * (NB * B) + inside
            kept = kept + (tl.load(at, cache_modifier=".cg").to(tl.float32),)
        each = hidden_inverses(sums, G, R, D, W, NORM_EPS)
        inverse = tl.sum(tl.where(tl.arange(0, R) == row, each, 0.0), axis=0)
    else:
        of_row = streams + row * (S * D)
        own = stream_turns(of_row + begin, inside, D, S, TURNS, NB * B)
        whole = own
        if SHARES > 1:
            whole = stream_turns(of_row, inside, D, S, SHARES * TURNS, NB * B)
        total = summed(sums, row, G, R, W)
        mixes = total * inverse_rms(entry(total, W - 1, W), S * D, NORM_EPS)
        gates = tl.sigmoid(mixes * first + bases) + MIX_EPS
        pre = ()
        for s in tl.static_range(S):
            pre = pre + (entry(gates, s, W),)
        for turn in tl.static_range(TURNS):
            value = collapsed(pre, own[turn], S, DTYPE)
            if HIDDEN:
                tl.store(hidden + row * D + begin + turn * (NB * B) + inside, value.to(DTYPE))
            kept = kept + (value,)
        squares = tl.zeros((NB, B), tl.float32)
        for turn in tl.static_range(SHARES * TURNS):
            value = collapsed(pre, whole[turn], S, DTYPE)
            squares += value * value
        inverse = inverse_rms(tl.sum(tl.sum(squares, axis=1), axis=0), D, NORM_EPS)
    normed = ()
    for turn in tl.static_range(TURNS):
        value = rounded(kept[turn] * inverse * weights[turn].to(tl.float32), DTYPE)
        tl.store(x + row * D + begin + turn * (NB * B) + inside, value.to(DTYPE))
        normed = normed + (value,)
    if HANDED > 0:
        arrive(counters, HANDED)
    for turn in tl.static_range(TURNS):
        value = normed[turn]
        if ROUND:
            value = round_activations(value, 1)
        tl.store(rounded_x + row * D + begin + turn * (NB * B) + inside, value.to(tl.float16))


@triton.jit
def reciprocal(x):
    """1 / x of a normal float32, within one last bit."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def inverses(sums, S: tl.constexpr):
    """1 / x of each of S numbers; two share a reciprocal, the scarce instruction of the chain of Sinkhorn steps."""
    made = ()
    for pair in tl.static_range(S // 2):
        one = sums[2 * pair]
        other = sums[2 * pair + 1]
        both = reciprocal(one * other)
        made = made + (other * both, one * both)
    if S % 2 == 1:
        made = made + (reciprocal(sums[S - 1]),)
    return made


@triton.jit
def scaled_sums(comb, scales, before, S: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr):
    """Column or row sums of comb with its rows or columns times `scales`, plus EPS times the sums `before`."""
    made = ()
    for a in tl.static_range(S):
        total = EPS * before[a]
        for b in tl.static_range(S):
            total += comb[b * S + a if COLUMNS else a * S + b] * scales[b]
        made = made + (total,)
    return made


@triton.jit
def coefficient_program(
    row, base, scale, coefficients, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, G: tl.constexpr, W: tl.constexpr, NORM_EPS: tl.constexpr,
    MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Waits for all columns; writes one row's pre, post and comb."""
    M: tl.constexpr = (2 + S) * S
    column = tl.arange(0, W)
    part = tl.minimum(column // S, 2)
    bases = tl.load(base + column, mask=column < M, other=0.0)
    scales = tl.load(scale + part)
    wait(counters, 0, G)

    sum_of_row = summed(sums, row, G, R, W)
    mixes = sum_of_row * inverse_rms(entry(sum_of_row, W - 1, W), S * D, NORM_EPS) * scales + bases
    gates = tl.sigmoid(mixes)
    gates = tl.where(column < S, gates + MIX_EPS, 2 * gates)
    tl.store(coefficients + row * M + column, gates, mask=column < 2 * S)

    weights = ()
    whole = ()
    for j in tl.static_range(S):
        raw = ()
        for k in tl.static_range(S):
            raw = raw + (entry(mixes, 2 * S + j * S + k, W),)
        largest = raw[0]
        for k in tl.static_range(1, S):
            largest = tl.maximum(largest, raw[k])
        total = 0.0
        for k in tl.static_range(S):
            weight = tl.exp(raw[k] - largest)
            total += weight
            weights = weights + (weight,)
        whole = whole + (total,)
    parts = inverses(whole, S)
    comb = ()
    for j in tl.static_range(S):
        for k in tl.static_range(S):
            comb = comb + (weights[j * S + k] * parts[j] + MIX_EPS,)
    # Dividing comb by its column sums and row sums in turn only ever scales its rows and columns. With u and v the
    # inverse scales, comb[j, k] / (u[j] v[k]) has the row sums (comb / v)[j] / u[j], so that dividing by these plus
    # eps makes u[j] = (comb / v)[j] + eps u[j]; columns alike. The matrix itself stays as it is.
    ones = ()
    for _ in tl.static_range(S):
        ones = ones + (1.0,)
    v = scaled_sums(comb, ones, ones, S, True, MIX_EPS)
    columns = inverses(v, S)
    u = ones
    rows = ones
    for _ in range(ITERATIONS - 1):
        u = scaled_sums(comb, columns, u, S, False, MIX_EPS)
        rows = inverses(u, S)
        v = scaled_sums(comb, rows, v, S, True, MIX_EPS)
        columns = inverses(v, S)
    for j in tl.static_range(S):
        for k in tl.static_range(S):
            value = comb[j * S + k] * rows[j] * columns[k]
            tl.store(coefficients + row * M + 2 * S + j * S + k, value)


@triton.jit
def boundary(
    parts, live, given, table, tokens, fn, base, scale, norm, streams_in, counters_in,
    streams, coefficients, hidden, x, rounded_x, tap, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, EMBED: tl.constexpr, LAST: tl.constexpr, DELAYED: tl.constexpr,
    TAP: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr, NB: tl.constexpr, SHARES: tl.constexpr,
    NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One boundary; grid D // BD + R * SHARES behind the last layer, else D // BD + R * SHARES + R."""
    G: tl.constexpr = D // BD
    ROW_PROGRAMS: tl.constexpr = R * SHARES
    WAITERS: tl.constexpr = ROW_PROGRAMS if LAST else ROW_PROGRAMS + R
    program = tl.program_id(0)
    if program < G:
        column_program(
            program, parts, live, given, table, tokens, fn, streams, hidden, tap, sums, counters,
            R, D, S, BD, W, MIXES, PARTS, EXPERTS, EMBED, DELAYED, TAP, WARPS,
        )  # fmt: skip
    elif program < G + ROW_PROGRAMS:
        number = program - G
        row_program(
            number // SHARES, number % SHARES, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
            R, D, S, G, W, SHARES, DELAYED, LAST, ROUND, B, NB, NORM_EPS, MIX_EPS, 0,
        )  # fmt: skip
        leave(counters, 0, WAITERS)
    else:
        if not LAST:
            coefficient_program(
                program - G - ROW_PROGRAMS, base, scale, coefficients, sums, counters,
                R, D, S, G, W, NORM_EPS, MIX_EPS, ITERATIONS,
            )  # fmt: skip
            leave(counters, 0, WAITERS)
