"""The law that temperature and filters make of a row of logits, where many programs share the vocabulary.

Knows: the order of temperature, top-k, top-p and min-p, and the parts of that between which programs meet. Does not
know: the search for a cut (device_narrowing.py), or what a law is for.

    part 0                    whoever has the logits: the largest of each program's
    1 to PASSES + 1           top-k: passes, then the tokens at the cut
    as many again             top-p
    then                      the masses of blocks of the vocabulary
    the last                  the law itself

A launch runs all of them, with a barrier behind each that is on (`whole_law`). In Triton's interpreter each is a round
of the grid, and what earlier ones found is worked out again (`part_of_law`).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import barrier
from pallas_kernels.device_narrowing import (
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

_PASSES = tl.constexpr(PASSES)
PARTS = 2 * (PASSES + 1) + 3


@triton.jit
def largest_of(row, tops, G: tl.constexpr, GP: tl.constexpr):
    """The largest logit over all slices."""
    each = tl.arange(0, GP)
    return tl.max(
        tl.load(tops + row * G + each, mask=each < G, other=float("-inf"), cache_modifier=".cg"), axis=0
    )


@triton.jit
def tokens_of(
    block, row, logits, largest, temperature, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the blocks [M]: ids [M, BLOCK], which of them are in the vocabulary, and their codes and weights."""
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < V
    value = tl.load(logits + row * V + ids, mask=inside, other=float("-inf"), cache_modifier=".cg")
    weight = tl.where(inside, tl.exp((value - largest) / temperature), 0.0)
    return ids, inside, ordered(value), weight


@triton.jit
def filtered(
    row, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
    V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Unnormalised probabilities [M, BLOCK] of the tokens of the blocks [M] behind all filters."""
    member = inside
    if (top_k > 0) & (top_k < V):
        member = kept(row, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
    if top_p < 1:
        member = kept(row, 1, cut_p, stay_p, code, member, block, ties, BLOCKS, BP)
    return tl.where(member & (weight >= min_p), weight, 0.0)


@triton.jit
def all_masses(row, masses, BLOCKS: tl.constexpr, BP: tl.constexpr):
    """The masses [BP] of all blocks."""
    each = tl.arange(0, BP)
    return tl.load(masses + row * BLOCKS + each, mask=each < BLOCKS, other=0.0, cache_modifier=".cg")


@triton.jit
def store_law(row, ids, inside, mass, masses, laws, V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr):
    """This program's part of the law that the token is drawn from."""
    whole = tl.sum(all_masses(row, masses, BLOCKS, BP), axis=0)
    tl.store(laws + row * V + ids, mass / whole, mask=inside)


@triton.jit
def cuts_before(
    row, part, largest, temperature, top_k, top_p, sums, ties, aboves,
    V: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Both cuts, and how many tokens at them stay, as far as they are known at the beginning of a part."""
    cut_k, cut_p = tl.full((), LOWEST, tl.int32), tl.full((), LOWEST, tl.int32)
    stay_k, stay_p = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < V):
        for step in range(_PASSES):
            if step < part - 1:
                cut_k = settled(row, 0, step, cut_k, top_k, sums, G, GP)
        if part > _PASSES + 1:
            stay_k = needed(row, 0, top_k, 1.0, ties, aboves, BLOCKS, BP, G, GP)
    if (top_p < 1) & (part > _PASSES + 2):
        target = share_of_all(row, top_p, sums, G, GP)
        for step in range(_PASSES):
            if step < part - _PASSES - 2:
                cut_p = settled(row, 1, step, cut_p, target, sums, G, GP)
        if part > 2 * _PASSES + 2:
            each = tl.exp((valued(cut_p) - largest) / temperature)
            stay_p = needed(row, 1, target, each, ties, aboves, BLOCKS, BP, G, GP)
    return cut_k, stay_k, cut_p, stay_p


@triton.jit
def part_of_law(
    program, row, part, logits, tops, temperature, top_k, top_p, min_p, laws, masses, sums, ties, aboves,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One part of a row's law, from part 1 on, where programs run one after another; none for a filter that is off."""
    k_on, p_on = (top_k > 0) & (top_k < V), top_p < 1
    if ((part > _PASSES + 1) | k_on) & ((part <= _PASSES + 1) | (part > 2 * _PASSES + 2) | p_on):
        largest = largest_of(row, tops, G, GP)
        cut_k, stay_k, cut_p, stay_p = cuts_before(
            row, part, largest, temperature, top_k, top_p, sums, ties, aboves, V, BLOCKS, BP, G, GP
        )
        block = program * OWN + tl.arange(0, OWN)
        own, inside, code, weight = tokens_of(block, row, logits, largest, temperature, V, BLOCK)
        member = inside
        if part <= _PASSES + 1:
            each = tl.where(member, 1.0, 0.0)
            if part <= _PASSES:
                store_sums(program, row, 0, part - 1, cut_k, code, each, sums, OWN * BLOCK, G)
            else:
                store_ties(program, row, 0, cut_k, code, each, member, block, ties, aboves, BLOCKS, G)
        elif part <= 2 * _PASSES + 2:
            if k_on:
                member = kept(row, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
            mass = tl.where(member, weight, 0.0)
            if part <= 2 * _PASSES + 1:
                store_sums(program, row, 1, part - _PASSES - 2, cut_p, code, mass, sums, OWN * BLOCK, G)
            else:
                store_ties(program, row, 1, cut_p, code, mass, member, block, ties, aboves, BLOCKS, G)
        else:
            mass = filtered(
                row, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties,
                V, BLOCKS, BP,
            )  # fmt: skip
            if part == 2 * _PASSES + 3:
                tl.store(masses + row * BLOCKS + block, tl.sum(mass, axis=1), mask=block < BLOCKS)
            else:
                store_law(row, own, inside, mass, masses, laws, V, BLOCKS, BP)


@triton.jit
def whole_law(
    program, row, logits, tops, temperature, top_k, top_p, min_p,
    laws, masses, sums, ties, aboves, counters,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """All parts of a row's law, whose programs meet at the first line. Returns the largest logit and both cuts."""
    largest = largest_of(row, tops, G, GP)
    cut_k, cut_p = tl.full((), LOWEST, tl.int32), tl.full((), LOWEST, tl.int32)
    stay_k, stay_p = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    block = program * OWN + tl.arange(0, OWN)
    own, inside, code, weight = tokens_of(block, row, logits, largest, temperature, V, BLOCK)
    member = inside
    if (top_k > 0) & (top_k < V):
        each = tl.where(member, 1.0, 0.0)
        for step in range(_PASSES):
            store_sums(program, row, 0, step, cut_k, code, each, sums, OWN * BLOCK, G)
            barrier(counters, 0, program, G)
            cut_k = settled(row, 0, step, cut_k, top_k, sums, G, GP)
        store_ties(program, row, 0, cut_k, code, each, member, block, ties, aboves, BLOCKS, G)
        barrier(counters, 0, program, G)
        stay_k = needed(row, 0, top_k, 1.0, ties, aboves, BLOCKS, BP, G, GP)
        member = kept(row, 0, cut_k, stay_k, code, member, block, ties, BLOCKS, BP)
    if top_p < 1:
        mass = tl.where(member, weight, 0.0)
        target = tl.full((), 0.0, tl.float32)
        for step in range(_PASSES):
            store_sums(program, row, 1, step, cut_p, code, mass, sums, OWN * BLOCK, G)
            barrier(counters, 0, program, G)
            if step == 0:
                target = share_of_all(row, top_p, sums, G, GP)
            cut_p = settled(row, 1, step, cut_p, target, sums, G, GP)
        store_ties(program, row, 1, cut_p, code, mass, member, block, ties, aboves, BLOCKS, G)
        barrier(counters, 0, program, G)
        at_cut = tl.exp((valued(cut_p) - largest) / temperature)
        stay_p = needed(row, 1, target, at_cut, ties, aboves, BLOCKS, BP, G, GP)
    mass = filtered(
        row, block, inside, code, weight, top_k, top_p, min_p, cut_k, stay_k, cut_p, stay_p, ties, V, BLOCKS, BP
    )  # fmt: skip
    tl.store(masses + row * BLOCKS + block, tl.sum(mass, axis=1), mask=block < BLOCKS)
    barrier(counters, 0, program, G)
    store_law(row, own, inside, mass, masses, laws, V, BLOCKS, BP)
    return largest, cut_k, stay_k, cut_p, stay_p
