"""The whole Markov chain as one persistent Triton kernel.

Knows: how the programs share the vocabulary and meet after each token (reference.py says what is computed). Does not
know: shapes of a model, or how the launch is made (fused.py).

    for each token     every program: logits of its slice, and the largest of them
                       -- barrier --
      when drawing     every program: the masses of its blocks
                       -- barrier --
                       every program: the token, from everybody's results, each for itself

Every program works out the same token, so nothing has to be handed out. The head of the bias (66 MB at V = 129280) is
read once for each token; odd tokens go through a slice backwards, so that what the second-level cache still holds
is read first. The tile in front is always on its way while one is worked on, across the barriers too.

All programs must be resident at once. In Triton's interpreter the rounds are the outer axis of the grid (APART).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import barrier

NO_TOKEN = tl.constexpr(2147483647)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


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
def likeliest(token, tops, top_ids, G: tl.constexpr, GP: tl.constexpr):
    """(largest logit, its lowest id) over all slices."""
    each = tl.arange(0, GP)
    top = tl.load(tops + token * G + each, mask=each < G, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(top_ids + token * G + each, mask=each < G, other=NO_TOKEN, cache_modifier=".cg")
    largest = tl.max(top, axis=0)
    return largest, tl.min(tl.where(top == largest, ids, NO_TOKEN), axis=0)


@triton.jit
def masses_of(logits, ids, token, largest, temperature, min_p, V: tl.constexpr):
    """Unnormalised probabilities of the given ids; none behind the vocabulary."""
    value = tl.load(logits + token * V + ids, mask=ids < V, other=float("-inf"), cache_modifier=".cg")
    mass = tl.exp((value - largest) / temperature)
    return tl.where(mass < min_p, 0.0, mass)


@triton.jit
def slice_masses(
    program, token, logits, tops, top_ids, temperature, min_p, masses,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OWN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The masses of this program's OWN blocks."""
    largest, _ = likeliest(token, tops, top_ids, G, GP)
    block = program * OWN + tl.arange(0, OWN)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mass = masses_of(logits, ids, token, largest, temperature, min_p, V)
    tl.store(masses + token * BLOCKS + block, tl.sum(mass, axis=1), mask=block < BLOCKS)


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
def chosen(
    token, logits, tops, top_ids, masses, uniforms, temperature, min_p,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """The token's id, always one of the vocabulary."""
    largest, greedy = likeliest(token, tops, top_ids, G, GP)
    id = greedy
    if DRAWN:
        each = tl.arange(0, BP)
        mass = tl.load(masses + token * BLOCKS + each, mask=each < BLOCKS, other=0.0, cache_modifier=".cg")
        block = first_past(mass, tl.load(uniforms + token * 2), BP)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = masses_of(logits, ids, token, largest, temperature, min_p, V)
        place = block * BLOCK + first_past(inside, tl.load(uniforms + token * 2 + 1), BLOCK)
        id = tl.where(temperature < SMALLEST_NORMAL, greedy, place)
    return tl.maximum(tl.minimum(id, V - 1), 0)


@triton.jit
def chain(
    base, anchor, embed, head, count, temperature_in, min_p_in, uniforms, counters_in,
    ids, logits, tops, top_ids, masses, counters,
    K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    DRAWN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The chain of up to K tokens; grid (1, G), or (rounds, G) with APART: K (1 + DRAWN) + 1 of them."""
    program = tl.program_id(1)
    tokens = tl.minimum(tl.load(count), K)
    temperature = tl.load(temperature_in)
    min_p = tl.load(min_p_in)
    if APART:
        ROUNDS: tl.constexpr = 2 if DRAWN else 1
        token = tl.program_id(0) // ROUNDS
        part = tl.program_id(0) % ROUNDS
        previous = tl.load(anchor)
        if (part == 0) & (token > 0) & (token <= tokens):
            previous = chosen(
                token - 1, logits, tops, top_ids, masses, uniforms, temperature, min_p,
                V, BLOCK, BLOCKS, BP, G, GP, DRAWN,
            )  # fmt: skip
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
                slice_masses(
                    program, token, logits, tops, top_ids, temperature, min_p, masses,
                    V, BLOCK, BLOCKS, OWN, G, GP,
                )  # fmt: skip
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
                slice_masses(
                    program, token, logits, tops, top_ids, temperature, min_p, masses,
                    V, BLOCK, BLOCKS, OWN, G, GP,
                )  # fmt: skip
                barrier(counters, 0, program, G)
            previous = chosen(
                token, logits, tops, top_ids, masses, uniforms, temperature, min_p,
                V, BLOCK, BLOCKS, BP, G, GP, DRAWN,
            )  # fmt: skip
            if program == 0:
                tl.store(ids + token, previous)
