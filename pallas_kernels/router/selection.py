"""How one program chooses from the logits of all rows, in Triton.

Knows: scores, choice, weights and the list of distinct experts (reference.py says what they are), and how they are
spread over a program's threads. Does not know: who computes the logits.
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import INTERPRETED, settled

LANES = tl.constexpr(128)  # experts that a warp holds of a row at once: 16 bytes a thread
PLACES = tl.constexpr(32)  # for the choices of a row: the lanes of its warp
SMALLEST = tl.constexpr(-(2**31))


@triton.jit
def small_items(bias, table, tokens, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HASHED: tl.constexpr):
    """What `selection` needs besides the logits: the biases for every row, or the experts of its token [PLACES, R].

    Nobody has read them for long, so that they take their time; every gate program asks before it waits for others.
    """
    items = ()
    if HASHED:
        row, place = tl.arange(0, R)[None, :], tl.arange(0, PLACES)[:, None]
        token = tl.load(tokens + settled(row + place * 0))
        items = (tl.load(table + settled(token * K + place), mask=place < K, other=0),)
    else:
        row = tl.arange(0, R)[:, None]
        for chunk in tl.static_range((E + LANES - 1) // LANES):
            expert = chunk * LANES + tl.arange(0, LANES)[None, :]
            # For every row, so that biases are spread over the threads as logits are.
            items = items + (tl.load(bias + expert + row * 0, mask=(expert < E) & (row >= 0), other=0.0),)
    return items


@triton.jit
def softplus(x):
    """log(1 + exp(x)); log1p by the ratio that cancels the rounding of 1 + t."""
    t = tl.exp(tl.abs(x) * -1.0)
    u = 1.0 + t
    if INTERPRETED:
        ratio = t / tl.where(u == 1.0, 1.0, u - 1.0)
    else:
        # u - 1 is 0, where the ratio is not used, or a usual number: no care for very large and very small ones.
        ratio = tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [t, u - 1.0], dtype=tl.float32, is_pure=True, pack=1
        )
    tail = tl.where(u == 1.0, t, tl.log(u) * ratio)
    return tl.maximum(x, 0.0) + tail


@triton.jit
def ordered(x):
    """int32 that compare as float32 `x` do; NaN, which only dead rows hold, has some place too."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def slices(logits, places, real, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """What each slice adds to the logits at some places: SPLITS loads, none of which waits for another."""
    parts = ()
    for split in tl.static_range(SPLITS):
        parts = parts + (tl.load(logits + split * SIZE + places, mask=real, other=0.0, cache_modifier=".cg"),)
    return parts


@triton.jit
def scores(parts):
    """Scores from the slices' parts of the logits."""
    total = parts[0]
    for split in tl.static_range(1, len(parts)):
        total += parts[split]
    return tl.sqrt(softplus(total))


@triton.jit
def four_apart(values, R: tl.constexpr):
    """The neighbours that a thread holds of values [R, LANES], as four tensors [R, PLACES]."""
    even, odd = tl.split(tl.reshape(values, (R, PLACES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def best(parts, items, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr):
    """The K experts of the highest biased scores, the highest first, and the bits of their scores: tuples of int32 [R].

    A warp holds whole rows, LANES experts at a time, so that the search for a row's largest score stays inside it;
    integers, because a warp finds the largest of those in one instruction.
    """
    CHUNKS: tl.constexpr = (E + LANES - 1) // LANES
    PAIRS: tl.constexpr = 2 * CHUNKS
    lane = tl.arange(0, PLACES)[None, :]
    bits, keys = (), ()
    for chunk in tl.static_range(CHUNKS):
        score = scores(parts[chunk])
        expert = chunk * LANES + tl.arange(0, LANES)[None, :]
        key = tl.where(expert < E, ordered(score + items[chunk]), SMALLEST)
        bits, keys = bits + four_apart(score.to(tl.int32, bitcast=True), R), keys + four_apart(key, R)
    # Neighbours are put in order once: a round then looks only at the better one of a pair.
    better, worse, better_at = (), (), ()
    for pair in tl.static_range(PAIRS):
        first, second = keys[2 * pair], keys[2 * pair + 1]
        expert = pair // 2 * LANES + pair % 2 * 2 + lane * 4
        better, worse = better + (tl.maximum(first, second),), worse + (tl.minimum(first, second),)
        better_at = better_at + (tl.where(second > first, expert + 1, expert),)
    experts = ()
    for _ in tl.static_range(K):
        largest = better[0]
        for pair in tl.static_range(1, PAIRS):
            largest = tl.maximum(largest, better[pair])
        largest = tl.max(largest, axis=1)[:, None]
        lowest = tl.full((R, PLACES), E - 1, tl.int32)
        for pair in tl.static_range(PAIRS):
            lowest = tl.minimum(lowest, tl.where(better[pair] == largest, better_at[pair], E - 1))
        one = tl.min(lowest, axis=1)
        experts = experts + (one,)
        next_better, next_worse, next_at = (), (), ()
        for pair in tl.static_range(PAIRS):
            taken = better_at[pair] == one[:, None]
            next_better = next_better + (tl.where(taken, worse[pair], better[pair]),)
            next_worse = next_worse + (tl.where(taken, SMALLEST, worse[pair]),)
            next_at = next_at + (tl.where(taken, better_at[pair] ^ 1, better_at[pair]),)
        better, worse, better_at = next_better, next_worse, next_at

    # Place k fetches the score of choice k from the thread that holds it.
    place = tl.arange(0, PLACES)[None, :]
    chosen = tl.zeros((R, PLACES), tl.int32)
    for k in tl.static_range(K):
        chosen = tl.where(place == k, experts[k][:, None], chosen)
    holder = (chosen & (LANES - 1)) >> 2
    own = tl.gather(bits[0], holder, axis=1)
    for i in tl.static_range(1, 4 * CHUNKS):
        held = tl.gather(bits[i], holder, axis=1)
        own = tl.where((chosen & ~(LANES - 4)) == i // 4 * LANES + i % 4, held, own)
    own_bits = ()
    for k in tl.static_range(K):
        own_bits = own_bits + (tl.max(tl.where(place == k, own, 0), axis=1),)
    return experts, own_bits


@triton.jit
def side_by_side(values, R: tl.constexpr):
    """int32 [PLACES, R] of the tuple's values [R]."""
    place = tl.arange(0, PLACES)[:, None]
    made = tl.zeros((PLACES, R), tl.int32)
    for k in tl.static_range(len(values)):
        made = tl.where(place == k, values[k][None, :], made)
    return made


@triton.jit
def taken_apart(values, K: tl.constexpr):
    """The first K rows [R] of values [PLACES, R], which are not negative."""
    place = tl.arange(0, PLACES)[:, None]
    rows = ()
    for k in tl.static_range(K):
        rows = rows + (tl.max(tl.where(place == k, values, 0), axis=0),)
    return rows


@triton.jit
def total_score(bits):
    """float32 [R]: the sum of a row's scores, given by their bits: of the first four, and of the others."""
    low = bits[0].to(tl.float32, bitcast=True)
    high = tl.zeros_like(low)
    for k in tl.static_range(1, len(bits)):
        if k < 4:
            low += bits[k].to(tl.float32, bitcast=True)
        else:
            high += bits[k].to(tl.float32, bitcast=True)
    return low + high


@triton.jit
def bit_count(x):
    """How many bits of int32 `x` are set."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits - ((bits >> 1) & 0x55555555)
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def ranks(entries, live, R: tl.constexpr, LIMIT: tl.constexpr):
    """Where the rows' entries stand among the distinct ones of the first `live` rows, which ascend, and their number.

    entries: a tuple of int32 [R], below LIMIT. Returns int32 [PLACES, R] and [1, R]. A row's set holds a bit for each
    of its entries; the rows meet only where their sets are joined. Behind that every warp has the whole set.
    """
    NEEDED: tl.constexpr = (LIMIT + 31) // 32
    # No fewer than lanes, of which each holds a word: what is gathered must not leave the warp.
    WORDS: tl.constexpr = triton.next_power_of_2(NEEDED) if NEEDED > PLACES else PLACES
    word = tl.arange(0, WORDS)[:, None]
    row = tl.arange(0, R)[None, :]
    own = tl.zeros((WORDS, R), tl.int32)
    for k in tl.static_range(len(entries)):
        bit = tl.full((R,), 1, tl.int32) << (entries[k] & 31)
        own |= tl.where(word == (entries[k] >> 5)[None, :], bit[None, :], 0)
    present = tl.reduce_or(tl.where(row < live, own, 0), axis=1)[:, None] + row * 0
    counts = bit_count(present)
    upto = tl.cumsum(counts, axis=0)
    entry = side_by_side(entries, R)
    lower = (tl.full((PLACES, R), 1, tl.int32) << (entry & 31)) - 1
    rank = tl.gather(upto - counts, entry >> 5, axis=0)
    rank += bit_count(tl.gather(present, entry >> 5, axis=0) & lower)
    return rank, tl.max(upto, axis=0)[None, :]


@triton.jit
def selection(
    logits, items, live, expert_ids, count, weight, slot, ids,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, HASHED: tl.constexpr,
    SCALING: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    """Scores, choice, weights and the list of entries, by one program; the first `live` rows are live.

    A row belongs to one warp from its logits to its entries. Its choices lie side by side in the warp's lanes,
    [PLACES, R]; places in memory are `settled` so that Triton stores from there, not from where they would be in line.
    """
    row, place = tl.arange(0, R)[None, :], tl.arange(0, PLACES)[:, None]
    used = (place < K) & (row >= 0)
    if HASHED:
        parts = slices(logits, settled(row * E + items[0]), used, R * E, SPLITS)
        experts = taken_apart(items[0], K)
        bits = taken_apart(scores(parts).to(tl.int32, bitcast=True), K)
    else:
        parts = ()
        for chunk in tl.static_range((E + LANES - 1) // LANES):
            expert = chunk * LANES + tl.arange(0, LANES)[None, :]
            rows = tl.arange(0, R)[:, None]
            parts = parts + (slices(logits, rows * E + expert, (expert < E) & (rows >= 0), R * E, SPLITS),)
        tl.debug_barrier()  # without it loads of a later chunk wait until an earlier one has been used
        experts, bits = best(parts, items, R, E, K)

    chosen = side_by_side(experts, R)
    alive = used & (row < live)
    cell = settled(row * K + place)
    tl.store(ids + cell, tl.where(alive, chosen, -1), mask=used)
    score = side_by_side(bits, R).to(tl.float32, bitcast=True)
    share = score / (total_score(bits)[None, :] + SUM_EPS) * SCALING

    # An expert has one entry, or as many as one row mentions it (only a table does so more than once): an entry is
    # a pair of an expert and the number of its mention within the row. Entries come in ascending order.
    MENTIONS: tl.constexpr = 8 if HASHED else 1
    entries = ()
    for k in tl.static_range(K):
        entry = experts[k] * MENTIONS
        if HASHED:
            for other in tl.static_range(k):
                entry += (experts[other] == experts[k]).to(tl.int32)
        entries = entries + (entry,)
    rank, listed = ranks(entries, live, R, E * MENTIONS)
    tl.store(expert_ids + settled(rank), chosen, mask=alive)
    tl.store(expert_ids + cell, -1, mask=used & (cell >= listed))
    pair = settled(rank * R + row)
    tl.store(weight + pair, share, mask=alive)
    tl.store(slot + pair, place + row * 0, mask=alive)
    tl.store(count + cell * 0, listed + cell * 0, mask=cell == 0)
