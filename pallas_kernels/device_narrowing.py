"""Top-k and top-p over a vocabulary that many programs share.

Knows: how the logit at a cut is found a few bits at a time, and which of several tokens that tie there stay. Does not
know: where the programs meet between two of these functions (device_laws.py), or what is drawn.

A filter keeps the shortest prefix of the tokens, ranked by (logit, descending; id, ascending), that carries at least
`target` weight. In each of PASSES every program sums its tokens' weights above TRIALS cuts; then each works out the
next bits of the cut from everybody's sums, all in the same order and so to the same bits. Sums of numbers that are not
negative, in one fixed order, never fall when more is summed, so rounding cannot mislead the search. Behind the last
pass the tokens at the cut are counted by blocks of the vocabulary, and as many of them stay as are needed, the lowest
ids first.

    sums    float32 [R, ROUNDS, PASSES, G, TRIALS]   by row, filter (0: top-k, 1: top-p), pass and program
    ties    int32   [R, ROUNDS, BLOCKS]              tokens at the cut, by block
    aboves  float32 [R, ROUNDS, G]                   weight above the cut, by program
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import SMALLEST_NORMAL

ROUNDS, PASSES, TRIALS = 2, 8, 16
_ROUNDS, _PASSES, _TRIALS = tl.constexpr(ROUNDS), tl.constexpr(PASSES), tl.constexpr(TRIALS)
BITS = tl.constexpr(4)  # of a pass
LOWEST = tl.constexpr(-2147483648)  # below the code of every number
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(value):
    """int32 codes that compare as the float32 values do; -0 equals +0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def valued(code):
    """The float32 of a code."""
    return tl.where(code < 0, code ^ _MAGNITUDE, code).to(tl.float32, bitcast=True)


@triton.jit
def store_sums(program, row, round, step, cut, code, weight, sums, N: tl.constexpr, G: tl.constexpr):
    """The weights of this program's tokens from each trial cut on, of codes and weights of N tokens."""
    trial = tl.arange(0, _TRIALS)
    trials = cut + (trial << (BITS * (_PASSES - 1 - step)))
    codes, weights = tl.reshape(code, (N,)), tl.reshape(weight, (N,))
    masses = tl.sum(tl.where(codes[None, :] >= trials[:, None], weights[None, :], 0.0), axis=1)
    place = ((row * _ROUNDS + round) * _PASSES + step) * G + program
    tl.store(sums + place * _TRIALS + trial, masses)


@triton.jit
def all_sums(row, round, step, sums, G: tl.constexpr, GP: tl.constexpr):
    """The weights [TRIALS] of all programs' tokens from each trial cut on."""
    each = tl.arange(0, GP)
    place = ((row * _ROUNDS + round) * _PASSES + step) * G + each
    at = place[:, None] * _TRIALS + tl.arange(0, _TRIALS)[None, :]
    return tl.sum(tl.load(sums + at, mask=(each < G)[:, None], other=0.0, cache_modifier=".cg"), axis=0)


@triton.jit
def settled(row, round, step, cut, target, sums, G: tl.constexpr, GP: tl.constexpr):
    """The cut with the bits that a pass settles: the largest one above which `target` is still reached."""
    reached = (all_sums(row, round, step, sums, G, GP) >= target) & (tl.arange(0, _TRIALS) > 0)
    return cut + (tl.sum(reached.to(tl.int32), axis=0) << (BITS * (_PASSES - 1 - step)))


@triton.jit
def share_of_all(row, share, sums, G: tl.constexpr, GP: tl.constexpr):
    """What top-p asks for: a share of all weight, and never nothing; known behind its first pass."""
    first = tl.arange(0, _TRIALS) == 0
    whole = tl.sum(tl.where(first, all_sums(row, 1, 0, sums, G, GP), 0.0), axis=0)
    return tl.maximum(share * whole, SMALLEST_NORMAL)


@triton.jit
def store_ties(
    program, row, round, cut, code, weight, member, block, ties, aboves, BLOCKS: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """How many of this program's tokens stand at the cut, by block, and what those above it weigh."""
    tied = (member & (code == cut)).to(tl.int32)
    tl.store(ties + (row * _ROUNDS + round) * BLOCKS + block, tl.sum(tied, axis=1), mask=block < BLOCKS)
    above = tl.sum(tl.sum(tl.where(code > cut, weight, 0.0), axis=1), axis=0)
    tl.store(aboves + (row * _ROUNDS + round) * G + program, above)


@triton.jit
def needed(
    row, round, target, weight, ties, aboves,
    BLOCKS: tl.constexpr, BP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """How many of the tokens at the cut stay, at least one; each weighs `weight`."""
    each, blocks = tl.arange(0, GP), tl.arange(0, BP)
    above = tl.load(
        aboves + (row * _ROUNDS + round) * G + each, mask=each < G, other=0.0, cache_modifier=".cg"
    )
    count = tl.load(
        ties + (row * _ROUNDS + round) * BLOCKS + blocks,
        mask=blocks < BLOCKS,
        other=0,
        cache_modifier=".cg",
    )
    exact = (target - tl.sum(above, axis=0)) / weight
    whole = exact.to(tl.int32)
    return tl.minimum(tl.maximum(whole + (exact > whole).to(tl.int32), 1), tl.sum(count, axis=0))


@triton.jit
def kept(
    row, round, cut, stay, code, member, block, ties, BLOCKS: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Which tokens [M, BLOCK] of the blocks [M] a filter keeps of its members."""
    tied = member & (code == cut)
    blocks = tl.arange(0, BP)
    count = tl.load(
        ties + (row * _ROUNDS + round) * BLOCKS + blocks,
        mask=blocks < BLOCKS,
        other=0,
        cache_modifier=".cg",
    )
    before = tl.sum(tl.where(blocks[None, :] < block[:, None], count[None, :], 0), axis=1)
    rank = before[:, None] + tl.cumsum(tied.to(tl.int32), axis=1)  # from 1 on
    return member & ((code > cut) | (tied & (rank <= stay)))
