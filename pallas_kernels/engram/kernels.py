"""The two Triton kernels around the product of an Engram layer.

Knows: how the programs of a launch share the work (reference.py says what it computes). Does not know: shapes of a
model, or how the launches are made (fused.py).

    lookup   grid (C, R)   one table row of one position: hash, gather, decode, round
    merge    grid (S, R)   one stream of one row: spread the sublayer before, similarity, gate, update

No program of either needs another: there is nothing to wait for.
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import decode_e4m3, decode_e8m0, inverse_rms, round_activations, rounded
from pallas_kernels.engram.reference import MINIMUM_DOT as _MINIMUM_DOT
from pallas_kernels.engram.reference import TABLE_GROUP as _TABLE_GROUP
from pallas_kernels.hyper_connections.column_kernels import output_parts, output_sum

TABLE_GROUP = tl.constexpr(_TABLE_GROUP)
MINIMUM_DOT = tl.constexpr(_MINIMUM_DOT)


@triton.jit
def lookup(
    payload, scale, token_map, multipliers, primes, offsets, ring, start, rows,
    N: tl.constexpr, NGRAMS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    PAD: tl.constexpr, PACKED: tl.constexpr, ROUND: tl.constexpr, B: tl.constexpr, BFLOAT: tl.constexpr,
):  # fmt: skip
    """One table row: column c of row r holds the hash of the last 2 + c // HEADS tokens."""
    DTYPE: tl.constexpr = tl.bfloat16 if BFLOAT else tl.float32
    column = tl.program_id(0)
    row = tl.program_id(1)
    position = tl.load(start) + row
    size = 2 + column // HEADS
    mixed = tl.zeros((), tl.int64)
    for back in tl.static_range(NGRAMS):
        at = position - back
        token = tl.load(ring + at % N, mask=at >= 0, other=PAD)
        low = tl.load(multipliers + 2 * back).to(tl.int64) & 0xFFFFFFFF
        factor = (tl.load(multipliers + 2 * back + 1).to(tl.int64) << 32) | low
        product = tl.load(token_map + token).to(tl.int64) * factor
        mixed = mixed ^ tl.where(back < size, product, 0)
    entry = mixed % tl.load(primes + column).to(tl.int64) + tl.load(offsets + column)

    inside = tl.arange(0, WIDTH // B)[:, None] * B + tl.arange(0, B)[None, :]
    if PACKED:
        values = decode_e4m3(tl.load(payload + entry * WIDTH + inside))
        values *= decode_e8m0(tl.load(scale + entry * (WIDTH // TABLE_GROUP) + inside // TABLE_GROUP))
    else:
        values = tl.load(payload + entry * WIDTH + inside).to(tl.float32)
    values = rounded(values, DTYPE)
    if ROUND:
        values = round_activations(values, 1)
    tl.store(rows + row * (C * WIDTH) + column * WIDTH + inside, values.to(tl.float16))


@triton.jit
def merge(
    parts, live, given, old, partials, q_weight, k_weight, streams,
    R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, TURN: tl.constexpr, PARTS: tl.constexpr,
    EXPERTS: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One stream of one row; `old` are the streams before the spread, or the streams themselves if PARTS is 0."""
    DTYPE: tl.constexpr = streams.dtype.element_ty
    M: tl.constexpr = (2 + S) * S
    stream = tl.program_id(0)
    row = tl.program_id(1)
    rows = row + tl.zeros((1, 1), tl.int32)
    inside = tl.arange(0, TURN)[None, :]
    kept = ()
    similar = tl.zeros((1, TURN), tl.float32)
    squares = tl.zeros((1, TURN), tl.float32)
    key_squares = tl.zeros((1, TURN), tl.float32)
    for turn in tl.static_range(D // TURN):
        columns = turn * TURN + inside
        if PARTS > 0:
            read = output_parts(parts, rows, columns, R, D, PARTS, EXPERTS, 1)
            alive = tl.load(live) if EXPERTS else 0
            output = output_sum(read, rows, alive, PARTS, EXPERTS, DTYPE, 1)[0]
            mixed = tl.zeros((1, TURN), tl.float32)
            for j in tl.static_range(S):
                before = tl.load(old + (row * S + j) * D + columns).to(tl.float32)
                mixed += tl.load(given + row * M + 2 * S + j * S + stream) * before
            x = rounded(tl.load(given + row * M + S + stream) * output + mixed, DTYPE)
        else:
            x = tl.load(old + (row * S + stream) * D + columns).to(tl.float32)
        key = tl.zeros((1, TURN), tl.float32)
        for part in tl.static_range(P):
            key += tl.load(partials + (part * R + row) * ((S + 1) * D) + stream * D + columns)
        key = rounded(key, DTYPE)
        weight = tl.load(q_weight + stream * D + columns).to(tl.float32)
        weight *= tl.load(k_weight + stream * D + columns).to(tl.float32)
        similar += x * weight * key
        squares += x * x
        key_squares += key * key
        kept = kept + (x,)
    dot = tl.sum(tl.sum(similar, axis=1), axis=0)
    dot *= inverse_rms(tl.sum(tl.sum(squares, axis=1), axis=0), D, EPS)
    dot *= inverse_rms(tl.sum(tl.sum(key_squares, axis=1), axis=0), D, EPS) * (D**-0.5)
    root = tl.sqrt(tl.maximum(tl.abs(dot), MINIMUM_DOT))
    gate = tl.sigmoid(tl.where(dot < 0, -root, root))
    for turn in tl.static_range(D // TURN):
        columns = turn * TURN + inside
        value = tl.zeros((1, TURN), tl.float32)
        for part in tl.static_range(P):
            value += tl.load(partials + (part * R + row) * ((S + 1) * D) + S * D + columns)
        new = rounded(kept[turn] + gate * rounded(value, DTYPE), DTYPE)
        tl.store(streams + (row * S + stream) * D + columns, new.to(DTYPE))
