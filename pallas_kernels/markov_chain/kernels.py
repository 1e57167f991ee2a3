"""The whole Markov chain as one persistent Triton kernel.

Knows: how the programs share the vocabulary and meet after each token (reference.py says what is computed). Does not
know: shapes of a model, or how the launch is made (fused.py).

    for each token     every program: logits of its slice, and the largest of them
                       -- barrier --
      when drawing     the law of its slice, with the barriers that takes (device_laws.py)
                       every program: the token, from everybody's results, each for itself

Every program works out the same token, so nothing has to be handed out. The head of the bias (66 MB at V = 129280) is
read once for each token; odd tokens go through a slice backwards, so that what the second-level cache still holds
is read first. The tile in front is always on its way while one is worked on, across the barriers too.

All programs must be resident at once. In Triton's interpreter the rounds are the outer axis of the grid (APART).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import barrier
from pallas_kernels.device_laws import (
    PARTS,
    all_masses,
    cuts_before,
    filtered,
    largest_of,
    part_of_law,
    tokens_of,
    whole_law,
)

NO_TOKEN = tl.constexpr(2147483647)
_PARTS = tl.constexpr(PARTS)


@triton.jit
def tile_rows(program, turn, token, TILES: tl.constexpr, BV: tl.constexpr):
    """Token ids [BV] of the tile at the given turn of a slice; odd tokens of the chain go backwards."""
    tile = tl.where(token % 2 == 0, turn, TILES - 1 - turn)
    return (program * TILES + tile) * BV + tl.arange(0, BV)


@triton.jit
def fetched(base, head, ids, token, V: tl.constexpr, RANK: tl.constexpr, BV: tl.constexpr):
    """The head's rows [BV, RANK] and base logits [BV] of a tile; zeros and -inf behind the vocabulary."""
    at = ids[:, None] * RANK + tl.arange(0, RANK)[None, :]
    rows = tl.load(head + at, mask=(ids < V)[:, None], other=0.0)
    logits = tl.load(base + token * V + ids, mask=ids < V, other=float("-inf"))
    return rows, logits


@triton.jit
def slice_logits(
    program, token, tokens, previous, rows, biased, base, embed, head, logits, tops, top_ids,
    V: tl.constexpr, RANK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Logits of this program's slice and the largest of them; the first tile comes in, the next token's goes out."""
    bias = tl.load(embed + previous * RANK + tl.arange(0, RANK)[None, :]).to(tl.float32)
    best = tl.full((BV,), float("-inf"), tl.float32)
    best_ids = tl.full((BV,), NO_TOKEN, tl.int32)
    for turn in range(TILES):
        ids = tile_rows(program, turn, token, TILES, BV)
        ends = turn + 1 == TILES
        following = tl.where(ends, token + 1, token)
        ahead = tile_rows(program, tl.where(ends, 0, turn + 1), following, TILES, BV)
        next_rows, next_biased = fetched(base, head, ahead, tl.minimum(following, tokens - 1), V, RANK, BV)
        value = biased + tl.sum(rows.to(tl.float32) * bias, axis=1)
        tl.store(logits + token * V + ids, value, mask=ids < V)
        better = (value > best) | ((value == best) & (ids < best_ids))
        best = tl.where(better, value, best)
        best_ids = tl.where(better, ids, best_ids)
        rows = next_rows
        biased = next_biased
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, best_ids, NO_TOKEN), axis=0)
    tl.store(tops + token * G + program, top)
    tl.store(top_ids + token * G + program, first)
    return rows, biased


@triton.jit
def likeliest(token, tops, top_ids, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """The lowest id of the largest logit over all slices, always one of the vocabulary."""
    each = tl.arange(0, GP)
    top = tl.load(tops + token * G + each, mask=each < G, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(top_ids + token * G + each, mask=each < G, other=NO_TOKEN, cache_modifier=".cg")
    first = tl.min(tl.where(top == tl.max(top, axis=0), ids, NO_TOKEN), axis=0)
    return tl.maximum(tl.minimum(first, V - 1), 0)


@triton.jit
def first_past(masses, level, N: tl.constexpr):
    """First index with mass whose running sum exceeds `level` times the whole; else the last index with mass."""
    index = tl.arange(0, N)
    running = tl.cumsum(masses, axis=0)
    whole = tl.max(running, axis=0)
    past = (running > level * whole) & (masses > 0)
    first = tl.min(tl.where(past, index, N), axis=0)
    last = tl.max(tl.where(masses > 0, index, 0), axis=0)
    return tl.where(first < N, first, last)


@triton.jit
def drawn(
    token, logits, largest, temperature, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties, masses, uniforms,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The token's id, always one of the vocabulary."""
    number = first_past(all_masses(token, masses, BLOCKS, BP), tl.load(uniforms + token * 2), BP)
    block = number + tl.arange(0, 1)
    _, inside, code, weight = tokens_of(block, token, logits, largest, temperature, V, BLOCK)
    mass = filtered(
        token, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
        V, BLOCKS, BP,
    )  # fmt: skip
    place = first_past(tl.reshape(mass, (BLOCK,)), tl.load(uniforms + token * 2 + 1), BLOCK)
    return tl.maximum(tl.minimum(number * BLOCK + place, V - 1), 0)


@triton.jit
def chain(
    base, anchor, embed, head, count, options, uniforms, counters_in,
    ids, logits, tops, top_ids, laws, masses, sums, ties, aboves, counters,
    K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    DRAWN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The chain of up to K tokens; grid (1, G), or (rounds, G) with APART: K PARTS of them, K + 1 when greedy."""
    program = tl.program_id(1)
    tokens = tl.minimum(tl.load(count), K)
    temperature, top_k = tl.load(options), tl.load(options + 1)
    top_p, min_p = tl.load(options + 2), tl.load(options + 3)
    if APART:
        ROUNDS: tl.constexpr = _PARTS if DRAWN else 1
        token = tl.program_id(0) // ROUNDS
        part = tl.program_id(0) % ROUNDS
        previous = tl.load(anchor)
        if (part == 0) & (token > 0) & (token <= tokens):
            if DRAWN:
                previous = tl.load(ids + token - 1)
            else:
                previous = likeliest(token - 1, tops, top_ids, V, G, GP)
                if program == 0:
                    tl.store(ids + token - 1, previous)
        if (part == 0) & (token >= tokens) & (token < K) & (program == 0):
            tl.store(ids + token, 0)
        if token < tokens:
            if part == 0:
                rows, biased = fetched(
                    base, head, tile_rows(program, 0, token, TILES, BV), token, V, RANK, BV
                )
                slice_logits(
                    program, token, tokens, previous, rows, biased, base, embed, head, logits, tops, top_ids,
                    V, RANK, BV, TILES, G,
                )  # fmt: skip
            else:
                part_of_law(
                    program, token, part, logits, tops, temperature, top_k, top_p, min_p, laws, masses,
                    sums, ties, aboves, V, BLOCK, BLOCKS, BP, OWN, G, GP,
                )  # fmt: skip
                if (part == _PARTS - 1) & (program == 0):
                    largest = largest_of(token, tops, G, GP)
                    cut_k, stay_k, cut_p, stay_p = cuts_before(
                        token, part, largest, temperature, top_k, top_p, sums, ties, aboves, V, BLOCKS, BP, G, GP
                    )  # fmt: skip
                    found = drawn(
                        token, logits, largest, temperature, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p,
                        ties, masses, uniforms, V, BLOCK, BLOCKS, BP,
                    )  # fmt: skip
                    tl.store(ids + token, found)
    else:
        if program == 0:
            place = tl.arange(0, 16)
            tl.store(ids + place, 0, mask=(place >= tokens) & (place < K))
        previous = tl.load(anchor)
        rows, biased = fetched(base, head, tile_rows(program, 0, 0, TILES, BV), 0, V, RANK, BV)
        for token in range(tokens):
            rows, biased = slice_logits(
                program, token, tokens, previous, rows, biased, base, embed, head, logits, tops, top_ids,
                V, RANK, BV, TILES, G,
            )  # fmt: skip
            barrier(counters, 0, program, G)
            if DRAWN:
                largest, cut_k, stay_k, cut_p, stay_p = whole_law(
                    program, token, logits, tops, temperature, top_k, top_p, min_p,
                    laws, masses, sums, ties, aboves, counters, V, BLOCK, BLOCKS, BP, OWN, G, GP,
                )  # fmt: skip
                previous = drawn(
                    token, logits, largest, temperature, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p,
                    ties, masses, uniforms, V, BLOCK, BLOCKS, BP,
                )  # fmt: skip
            else:
                previous = likeliest(token, tops, top_ids, V, G, GP)
            if program == 0:
                tl.store(ids + token, previous)
