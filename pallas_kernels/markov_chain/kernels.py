"""The whole Markov chain as one persistent Triton kernel.

Knows: how the programs share the vocabulary and meet after each token (reference.py says what is computed). Does not
know: shapes of a model, or how the launch is made (fused.py).

    for each token     every program: logits of its slice, and the largest of them
                       -- barrier --
      when drawing     top-k, then top-p, where they are on (narrowing.py): PASSES + 1 barriers each
                       every program: the masses of its blocks
                       -- barrier --
                       every program: the token, from everybody's results, each for itself
      when drawing     and the law of its slice

Every program works out the same token, so nothing has to be handed out. The head of the bias (66 MB at V = 129280) is
read once for each token; odd tokens go through a slice backwards, so that what the second-level cache still holds
is read first. The tile in front is always on its way while one is worked on, across the barriers too.

All programs must be resident at once. In Triton's interpreter the rounds are the outer axis of the grid (APART).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import barrier
from pallas_kernels.markov_chain.narrowing import (
    LOWEST,
    PASSES,
    kept,
    needed,
    ordered,
    settled,
    share_of_all,
    store_sums,
    store_ties,
    valued,
)

NO_TOKEN = tl.constexpr(2147483647)
_PASSES = tl.constexpr(PASSES)
# Parts of a drawn token, where each is a round of its own: logits, two filters, masses, and the choice.
PARTS = 2 * (PASSES + 1) + 3
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
def likeliest(token, tops, top_ids, G: tl.constexpr, GP: tl.constexpr):
    """(largest logit, its lowest id) over all slices."""
    each = tl.arange(0, GP)
    top = tl.load(tops + token * G + each, mask=each < G, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(top_ids + token * G + each, mask=each < G, other=NO_TOKEN, cache_modifier=".cg")
    largest = tl.max(top, axis=0)
    return largest, tl.min(tl.where(top == largest, ids, NO_TOKEN), axis=0)


@triton.jit
def tokens_of(
    block, token, logits, largest, temperature, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the blocks [M]: ids [M, BLOCK], which of them are in the vocabulary, and their codes and weights."""
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < V
    value = tl.load(logits + token * V + ids, mask=inside, other=float("-inf"), cache_modifier=".cg")
    weight = tl.where(inside, tl.exp((value - largest) / temperature), 0.0)
    return ids, inside, ordered(value), weight


@triton.jit
def filtered(
    token, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
    V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Unnormalised probabilities [M, BLOCK] of the tokens of the blocks [M] behind all filters."""
    member = inside
    if (top_k > 0) & (top_k < V):
        member = kept(token, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
    if top_p < 1:
        member = kept(token, 1, cut_p, stay_p, code, member, block, ties, BLOCKS, BP)
    return tl.where(member & (weight >= min_p), weight, 0.0)


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
def all_masses(token, masses, BLOCKS: tl.constexpr, BP: tl.constexpr):
    """The masses [BP] of all blocks."""
    each = tl.arange(0, BP)
    return tl.load(masses + token * BLOCKS + each, mask=each < BLOCKS, other=0.0, cache_modifier=".cg")


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
def store_law(
    token, ids, inside, mass, masses, laws, V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr
):
    """This program's part of the law that the token is drawn from."""
    whole = tl.sum(all_masses(token, masses, BLOCKS, BP), axis=0)
    tl.store(laws + token * V + ids, mass / whole, mask=inside)


@triton.jit
def cuts_before(
    token, part, largest, temperature, top_k, top_p, sums, ties, aboves,
    V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Both cuts, and how many tokens at them stay, as far as they are known at the beginning of a part."""
    cut_k, cut_p = tl.full((), LOWEST, tl.int32), tl.full((), LOWEST, tl.int32)
    stay_k, stay_p = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < V):
        for step in range(_PASSES):
            if step < part - 1:
                cut_k = settled(token, 0, step, cut_k, top_k, sums, G, GP)
        if part > _PASSES + 1:
            stay_k = needed(token, 0, top_k, 1.0, ties, aboves, BLOCKS, BP, G, GP)
    if (top_p < 1) & (part > _PASSES + 2):
        target = share_of_all(token, top_p, sums, G, GP)
        for step in range(_PASSES):
            if step < part - _PASSES - 2:
                cut_p = settled(token, 1, step, cut_p, target, sums, G, GP)
        if part > 2 * _PASSES + 2:
            each = tl.exp((valued(cut_p) - largest) / temperature)
            stay_p = needed(token, 1, target, each, ties, aboves, BLOCKS, BP, G, GP)
    return cut_k, stay_k, cut_p, stay_p


@triton.jit
def part_of_draw(
    program, token, part, logits, tops, top_ids, temperature, top_k, top_p, min_p, uniforms,
    ids, laws, masses, sums, ties, aboves,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One part of a drawn token behind its logits, where programs run one after another."""
    largest, _ = likeliest(token, tops, top_ids, G, GP)
    cut_k, stay_k, cut_p, stay_p = cuts_before(
        token, part, largest, temperature, top_k, top_p, sums, ties, aboves, V, BLOCKS, BP, G, GP
    )
    block = program * OWN + tl.arange(0, OWN)
    own, inside, code, weight = tokens_of(block, token, logits, largest, temperature, V, BLOCK)
    member = inside
    if part <= _PASSES + 1:
        each = tl.where(member, 1.0, 0.0)
        if part <= _PASSES:
            store_sums(program, token, 0, part - 1, cut_k, code, each, sums, OWN * BLOCK, G)
        else:
            store_ties(program, token, 0, cut_k, code, each, member, block, ties, aboves, BLOCKS, G)
    elif part <= 2 * _PASSES + 2:
        if (top_k > 0) & (top_k < V):
            member = kept(token, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
        mass = tl.where(member, weight, 0.0)
        if part <= 2 * _PASSES + 1:
            store_sums(program, token, 1, part - _PASSES - 2, cut_p, code, mass, sums, OWN * BLOCK, G)
        else:
            store_ties(program, token, 1, cut_p, code, mass, member, block, ties, aboves, BLOCKS, G)
    else:
        mass = filtered(
            token, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
            V, BLOCKS, BP,
        )  # fmt: skip
        if part == 2 * _PASSES + 3:
            tl.store(masses + token * BLOCKS + block, tl.sum(mass, axis=1), mask=block < BLOCKS)
        else:
            store_law(token, own, inside, mass, masses, laws, V, BLOCKS, BP)
            if program == 0:
                found = drawn(
                    token, logits, largest, temperature, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
                    masses, uniforms, V, BLOCK, BLOCKS, BP,
                )  # fmt: skip
                tl.store(ids + token, found)


@triton.jit
def whole_draw(
    program, token, logits, tops, top_ids, temperature, top_k, top_p, min_p, uniforms,
    laws, masses, sums, ties, aboves, counters,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """All parts of a drawn token behind its logits; returns the token."""
    largest, _ = likeliest(token, tops, top_ids, G, GP)
    cut_k, cut_p = tl.full((), LOWEST, tl.int32), tl.full((), LOWEST, tl.int32)
    stay_k, stay_p = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    block = program * OWN + tl.arange(0, OWN)
    own, inside, code, weight = tokens_of(block, token, logits, largest, temperature, V, BLOCK)
    member = inside
    if (top_k > 0) & (top_k < V):
        each = tl.where(member, 1.0, 0.0)
        for step in range(_PASSES):
            store_sums(program, token, 0, step, cut_k, code, each, sums, OWN * BLOCK, G)
            barrier(counters, 0, program, G)
            cut_k = settled(token, 0, step, cut_k, top_k, sums, G, GP)
        store_ties(program, token, 0, cut_k, code, each, member, block, ties, aboves, BLOCKS, G)
        barrier(counters, 0, program, G)
        stay_k = needed(token, 0, top_k, 1.0, ties, aboves, BLOCKS, BP, G, GP)
        member = kept(token, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
    if top_p < 1:
        mass = tl.where(member, weight, 0.0)
        target = tl.full((), 0.0, tl.float32)
        for step in range(_PASSES):
            store_sums(program, token, 1, step, cut_p, code, mass, sums, OWN * BLOCK, G)
            barrier(counters, 0, program, G)
            if step == 0:
                target = share_of_all(token, top_p, sums, G, GP)
            cut_p = settled(token, 1, step, cut_p, target, sums, G, GP)
        store_ties(program, token, 1, cut_p, code, mass, member, block, ties, aboves, BLOCKS, G)
        barrier(counters, 0, program, G)
        at_cut = tl.exp((valued(cut_p) - largest) / temperature)
        stay_p = needed(token, 1, target, at_cut, ties, aboves, BLOCKS, BP, G, GP)
    mass = filtered(
        token,
        block,
        inside,
        code,
        weight,
        top_k,
        top_p,
        min_p,
        cut_k,
        stay_k,
        cut_p,
        stay_p,
        ties,
        V,
        BLOCKS,
        BP,
    )
    tl.store(masses + token * BLOCKS + block, tl.sum(mass, axis=1), mask=block < BLOCKS)
    barrier(counters, 0, program, G)
    store_law(token, own, inside, mass, masses, laws, V, BLOCKS, BP)
    return drawn(
        token, logits, largest, temperature, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties, masses, uniforms,
        V, BLOCK, BLOCKS, BP,
    )  # fmt: skip


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
                _, previous = likeliest(token - 1, tops, top_ids, G, GP)
                previous = tl.maximum(tl.minimum(previous, V - 1), 0)
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
            elif (
                ((part > _PASSES + 1) | ((top_k > 0) & (top_k < V)))
                & ((part <= _PASSES + 1) | (part > 2 * _PASSES + 2) | (top_p < 1))
            ):  # fmt: skip
                part_of_draw(
                    program, token, part, logits, tops, top_ids, temperature, top_k, top_p, min_p, uniforms,
                    ids, laws, masses, sums, ties, aboves, V, BLOCK, BLOCKS, BP, OWN, G, GP,
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
                previous = whole_draw(
                    program, token, logits, tops, top_ids, temperature, top_k, top_p, min_p, uniforms,
                    laws, masses, sums, ties, aboves, counters, V, BLOCK, BLOCKS, BP, OWN, G, GP,
                )  # fmt: skip
            else:
                _, previous = likeliest(token, tops, top_ids, G, GP)
                previous = tl.maximum(tl.minimum(previous, V - 1), 0)
            if program == 0:
                tl.store(ids + token, previous)
