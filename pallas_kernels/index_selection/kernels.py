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

from pallas_kernels.device_numbers import INTERPRETED
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
GUESSES = tl.constexpr(6)  # cuts of a search where values lie; behind that, scores have ties or odd gaps
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
def query_items(
    q_ptr, weights_ptr, table_ptr, signs_ptr, first_row, Q: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What queries need of ROWS rows: queries, their turns, Hadamard signs where TURNED; parts of weights."""
    M: tl.constexpr = ROWS * HEADS
    member = tl.arange(0, M)
    q, cosine, sine = query_loads(
        q_ptr, table_ptr, first_row, member, Q, R, ROWS, HEADS, WIDTH, ROPE, M, WIDTH
    )
    # A sum of a tile, unlike one of single loads, is not repeated by every thread that needs it.
    part = tl.arange(0, PARTS)[:, None]
    places = (part * R + first_row + (member // HEADS)[None, :]) * W[1] + W[2] + (member % HEADS)[None, :]
    weight = tl.load(weights_ptr + places, mask=part < W[0], other=0.0)
    signs = tl.zeros((1, 1), dtype)
    if TURNED:
        axis = tl.arange(0, WIDTH)
        signs = tl.load(signs_ptr + axis[:, None] * WIDTH + axis[None, :])
    return q, cosine, sine, signs, weight


@triton.jit
def rounded_queries(
    q, signs, dtype: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, QUANTISE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Queries [M, WIDTH] as they meet keys, from rotated ones."""
    if TURNED:
        q = rounded(product(cast(q, dtype), signs) * WIDTH**-0.5, dtype)
    if QUANTISE:
        q = fp4_index_round_trip(q, INDEX_BLOCK, M, WIDTH)
    return cast(q, dtype)


@triton.jit
def settled_operand(x):
    """A product's operand `x` itself; in bfloat16 it goes to shared memory here, not as soon as it has arrived."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )


@triton.jit
def store_scores(
    keys, q, weight, scores_ptr, best_ptr, tile, row, slots, most, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys for rows `row`, and where PEAKS the best of each of its blocks."""
    slot = tile * TILE + tl.arange(0, TILE)
    hits = tl.maximum(product(keys, tl.trans(q)), 0.0) * weight[None, :]
    total = tl.sum(tl.reshape(hits, (TILE, ROWS, HEADS)), axis=2)
    total = tl.where(total == 0.0, 0.0, total)
    total = tl.where(slot[:, None] < slots[None, :], total, -float("inf"))
    place = row[None, :] * (BLOCKS * BLOCK) + slot[:, None]
    tl.store(scores_ptr + place, total, mask=(slot < most)[:, None])
    if PEAKS:
        block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        peak = tl.max(tl.reshape(total, (TILE // BLOCK, BLOCK, ROWS)), axis=1)
        tl.store(
            best_ptr + row[None, :] * BLOCKS + block[:, None], peak, mask=(block * BLOCK < most)[:, None]
        )


@triton.jit
def index_scores(
    q_ptr, weights_ptr, table_ptr, signs_ptr, keys_ptr, length_ptr, count_ptr, candidates_ptr, listed_ptr,
    scores_ptr, best_ptr, SHARES: tl.constexpr,
    Q: tl.constexpr, W: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, RATIO: tl.constexpr, QUANTISE: tl.constexpr, HADAMARD: tl.constexpr,
    ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, TRIVIAL: tl.constexpr,
    BLOCKS: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ENTRIES: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Grid (SHARES, R / ROWS). Writes scores [R, BLOCKS * BLOCK], and where PEAKS their block maxima [R, BLOCKS].

    Nothing is written for rows that use at most TRIVIAL slots all together: nothing is left to choose there.
    """
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    M: tl.constexpr = ROWS * HEADS
    TURNED: tl.constexpr = QUANTISE and HADAMARD
    # Where every program has one tile, it asks for all it needs before it knows how much of that is used.
    ONCE: tl.constexpr = ROLE != "member" and SHARES * TILE >= ENTRIES
    share = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    column = tl.arange(0, WIDTH)[None, :]
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    if ONCE:
        entry = tl.minimum(share * TILE + tl.arange(0, TILE), ENTRIES - 1)
        prefetch_keys(keys_ptr, entry, WIDTH)
        q, cosine, sine, signs, weight = query_items(
            q_ptr, weights_ptr, table_ptr, signs_ptr, first_row, Q, W, R, HEADS, WIDTH, ROPE, TURNED, PARTS, ROWS,
            dtype,
        )  # fmt: skip
        tl.debug_barrier()  # without it loads wait until it is known whether they are used
    row = first_row + tl.arange(0, ROWS)
    slots = used_slots(visible_entries(length, count, row, RATIO), listed_ptr, row, ROLE, BLOCK)
    most = tl.max(slots, axis=0)
    if (most > TRIVIAL) & (share * TILE < most):
        if ONCE:
            total_weight = rounded(tl.sum(weight, axis=0), dtype) * SCALE
            made = queries(q, cosine, sine, dtype, WIDTH, 0.0, False, M, WIDTH)
            # They come from L2 by now, and only here, because whoever waits for queries would wait for them too.
            keys = tl.load(keys_ptr + entry[:, None] * WIDTH + column)
            made = rounded_queries(made, settled_operand(signs), dtype, M, WIDTH, QUANTISE, TURNED)
            store_scores(
                settled_operand(keys), made, total_weight, scores_ptr, best_ptr, share, row, slots, most, HEADS,
                BLOCK, BLOCKS, ROWS, TILE, PEAKS,
            )  # fmt: skip
        else:
            q, cosine, sine, signs, weight = query_items(
                q_ptr, weights_ptr, table_ptr, signs_ptr, first_row, Q, W, R, HEADS, WIDTH, ROPE, TURNED, PARTS,
                ROWS, dtype,
            )  # fmt: skip
            slot = tl.minimum(share * TILE + tl.arange(0, TILE), most - 1)
            entry = entries_of(slot, slot >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
            prefetch_keys(keys_ptr, entry, WIDTH)
            following = tl.minimum(slot + SHARES * TILE, most - 1)
            prefetch_keys(
                keys_ptr,
                entries_of(following, slot >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT),
                WIDTH,
            )
            total_weight = rounded(tl.sum(weight, axis=0), dtype) * SCALE
            made = queries(q, cosine, sine, dtype, WIDTH, 0.0, False, M, WIDTH)
            made = rounded_queries(made, signs, dtype, M, WIDTH, QUANTISE, TURNED)
            for tile in range(loop_bound(share), loop_bound(tl.cdiv(most, TILE)), SHARES):
                slot = tile * TILE + tl.arange(0, TILE)
                keys = tl.load(keys_ptr + entry[:, None] * WIDTH + column)
                # One tile ahead, so that the keys' loads wait for no load of their own turn; slots behind the last
                # one repeat it, so that no load needs a mask.
                following = tl.minimum(slot + SHARES * TILE, most - 1)
                entry = entries_of(following, following >= 0, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
                store_scores(
                    keys, made, total_weight, scores_ptr, best_ptr, tile, row, slots, most, HEADS, BLOCK,
                    BLOCKS, ROWS, TILE, PEAKS,
                )  # fmt: skip


@triton.jit
def reaching(ordered, middle, upper):
    """How many of `ordered` reach middle, and how many upper; both counts share one sum."""
    both = (ordered >= middle).to(tl.int32) + ((ordered >= upper).to(tl.int32) << 16)
    both = tl.sum(both, axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit
def in_order(values, valid):
    """float32 values without NaN and -0 as uint32 numbers above 0 of the same order; 0 where they are not valid.

    Bits of positive values with the sign bit set, and the complement of negative ones, are in order.
    """
    bits = values.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, ordered, 0)


@triton.jit
def value_of(ordered):
    """The float32 value of a number of `in_order` above 0."""
    bits = tl.where(ordered >= 0x80000000, ordered ^ 0x80000000, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def edge_of(ordered, floor, total, COUNT: tl.constexpr):
    """(edge, room): the COUNT largest of `ordered` are those above the edge and `room` that equal it.

    `ordered` has fewer than 2^15 numbers, of which `total`, more than COUNT, are above 0. At least COUNT are known to
    reach `floor`; 0 says nothing. At least COUNT reach the edge, too.

    The interval low .. high holds the smallest chosen number: `reach_low` >= COUNT reach low, `reach_high` fewer reach
    high. Without a floor it is first cut where values spread evenly would have their edge, and close to the middle
    of its values; a few such cuts mostly suffice. Any other search cuts it in thirds.
    """
    low, high = floor, tl.max(ordered, axis=0) + 1
    guesses = tl.where(floor == 0, GUESSES, 0)
    if floor == 0:
        low = tl.min(ordered - 1, axis=0) + 1  # numbers that are not valid are the largest here
    reach_low, reach_high = total, tl.full((), 0, tl.int32)
    while (high - low > 1) & (reach_low != COUNT):
        third = tl.maximum((high - low) // 3, 1)
        least, largest = value_of(low), value_of(high - 1)
        share = (reach_low - COUNT + 0.5) / (reach_low - reach_high)
        even = least + (largest - least) * share
        central = least + (largest - least) * (0.5 * share + 0.25)
        guessing = guesses > 0
        first = tl.where(guessing, in_order(even, guessing), low + third)
        second = tl.where(guessing, in_order(central, guessing), low + 2 * third)
        guesses -= 1
        middle = tl.minimum(tl.maximum(tl.minimum(first, second), low + 1), high - 1)
        upper = tl.minimum(tl.maximum(tl.maximum(first, second), low + 1), high - 1)
        reach_middle, reach_upper = reaching(ordered, middle, upper)
        high = tl.where(reach_middle < COUNT, middle, tl.where(reach_upper < COUNT, upper, high))
        reach_high = tl.where(
            reach_middle < COUNT, reach_middle, tl.where(reach_upper < COUNT, reach_upper, reach_high)
        )
        low = tl.where(reach_upper >= COUNT, upper, tl.where(reach_middle >= COUNT, middle, low))
        reach_low = tl.where(
            reach_upper >= COUNT, reach_upper, tl.where(reach_middle >= COUNT, reach_middle, reach_low)
        )
    exact = reach_low == COUNT
    return tl.where(exact, low - 1, low), tl.where(exact, 0, COUNT - reach_high)


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
    peaks = block_peaks(best_ptr, tl.arange(0, PADDED), searched)
    edge, room = edge_of(peaks, floor, searched, COUNT - NEWEST)
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
    early, scores_ptr, best_ptr, candidates_ptr, ids_ptr, counts_ptr, work_ptr, row, slots, blocks,
    ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TOPK: tl.constexpr, PADDED_TOPK: tl.constexpr,
):  # fmt: skip
    """One row's choice: the entries in its TOPK best slots, in rising order.

    Where no row has more than TOPK blocks, `early` holds the scores of PADDED_BLOCKS of them.
    """
    tl.store(counts_ptr + row, tl.minimum(slots, TOPK))
    place = tl.arange(0, PADDED_TOPK)
    if slots <= TOPK:
        entry = entries_of(place, place < slots, candidates_ptr, row, ROLE, BLOCK, KEPT)
        tl.store(ids_ptr + row * TOPK + place, tl.where(place < slots, entry, -1), mask=place < TOPK)
    else:
        floor = tl.full((), 0, tl.uint32)
        if BLOCKS <= TOPK:
            slot = tl.arange(0, PADDED_BLOCKS * BLOCK)
            value = early
        else:
            # Whole blocks are loaded by the threads that know where they begin.
            block = tl.arange(0, PADDED_TOPK)
            if blocks > TOPK:
                floor = list_best(
                    best_ptr + row * BLOCKS, work_ptr + row * TOPK, blocks, TOPK, 0, PADDED_BLOCKS
                )
                tl.debug_barrier()
                block = tl.load(work_ptr + row * TOPK + block, mask=block < TOPK, other=BLOCKS)
            slots_of = tl.multiple_of(block * BLOCK, BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
            slot = tl.reshape(slots_of, (PADDED_TOPK * BLOCK,))
            value = tl.load(scores_ptr + row * (BLOCKS * BLOCK) + slot, mask=slot < slots, other=0.0)
        ordered = in_order(value, slot < slots)
        edge, room = edge_of(ordered, floor, slots, TOPK)
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
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    early = tl.zeros((1,), tl.float32)
    if BLOCKS <= TOPK:
        slot = tl.arange(0, PADDED_BLOCKS * BLOCK)
        early = tl.load(scores_ptr + row * (BLOCKS * BLOCK) + slot, mask=slot < BLOCKS * BLOCK, other=0.0)
        tl.debug_barrier()  # without it they are loaded once it is known how many are used
    seen = visible_entries(length, count, row, RATIO)
    slots = used_slots(seen, listed_ptr, row, ROLE, BLOCK)
    blocks = tl.cdiv(slots, BLOCK)

    if tl.program_id(1) == 0:
        choose_slots(
            early, scores_ptr, best_ptr, candidates_ptr, ids_ptr, counts_ptr, work_ptr, row, slots, blocks,
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
