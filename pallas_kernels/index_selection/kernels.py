"""The index selection fused into two launches: scores with the best of each block, and the exact choice.

Knows: how rows and keys are shared among programs, and how the best are found without sorting. Does not know: the
meaning (`reference`), or how the launches are made (`fused`). One launch, in which choices wait for scores, took 4 us
more on an H200.

Scores live in slots: slot s is entry s, for a member it is entry s % block of its candidate block s // block. The
slots that a row uses are a run from 0, because only the last listed block can hold entries not yet visible.

The choice is exact and needs two small searches, however many slots there are: the `topk` best slots lie in the
`topk` best blocks, where blocks are ordered by their best score and then by number. (If a chosen slot lay in none
of them, each would hold a slot that precedes it.) Either search narrows an interval that holds the smallest chosen
value, counting twice a step, and stops as soon as the count is right.
"""

import triton
import triton.language as tl

from pallas_kernels.device_tiles import (
    cast,
    fp4_index_round_trip,
    loop_bound,
    prefetch,
    product,
    queries,
    query_loads,
    rounded,
)
from pallas_kernels.index_selection import reference

INDEX_BLOCK = tl.constexpr(reference.INDEX_BLOCK)
LISTED_TOGETHER = tl.constexpr(1 << 12)  # sums over more numbers at once would not fit into registers


@triton.jit
def visible_entries(length, count, row, RATIO: tl.constexpr):
    """How many entries rows `row` see; none beyond the live rows."""
    return tl.where(row < count, (length + row + 1) // RATIO, 0)


@triton.jit
def used_slots(seen, blocks_ptr, row, ROLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots rows `row` use: their visible entries, or for a member those in its candidate blocks."""
    if ROLE == "member":
        listed = tl.load(blocks_ptr + row)
        return listed * BLOCK - (tl.cdiv(seen, BLOCK) * BLOCK - seen)
    else:
        return seen


@triton.jit
def entries_of(
    slot, wanted, candidates_ptr, row, ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr
):
    """The entries in slots `slot` where `wanted`."""
    if ROLE == "member":
        return (
            tl.load(candidates_ptr + row * KEPT + slot // BLOCK, mask=wanted, other=0) * BLOCK + slot % BLOCK
        )
    else:
        return slot


@triton.jit
def prefetch_keys(keys_ptr, entry, WIDTH: tl.constexpr):
    """Brings the keys of entries `entry` into L2 while the queries are made."""
    ELEMENTS: tl.constexpr = 1024 // keys_ptr.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    LINES: tl.constexpr = WIDTH // ELEMENTS if WIDTH > ELEMENTS else 1
    prefetch(keys_ptr + entry[:, None] * WIDTH + tl.arange(0, LINES)[None, :] * ELEMENTS)


@triton.jit
def index_scores(
    q_ptr, weights_ptr, table_ptr, signs_ptr, keys_ptr, length_ptr, count_ptr, candidates_ptr, listed_ptr,
    scores_ptr, best_ptr, SHARES: tl.constexpr,
    Q: tl.constexpr, W: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, RATIO: tl.constexpr, QUANTISE: tl.constexpr, HADAMARD: tl.constexpr,
    ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, TRIVIAL: tl.constexpr,
    BLOCKS: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (SHARES, R / ROWS). Writes scores [R, BLOCKS * BLOCK] and their block maxima [R, BLOCKS].

    Nothing is written for rows that use at most TRIVIAL slots all together: nothing is left to choose there.
    """
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    M: tl.constexpr = ROWS * HEADS
    share = tl.program_id(0)
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    slots = used_slots(visible_entries(length, count, row, RATIO), listed_ptr, row, ROLE, BLOCK)
    most = tl.max(slots, axis=0)
    if (most > TRIVIAL) & (share * TILE < most):
        member = tl.arange(0, M)
        q, cosine, sine = query_loads(
            q_ptr, table_ptr, first_row, member, Q, R, ROWS, HEADS, WIDTH, ROPE, M, WIDTH
        )
        # A sum of a tile, unlike one of single loads, is not repeated by every thread that needs it.
        part = tl.arange(0, PARTS)[:, None]
        places = (part * R + first_row + (member // HEADS)[None, :]) * W[1] + W[2] + (member % HEADS)[None, :]
        weight = tl.load(weights_ptr + places, mask=part < W[0], other=0.0)
        if QUANTISE and HADAMARD:
            axis = tl.arange(0, WIDTH)
            signs = tl.load(signs_ptr + axis[:, None] * WIDTH + axis[None, :])
        slot = tl.minimum(share * TILE + tl.arange(0, TILE), most - 1)
        entry = entries_of(slot, slot >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
        prefetch_keys(keys_ptr, entry, WIDTH)
        following = tl.minimum(slot + SHARES * TILE, most - 1)
        prefetch_keys(
            keys_ptr, entries_of(following, slot >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT), WIDTH
        )
        weight = rounded(tl.sum(weight, axis=0), dtype) * SCALE
        q = queries(q, cosine, sine, dtype, WIDTH, 0.0, False, M, WIDTH)
        if QUANTISE and HADAMARD:
            q = rounded(product(cast(q, dtype), signs) * WIDTH**-0.5, dtype)
        if QUANTISE:
            q = fp4_index_round_trip(q, INDEX_BLOCK, M, WIDTH)
        q = cast(q, dtype)

        column = tl.arange(0, WIDTH)[None, :]
        for tile in range(loop_bound(share), loop_bound(tl.cdiv(most, TILE)), SHARES):
            slot = tile * TILE + tl.arange(0, TILE)
            keys = tl.load(keys_ptr + entry[:, None] * WIDTH + column)
            # One tile ahead, so that the keys' loads wait for no load of their own turn; slots behind the last
            # one repeat it, so that no load needs a mask.
            following = tl.minimum(slot + SHARES * TILE, most - 1)
            entry = entries_of(following, following >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
            hits = tl.maximum(product(keys, tl.trans(q)), 0.0) * weight[None, :]
            total = tl.sum(tl.reshape(hits, (TILE, ROWS, HEADS)), axis=2)
            total = tl.where(total == 0.0, 0.0, total)
            total = tl.where(slot[:, None] < slots[None, :], total, -float("inf"))
            place = row[None, :] * (BLOCKS * BLOCK) + slot[:, None]
            tl.store(scores_ptr + place, total, mask=(slot < most)[:, None])
            block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
            peak = tl.max(tl.reshape(total, (TILE // BLOCK, BLOCK, ROWS)), axis=1)
            tl.store(
                best_ptr + row[None, :] * BLOCKS + block[:, None],
                peak,
                mask=(block * BLOCK < most)[:, None],
            )


@triton.jit
def narrowed(ordered, low, middle, upper, high, found, COUNT: tl.constexpr):
    """One step of a search: the interval low .. high, cut at middle and upper, that holds the edge, and its count.

    At least COUNT of `ordered` reach low, exactly `found`, and fewer reach high. Both counts share one sum.
    """
    both = (ordered >= middle).to(tl.int32) + ((ordered >= upper).to(tl.int32) << 16)
    both = tl.sum(both, axis=0)
    reach_middle, reach_upper = both & 0xFFFF, both >> 16
    high = tl.where(reach_middle < COUNT, middle, tl.where(reach_upper < COUNT, upper, high))
    low = tl.where(reach_upper >= COUNT, upper, tl.where(reach_middle >= COUNT, middle, low))
    found = tl.where(reach_upper >= COUNT, reach_upper, tl.where(reach_middle >= COUNT, reach_middle, found))
    return low, high, found


@triton.jit
def in_order(values, valid):
    """float32 values without NaN and -0 as uint32 numbers above 0 of the same order; 0 where they are not valid.

    Bits of positive values with the sign bit set, and the complement of negative ones, are in order.
    """
    bits = values.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, ordered, 0)


@triton.jit
def edge_of(ordered, floor, COUNT: tl.constexpr):
    """The smallest of the COUNT largest numbers of `ordered`, of which more are above 0, and how many equals count.

    `ordered` has fewer than 2^15 numbers. At least COUNT are known to reach `floor`; 0 says nothing. (If exactly
    COUNT numbers reach it, the edge may lie below the smallest.)
    """
    high = tl.max(ordered, axis=0) + 1
    # The edge mostly lies within a factor of 4 of the largest value, and hardly ever below 0.
    upper = high - tl.minimum(tl.full((), 1 << 24, tl.uint32), high // 2)
    upper = tl.maximum(upper, floor)
    middle = tl.maximum(tl.minimum(upper, tl.full((), 0x80000000, tl.uint32)), floor)
    low = floor
    found = tl.full((), COUNT + 1, tl.int32)
    low, high, found = narrowed(ordered, low, middle, upper, high, found, COUNT)
    while (high - low > 1) & (found != COUNT):
        step = tl.maximum((high - low) // 3, 1)
        low, high, found = narrowed(ordered, low, low + step, low + 2 * step, high, found, COUNT)
    return low, COUNT - tl.sum((ordered > low).to(tl.int32), axis=0)


@triton.jit
def chosen_places(ordered, forced, edge, room, earlier):
    """Which of `ordered` [M] are chosen, each one's place among the chosen, and `earlier` for the numbers behind.

    Chosen are those above `edge`, those `forced`, and the first `room` equal to the edge. `earlier` counts the
    former two, and 2^16 times the equal ones, among all numbers in front of these.
    """
    above = (ordered > edge) | forced
    tied = ordered == edge
    both = above.to(tl.int32) + (tied.to(tl.int32) << 16)
    before = tl.cumsum(both, axis=0) - both + earlier
    ties_before = before >> 16
    chosen = above | (tied & (ties_before < room))
    return chosen, (before & 0xFFFF) + tl.minimum(ties_before, room), earlier + tl.sum(both, axis=0)


@triton.jit
def block_peaks(best_ptr, block, blocks):
    """Maxima of the blocks in front of number `blocks`, in order."""
    return in_order(tl.load(best_ptr + block, mask=block < blocks, other=0.0), block < blocks)


@triton.jit
def store_listed(best_ptr, out_ptr, first, blocks, searched, edge, room, earlier, CHUNK: tl.constexpr):
    """Lists the chosen among CHUNK blocks from `first` on, and counts on."""
    block = first + tl.arange(0, CHUNK)
    forced = (block >= searched) & (block < blocks)
    ordered = block_peaks(best_ptr, block, searched)
    chosen, place, earlier = chosen_places(ordered, forced, edge, room, earlier)
    tl.store(out_ptr + place, block, mask=chosen)
    return earlier


@triton.jit
def list_blocks(best_ptr, out_ptr, blocks, COUNT: tl.constexpr, NEWEST: tl.constexpr, PADDED: tl.constexpr):
    """Writes the COUNT best of more than COUNT blocks in rising order; the newest always among them if NEWEST.

    Returns a number that the maxima of at least COUNT - NEWEST of the listed reach.
    """
    CHUNK: tl.constexpr = PADDED if PADDED < LISTED_TOGETHER else LISTED_TOGETHER
    searched = blocks - NEWEST
    floor = tl.full((), 0, tl.uint32)
    edge, room = edge_of(block_peaks(best_ptr, tl.arange(0, PADDED), searched), floor, COUNT - NEWEST)
    earlier = tl.full((), 0, tl.int32)
    if CHUNK == PADDED:
        store_listed(best_ptr, out_ptr, 0, blocks, searched, edge, room, earlier, CHUNK)
    else:
        for first in range(loop_bound(blocks * 0), loop_bound(blocks), CHUNK):
            earlier = store_listed(best_ptr, out_ptr, first, blocks, searched, edge, room, earlier, CHUNK)
    return edge


@triton.jit
def list_best(best_ptr, out_ptr, blocks, COUNT: tl.constexpr, NEWEST: tl.constexpr, PADDED: tl.constexpr):
    """`list_blocks`, on half of the numbers while that is enough: caches are a little longer than a power of two."""
    if PADDED > 2 * COUNT:
        if blocks <= PADDED // 2:
            edge = list_blocks(best_ptr, out_ptr, blocks, COUNT, NEWEST, PADDED // 2)
        else:
            edge = list_blocks(best_ptr, out_ptr, blocks, COUNT, NEWEST, PADDED)
    else:
        edge = list_blocks(best_ptr, out_ptr, blocks, COUNT, NEWEST, PADDED)
    return edge


@triton.jit
def choose_slots(
    scores_ptr, best_ptr, candidates_ptr, ids_ptr, counts_ptr, work_ptr, row, slots, blocks,
    ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TOPK: tl.constexpr, PADDED_TOPK: tl.constexpr,
):  # fmt: skip
    """One row's choice: the entries in its TOPK best slots, in rising order."""
    tl.store(counts_ptr + row, tl.minimum(slots, TOPK))
    place = tl.arange(0, PADDED_TOPK)
    if slots <= TOPK:
        entry = entries_of(place, place < slots, candidates_ptr, row, ROLE, BLOCK, KEPT)
        tl.store(ids_ptr + row * TOPK + place, tl.where(place < slots, entry, -1), mask=place < TOPK)
    else:
        number = tl.arange(0, PADDED_TOPK * BLOCK)
        block = number // BLOCK
        floor = tl.full((), 0, tl.uint32)
        if blocks > TOPK:
            floor = list_best(best_ptr + row * BLOCKS, work_ptr + row * TOPK, blocks, TOPK, 0, PADDED_BLOCKS)
            tl.debug_barrier()
            block = tl.load(work_ptr + row * TOPK + block, mask=block < TOPK, other=BLOCKS)
        slot = block * BLOCK + number % BLOCK
        valid = slot < slots
        value = tl.load(scores_ptr + row * (BLOCKS * BLOCK) + slot, mask=valid, other=0.0)
        ordered = in_order(value, valid)
        edge, room = edge_of(ordered, floor, TOPK)
        chosen, order, _ = chosen_places(ordered, slot < 0, edge, room, 0)
        wanted = entries_of(slot, chosen, candidates_ptr, row, ROLE, BLOCK, KEPT)
        tl.store(ids_ptr + row * TOPK + order, wanted, mask=chosen)


@triton.jit
def index_choice(
    scores_ptr, best_ptr, length_ptr, count_ptr, candidates_ptr, listed_ptr,
    ids_ptr, counts_ptr, published_ptr, published_counts_ptr, work_ptr,
    RATIO: tl.constexpr, ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TOPK: tl.constexpr, PADDED_TOPK: tl.constexpr, PADDED_KEPT: tl.constexpr,
):  # fmt: skip
    """Grid (R, 1): one row's choice. A source has (R, 2): the second program lists its candidate blocks."""
    row = tl.program_id(0)
    seen = visible_entries(tl.load(length_ptr), tl.load(count_ptr), row, RATIO)
    slots = used_slots(seen, listed_ptr, row, ROLE, BLOCK)
    blocks = tl.cdiv(slots, BLOCK)

    if tl.program_id(1) == 0:
        choose_slots(
            scores_ptr, best_ptr, candidates_ptr, ids_ptr, counts_ptr, work_ptr, row, slots, blocks,
            ROLE, BLOCK, KEPT, BLOCKS, PADDED_BLOCKS, TOPK, PADDED_TOPK,
        )  # fmt: skip
    elif ROLE == "source":
        tl.store(published_counts_ptr + row, tl.minimum(blocks, KEPT))
        place = tl.arange(0, PADDED_KEPT)
        if blocks > KEPT:
            list_best(best_ptr + row * BLOCKS, published_ptr + row * KEPT, blocks, KEPT, 1, PADDED_BLOCKS)
        else:
            tl.store(
                published_ptr + row * KEPT + place, tl.where(place < blocks, place, -1), mask=place < KEPT
            )
