"""The fused boundary between two sublayers, in Triton.

Knows: how the programs of one launch share a boundary (reference.py says what it computes). Does not know: shapes of
a model, or how the launch is made (fused.py).

    programs            work                                                        waits for
    0 .. G-1            BD columns of every row and stream: put the output          nobody
                        together, spread, store; partial products with fn
    G .. G+R-1          one row: collapse, norm, rounding                           all column programs
    G+R .. G+2R-1       one row: coefficients for the next boundary                 all column programs

With delayed mixing a column program already collapses its columns; its row program only norms them. Sinkhorn, a long
chain of tiny steps, runs beside the row programs and nobody inside the launch waits for it.

Partial sums, float32 [G, R, W]: the M products, then at W - 2 the sum of squares of the streams, at W - 1 that of
the hidden row. They are added in the order of the programs: same input, same bits.

The functions are used a second time by the launch that also routes (router/kernels.py).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import arrive, leave, wait
from pallas_kernels.device_numbers import full_product, inverse_rms, round_activations, rounded, settled

SUMMED_AT_ONCE = tl.constexpr(32)


@triton.jit
def sublayer_output(
    parts, live, rows, columns, R: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns [R, BD] of the sublayer's output, float32 values of the model's type."""
    if EXPERTS:
        parts += rows * (PARTS * D) + columns
        alive = (rows < tl.load(live)) & (columns >= 0)
        shared = tl.load(parts + (PARTS - 1) * D).to(tl.float32)
        total = tl.zeros_like(shared)
        for part in tl.static_range(PARTS - 1):
            total += tl.load(parts + part * D, mask=alive, other=0.0).to(tl.float32)
        total += shared
    else:
        parts += rows * D + columns
        total = tl.load(parts)
        for part in tl.static_range(1, PARTS):
            total += tl.load(parts + part * (R * D))
    return rounded(total, DTYPE)


@triton.jit
def column_program(
    program, parts, live, given, table, tokens, fn, streams, hidden, tap, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, EMBED: tl.constexpr, DELAYED: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """Everything that concerns BD columns alone, then arrives at line 0."""
    DTYPE: tl.constexpr = streams.dtype.element_ty
    M: tl.constexpr = (2 + S) * S
    rows = tl.arange(0, R)[:, None]
    columns = program * BD + tl.arange(0, BD)[None, :]
    mix = tl.arange(0, W)[:, None]
    own_streams = streams + rows * (S * D) + columns
    pre = given + rows * M
    post = pre + S
    comb = pre + 2 * S

    # The weights depend on nothing: their loads are under way while the activations are fetched.
    weights = ()
    if MIXES > 0:
        used = (mix < MIXES) & (columns >= 0)
        own_weights = fn + mix * (S * D) + columns
        for k in tl.static_range(S):
            weights = weights + (tl.load(own_weights + k * D, mask=used, other=0.0),)

    new = ()
    if EMBED:
        token = tl.load(tokens + rows).to(tl.int64)
        value = rounded(tl.load(table + token * D + columns).to(tl.float32), DTYPE)
        for _ in tl.static_range(S):
            new = new + (value,)
    else:
        old = ()
        for j in tl.static_range(S):
            old = old + (tl.load(own_streams + j * D).to(tl.float32),)
        if PARTS > 0:
            output = sublayer_output(parts, live, rows, columns, R, D, PARTS, EXPERTS, DTYPE)
            for k in tl.static_range(S):
                mixed = tl.load(comb + k) * old[0]
                for j in tl.static_range(1, S):
                    mixed += tl.load(comb + (j * S + k)) * old[j]
                new = new + (rounded(tl.load(post + k) * output + mixed, DTYPE),)
        else:
            new = old
    if EMBED or PARTS > 0:
        for k in tl.static_range(S):
            tl.store(own_streams + k * D, new[k].to(DTYPE))
    if TAP:
        mean = new[0]
        for k in tl.static_range(1, S):
            mean += new[k]
        tl.store(tap + rows * D + columns, rounded(mean / S, DTYPE).to(DTYPE))

    row = tl.arange(0, R)
    own = sums + (program * R + row) * W
    if DELAYED:
        value = tl.load(pre) * new[0]
        for s in tl.static_range(1, S):
            value += tl.load(pre + s) * new[s]
        value = rounded(value, DTYPE)
        tl.store(hidden + rows * D + columns, value.to(DTYPE))
        tl.store(own + (W - 1), tl.sum(value * value, axis=1))
    if MIXES > 0:
        products = tl.zeros((W, R), tl.float32)
        squares = tl.zeros_like(new[0])
        for k in tl.static_range(S):
            products = full_product(settled(weights[k]), tl.trans(settled(new[k])), products, DTYPE)
            squares += new[k] * new[k]
        tl.store(own + (W - 2), tl.sum(squares, axis=1))
        tl.store(
            sums + (program * R + row[None, :]) * W + mix, products, mask=(mix < MIXES) & (row >= 0)[None, :]
        )
    arrive(counters, 0)


@triton.jit
def summed(
    sums, row, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr, DELAYED: tl.constexpr
):
    """The partial sums [W] of one row, added over the column programs."""
    column = tl.arange(0, W)
    written = (column < MIXES) | ((column == W - 2) & (MIXES > 0)) | ((column == W - 1) & DELAYED)
    total = tl.zeros((W,), tl.float32)
    for first in tl.static_range(0, G, SUMMED_AT_ONCE):
        program = first + tl.arange(0, SUMMED_AT_ONCE)
        part = tl.load(
            sums + (program[:, None] * R + row) * W + column[None, :],
            mask=(program < G)[:, None] & written[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        total += tl.sum(part, axis=0)
    return total


@triton.jit
def entry(values, index: tl.constexpr, W: tl.constexpr):
    """One element of a vector [W], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, W) == index, values, 0.0), axis=0)


@triton.jit
def row_program(
    row, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, G: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    DELAYED: tl.constexpr, HIDDEN: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr, NB: tl.constexpr,
    NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr,
):  # fmt: skip
    """Waits for all columns; collapses, norms and rounds one row, NB blocks of B columns at a time."""
    DTYPE: tl.constexpr = streams.dtype.element_ty
    TURNS: tl.constexpr = D // (NB * B)
    inside = tl.arange(0, NB)[:, None] * B + tl.arange(0, B)[None, :]
    column = tl.arange(0, W)
    weights = ()
    for turn in tl.static_range(TURNS):
        weights = weights + (tl.load(norm + turn * (NB * B) + inside),)
    if not DELAYED:
        first = tl.load(scale)
        bases = tl.load(base + column, mask=column < S, other=0.0)
    wait(counters, 0, G)

    total = summed(sums, row, G, R, W, MIXES, DELAYED)
    if not DELAYED:
        mixes = total * inverse_rms(entry(total, W - 2, W), S * D, NORM_EPS)
        gates = tl.sigmoid(mixes * first + bases) + MIX_EPS
        pre = ()
        for s in tl.static_range(S):
            pre = pre + (entry(gates, s, W),)
    kept = ()
    squares = tl.zeros((NB, B), tl.float32)
    for turn in tl.static_range(TURNS):
        at = turn * (NB * B) + inside
        if DELAYED:
            value = tl.load(hidden + row * D + at, cache_modifier=".cg").to(tl.float32)
        else:
            value = tl.zeros((NB, B), tl.float32)
            for s in tl.static_range(S):
                stream = tl.load(streams + (row * S + s) * D + at, cache_modifier=".cg").to(tl.float32)
                value += pre[s] * stream
            value = rounded(value, DTYPE)
            squares += value * value
            if HIDDEN:
                tl.store(hidden + row * D + at, value.to(DTYPE))
        kept = kept + (value,)
    if DELAYED:
        inverse = inverse_rms(entry(total, W - 1, W), D, NORM_EPS)
    else:
        inverse = inverse_rms(tl.sum(tl.sum(squares, axis=1), axis=0), D, NORM_EPS)
    for turn in tl.static_range(TURNS):
        at = row * D + turn * (NB * B) + inside
        value = rounded(kept[turn] * inverse * weights[turn].to(tl.float32), DTYPE)
        tl.store(x + at, value.to(DTYPE))
        if ROUND:
            value = round_activations(value, 1)
        tl.store(rounded_x + at, value.to(tl.float16))


@triton.jit
def normalised(comb, S: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr):
    """comb (a tuple of S * S scalars, row by row) divided by its column or row sums."""
    inverse = ()
    for a in tl.static_range(S):
        total = comb[a if COLUMNS else a * S]
        for b in tl.static_range(1, S):
            total += comb[b * S + a if COLUMNS else a * S + b]
        inverse = inverse + (1.0 / (total + EPS),)
    divided = ()
    for j in tl.static_range(S):
        for k in tl.static_range(S):
            divided = divided + (comb[j * S + k] * inverse[k if COLUMNS else j],)
    return divided


@triton.jit
def coefficient_program(
    row, base, scale, coefficients, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, G: tl.constexpr, W: tl.constexpr, DELAYED: tl.constexpr,
    NORM_EPS: tl.constexpr, MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Waits for all columns; writes one row's pre, post and comb."""
    M: tl.constexpr = (2 + S) * S
    column = tl.arange(0, W)
    part = tl.minimum(column // S, 2)
    bases = tl.load(base + column, mask=column < M, other=0.0)
    scales = tl.load(scale + part)
    wait(counters, 0, G)

    total = summed(sums, row, G, R, W, M, DELAYED)
    mixes = total * inverse_rms(entry(total, W - 2, W), S * D, NORM_EPS) * scales + bases
    gates = tl.sigmoid(mixes)
    gates = tl.where(column < S, gates + MIX_EPS, 2 * gates)
    tl.store(coefficients + row * M + column, gates, mask=column < 2 * S)

    comb = ()
    for j in tl.static_range(S):
        raw = ()
        for k in tl.static_range(S):
            raw = raw + (entry(mixes, 2 * S + j * S + k, W),)
        largest = raw[0]
        for k in tl.static_range(1, S):
            largest = tl.maximum(largest, raw[k])
        weights = ()
        for k in tl.static_range(S):
            weights = weights + (tl.exp(raw[k] - largest),)
        whole = weights[0]
        for k in tl.static_range(1, S):
            whole += weights[k]
        for k in tl.static_range(S):
            comb = comb + (weights[k] / whole + MIX_EPS,)
    comb = normalised(comb, S, True, MIX_EPS)
    for _ in range(ITERATIONS - 1):
        comb = normalised(normalised(comb, S, False, MIX_EPS), S, True, MIX_EPS)
    for index in tl.static_range(S * S):
        tl.store(coefficients + row * M + 2 * S + index, comb[index])


@triton.jit
def boundary(
    parts, live, given, table, tokens, fn, base, scale, norm, streams_in, counters_in,
    streams, coefficients, hidden, x, rounded_x, tap, sums, counters,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, MIXES: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, EMBED: tl.constexpr, LAST: tl.constexpr, DELAYED: tl.constexpr,
    TAP: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr, NB: tl.constexpr, NORM_EPS: tl.constexpr,
    MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """One boundary; grid D // BD + R behind the last layer, else D // BD + 2 R."""
    G: tl.constexpr = D // BD
    WAITERS: tl.constexpr = R if LAST else 2 * R
    program = tl.program_id(0)
    if program < G:
        column_program(
            program, parts, live, given, table, tokens, fn, streams, hidden, tap, sums, counters,
            R, D, S, BD, W, MIXES, PARTS, EXPERTS, EMBED, DELAYED, TAP,
        )  # fmt: skip
    elif program < G + R:
        row_program(
            program - G, streams, hidden, base, scale, norm, x, rounded_x, sums, counters,
            R, D, S, G, W, MIXES, DELAYED, LAST, ROUND, B, NB, NORM_EPS, MIX_EPS,
        )  # fmt: skip
        leave(counters, 0, WAITERS)
    else:
        if not LAST:
            coefficient_program(
                program - G - R, base, scale, coefficients, sums, counters,
                R, D, S, G, W, DELAYED, NORM_EPS, MIX_EPS, ITERATIONS,
            )  # fmt: skip
            leave(counters, 0, WAITERS)
