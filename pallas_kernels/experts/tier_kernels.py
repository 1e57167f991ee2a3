"""Triton bodies of the launches for experts in two memories.

Knows: which program works on which tile of which expert, from where it streams it, and where it writes it to
meanwhile; and the one program that decides so. Does not know: the arithmetic around the products (`kernels`), or
down's other form (`walking_tier_kernels`), few programs that walk over many tiles.

A missed expert crosses the link once: each program first copies its own tile of it to the spare slot, with nothing but
loads in flight, and then reads it there, every thread what it wrote itself. No program reads a slot that another one
writes, so nobody waits for anybody. Tiles that are not kept are multiplied as they come. The copy is a branch of its
own, so that the programs of hot experts have the registers, and so the company, that they have in `kernels`.
"""

import triton
import triton.language as tl

from pallas_kernels.experts import tiers
from pallas_kernels.experts.kernels import shared_sums, store_hidden, store_partial
from pallas_kernels.register_mma import fp4, lanes

HOT, COLD, KEPT = tl.constexpr(tiers.HOT), tl.constexpr(tiers.COLD), tl.constexpr(tiers.KEPT)
SHARED, NOTHING = tl.constexpr(tiers.SHARED), tl.constexpr(tiers.NOTHING)
OLDEST, COUNTED = tl.constexpr(tiers.OLDEST), tl.constexpr(len(tiers.COUNTED))
COLUMNS = tl.constexpr(tiers.PLACE_COLUMNS)


@triton.jit
def place_experts(
    layer_ptr,
    table_ptr,
    ids_ptr,
    count_ptr,
    _owners_ptr,
    _ages_ptr,
    _counts_ptr,
    places_ptr,
    owners_ptr,
    ages_ptr,
    counts_ptr,
    EXPERTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE_ENTRIES: tl.constexpr,
    WIDE_SLOTS: tl.constexpr,
):
    """`tiers.place` by one program; owners, ages and counts are updated in place. WIDE sizes are powers of two."""
    layer = tl.load(layer_ptr)
    entry, slot = tl.arange(0, WIDE_ENTRIES), tl.arange(0, WIDE_SLOTS)
    real = slot < SLOTS
    expert = tl.load(ids_ptr + entry, mask=entry < ENTRIES, other=-1)
    owner = tl.load(owners_ptr + layer * SLOTS + slot, mask=real, other=0)
    age = tl.load(ages_ptr + layer * SLOTS + slot, mask=real, other=0)
    listed = (entry < tl.minimum(tl.load(count_ptr), ENTRIES)) & (expert >= 0)
    row = table_ptr + (layer * EXPERTS + expert) * 2
    cold = tl.load(row, mask=listed, other=0) != HOT
    home = tl.load(row + 1, mask=listed, other=0)
    hits = cold[:, None] & real[None, :] & (expert[:, None] + 1 == owner[None, :])
    hit = tl.max(tl.where(hits, slot[None, :], -1), axis=1)
    missed = cold & (hit < 0)
    # Numbers of one entry as a row and as a column come from the same values, [other, mine].
    before = entry[:, None] < entry[None, :]
    again = before & (expert[:, None] == expert[None, :])
    wanted = missed & (tl.max(again.to(tl.int32), axis=0) == 0)
    turn = tl.sum((before & wanted[:, None]).to(tl.int32), axis=0)
    free = real & (tl.max(hits.to(tl.int32), axis=0) == 0)
    elder = (age[:, None] > age[None, :]) | ((age[:, None] == age[None, :]) & (slot[:, None] < slot[None, :]))
    rank = tl.sum((elder & free[:, None]).to(tl.int32), axis=0)
    into = wanted[:, None] & free[None, :] & (turn[:, None] == rank[None, :])
    keep = tl.max(tl.where(into, slot[None, :], -1), axis=1)
    newcomer = tl.max(tl.where(into, expert[:, None] + 1, 0), axis=0)
    tl.store(owners_ptr + layer * SLOTS + slot, tl.where(newcomer > 0, newcomer, owner), mask=real)
    idle = free & (newcomer == 0)
    tl.store(ages_ptr + layer * SLOTS + slot, tl.where(idle, tl.minimum(age + 1, OLDEST), 0), mask=real)

    misses, every = tl.sum(missed.to(tl.int32), axis=0), tl.sum(listed.to(tl.int32), axis=0)
    missed_before = tl.sum((before & missed[:, None]).to(tl.int32), axis=0)
    listed_before = tl.sum((before & listed[:, None]).to(tl.int32), axis=0)
    # Missed ones, the shared expert, other listed ones, empty ones.
    order = tl.where(listed, 1 + misses + listed_before - missed_before, 1 + every + entry - listed_before)
    order = tl.where(missed, missed_before, order)
    source = tl.where(hit >= 0, KEPT, tl.where(cold, COLD, HOT))
    at, inside = places_ptr + order * COLUMNS, entry < ENTRIES
    tl.store(at, tl.where(listed, entry + 1, 0), mask=inside)
    tl.store(at + 1, tl.where(listed, source, NOTHING), mask=inside)
    tl.store(at + 2, tl.where(hit >= 0, hit, home), mask=inside)
    tl.store(at + 3, keep, mask=inside)
    tl.store(places_ptr + misses * COLUMNS, 0)
    tl.store(places_ptr + misses * COLUMNS + 1, SHARED)
    tl.store(places_ptr + misses * COLUMNS + 2, 0)
    tl.store(places_ptr + misses * COLUMNS + 3, -1)
    numbers = places_ptr + (1 + ENTRIES) * COLUMNS
    tl.store(numbers, misses)
    tl.store(numbers + 1, every)
    tl.store(numbers + 2, 0)
    tl.store(numbers + 3, 0)
    counts = counts_ptr + layer * COUNTED
    tl.store(counts, tl.load(counts) + tl.sum(cold.to(tl.int32), axis=0))
    tl.store(counts + 1, tl.load(counts + 1) + misses)
    tl.store(counts + 2, tl.load(counts + 2) + tl.sum((keep >= 0).to(tl.int32), axis=0))


@triton.jit
def _tile(
    words_ptr, scales_ptr, cold_ptr, records_ptr, source, slot, tile,
    TILES: tl.constexpr, CHUNKS: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Where a program reads its tile: pointers to its words and scales."""
    index = slot * TILES + tile
    record = tl.where(source == COLD, cold_ptr, records_ptr) + slot * RECORD
    words = tl.where(
        source == HOT, words_ptr + index * (CHUNKS * 512), record + (WORDS + tile * (CHUNKS * 512))
    )
    scales = tl.where(
        source == HOT, scales_ptr + index * (CHUNKS * 32), record + (SCALES + tile * (CHUNKS * 32))
    )
    return words, scales


@triton.jit
def _routed_sums(
    words_ptr, scales_ptr, cold_ptr, records_ptr, place, source, tile, rows_ptr, peaks_ptr, row_blocks,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, TOGETHER: tl.constexpr, SPARSE: tl.constexpr, FENCED: tl.constexpr,
    KEPT_FENCED: tl.constexpr, WARPS: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`fp4.tile_sums` of one tile of the expert at a place, copied to its spare slot first where it is to be kept."""
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    slot, keep = tl.load(place + 2).to(tl.int64), tl.load(place + 3).to(tl.int64)
    words, scales = _tile(
        words_ptr, scales_ptr, cold_ptr, records_ptr, source, slot, tile, TILES, CHUNKS, RECORD, WORDS, SCALES
    )
    if keep < 0:
        sums = fp4.tile_sums(
            words, scales, rows_ptr, peaks_ptr, row_blocks, BLOCKS, WARPS, TOGETHER, SPARSE, FENCED
        )
    else:
        own_words, own_scales = _tile(
            words_ptr,
            scales_ptr,
            cold_ptr,
            records_ptr,
            KEPT,
            keep,
            tile,
            TILES,
            CHUNKS,
            RECORD,
            WORDS,
            SCALES,
        )
        fp4.copy_tile(words, scales, own_words, own_scales, BLOCKS, WARPS)
        sums = fp4.tile_sums(
            own_words,
            own_scales,
            rows_ptr,
            peaks_ptr,
            row_blocks,
            BLOCKS,
            WARPS,
            TOGETHER,
            SPARSE,
            KEPT_FENCED,
            True,
        )
    return sums


@triton.jit
def gate_up_tiered(
    rows_ptr,
    words_ptr,
    scales_ptr,
    shared_words_ptr,
    shared_scales_ptr,
    cold_ptr,
    places_ptr,
    weight_ptr,
    slot_ptr,
    _records_ptr,
    hidden_ptr,
    peaks_ptr,
    records_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND: tl.constexpr,
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
    RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`kernels.gate_up` in the order of the places. Grid (TILES, 1 + entries).

    RECORD words of a record, of which gate and up have their words from WORDS on, their scales from SCALES on.
    """
    tile, place = tl.program_id(0), places_ptr + tl.program_id(1) * COLUMNS
    source = tl.load(place + 1)
    if source == NOTHING:
        return
    entry = tl.load(place) - 1
    where = lanes.places(WARPS)
    if source == SHARED:
        sums = shared_sums(
            shared_words_ptr, shared_scales_ptr, tile, rows_ptr, rows_ptr, BLOCKS, SCALED, 0, WARPS
        )
    else:
        sums = _routed_sums(
            words_ptr, scales_ptr, cold_ptr, records_ptr, place, source, tile, rows_ptr, rows_ptr, 4,
            BLOCKS, TILES, 0, False, FENCED, True, WARPS, RECORD, WORDS, SCALES,
        )  # fmt: skip
    store_hidden(
        sums,
        where,
        entry,
        tile,
        weight_ptr,
        slot_ptr,
        hidden_ptr,
        peaks_ptr,
        TILES,
        LIMIT,
        DTYPE,
        ROUND,
        WARPS,
    )


@triton.jit
def routed_down(
    hidden_ptr, peaks_ptr, words_ptr, scales_ptr, cold_ptr, slot_ptr, records_ptr, place, source, entry, tile,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, ROUND: tl.constexpr, FENCED: tl.constexpr, WARPS: tl.constexpr,
    RECORD: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`_routed_sums` of down: the rows are the entry's, and only those that chose its expert are read."""
    warp, g, q = lanes.position(WARPS)
    used = tl.where(tl.load(slot_ptr + entry * 8 + g) >= 0, 4, 0)
    rows_ptr, peaks_ptr = (
        hidden_ptr + (entry + 1) * (8 * 32 * BLOCKS),
        peaks_ptr + (entry + 1) * (8 * 4 * BLOCKS),
    )
    return _routed_sums(
        words_ptr, scales_ptr, cold_ptr, records_ptr, place, source, tile, rows_ptr, peaks_ptr, used,
        BLOCKS, TILES, ROUND, True, FENCED, False, WARPS, RECORD, WORDS, SCALES,
    )  # fmt: skip


@triton.jit
def down_tiered(
    hidden_ptr,
    peaks_ptr,
    words_ptr,
    scales_ptr,
    shared_words_ptr,
    shared_scales_ptr,
    cold_ptr,
    places_ptr,
    slot_ptr,
    _records_ptr,
    partial_ptr,
    records_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
    RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`kernels.down` in the order of the places; as `gate_up_tiered`. Grid (TILES, 1 + entries)."""
    tile, place = tl.program_id(0), places_ptr + tl.program_id(1) * COLUMNS
    source = tl.load(place + 1)
    if source == NOTHING:
        return
    entry = tl.load(place) - 1
    where = lanes.places(WARPS)
    if source == SHARED:
        # Its rows come first.
        sums = shared_sums(
            shared_words_ptr, shared_scales_ptr, tile, hidden_ptr, peaks_ptr, BLOCKS, SCALED, ROUND, WARPS
        )
    else:
        sums = routed_down(
            hidden_ptr, peaks_ptr, words_ptr, scales_ptr, cold_ptr, slot_ptr, records_ptr, place, source, entry, tile,
            BLOCKS, TILES, ROUND, FENCED, WARPS, RECORD, WORDS, SCALES,
        )  # fmt: skip
    store_partial(sums, where, entry, tile, slot_ptr, partial_ptr, TILES, CHOSEN, WARPS)
