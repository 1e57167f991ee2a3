"""Down for experts in two memories by few programs, each of which walks over many tiles.

Knows: which program fetches, which tiles are whose, and where they lie. Does not know: the arithmetic around the
products, how a missed tile is fetched (`tier_kernels`), or the steps of a walk (`walking_kernels`).

The link is slow, and few programs saturate it: as long as something is missed, some programs do nothing but that, and
the others share what lies on the device, as if there were nothing else.
"""

import triton
import triton.language as tl

from pallas_kernels.device_tiles import loop_bound
from pallas_kernels.experts.kernels import store_partial, store_partial_at
from pallas_kernels.experts.tier_kernels import COLUMNS, HOT, routed_down
from pallas_kernels.experts.walking_kernels import entry_rows, shared_tiles
from pallas_kernels.register_mma import fp4, lanes


@triton.jit
def _part(
    places_ptr, ENTRIES: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr, FETCHERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """How many experts are missed, and where the part of the other work begins and ends that is this program's.

    Those that fetch come before all others; their part means nothing.
    """
    numbers = places_ptr + (1 + ENTRIES) * COLUMNS
    missed, listed = tl.load(numbers), tl.load(numbers + 1)
    fetchers = tl.where(missed > 0, FETCHERS, 0)
    program, programs = tl.program_id(0) - fetchers, PROGRAMS - fetchers
    work = SHARED + (listed - missed) * TILES
    return missed, program * work // programs, (program + 1) * work // programs


@triton.jit
def _lies(place):
    """Where the expert at a place on the device lies: its slot if it is hot, minus one minus its slot if it is kept."""
    slot = tl.load(place + 2)
    return tl.where(tl.load(place + 1) == HOT, slot, -1 - slot)


@triton.jit
def _tile(
    words_ptr, scales_ptr, records_ptr, lies, tile,
    TILES: tl.constexpr, CHUNKS: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Pointers to the words and scales of a tile of the expert that lies there."""
    hot = lies >= 0
    slot = tl.where(hot, lies, -1 - lies)
    word = slot * tl.where(hot, TILES * CHUNKS * 512, RECORD) + tile * (CHUNKS * 512)
    scale = slot * tl.where(hot, TILES * CHUNKS * 32, RECORD) + tile * (CHUNKS * 32)
    words = tl.where(hot, words_ptr, records_ptr + WORDS) + word
    return words, tl.where(hot, scales_ptr, records_ptr + SCALES) + scale


@triton.jit
def _missed_tiles(
    missed, hidden_ptr, peaks_ptr, words_ptr, scales_ptr, cold_ptr, places_ptr, slot_ptr, partial_ptr, records_ptr,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, CHOSEN: tl.constexpr, ROUND: tl.constexpr, FENCED: tl.constexpr,
    FETCHERS: tl.constexpr, WARPS: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Every FETCHERS-th tile of the missed experts."""
    where = lanes.places(WARPS)
    for number in range(loop_bound(tl.program_id(0)), loop_bound(missed * TILES), FETCHERS):
        place, tile = places_ptr + number // TILES * COLUMNS, number % TILES
        entry, source = tl.load(place) - 1, tl.load(place + 1)
        sums = routed_down(
            hidden_ptr, peaks_ptr, words_ptr, scales_ptr, cold_ptr, slot_ptr, records_ptr, place, source, entry, tile,
            BLOCKS, TILES, ROUND, FENCED, WARPS, RECORD, WORDS, SCALES,
        )  # fmt: skip
        store_partial(sums, where, entry, tile, slot_ptr, partial_ptr, TILES, CHOSEN, WARPS)
        tl.debug_barrier()  # the shared memory of sums is used again


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
    ENTRIES: tl.constexpr,
    SHARED_COST: tl.constexpr,
    FETCHERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`tier_kernels.down_tiered` by PROGRAMS programs, as `walking_kernels.down`.

    If something is missed, the first FETCHERS programs do these experts' tiles in turn. All others, if nothing is
    missed all programs, have equal parts of the rest. Whoever has tiles of the shared expert and others does the shared
    ones first: nothing but the others' loops is then to be kept in registers that these need. Grid (PROGRAMS,).
    """
    CHUNKS: tl.constexpr = BLOCKS // 4
    TURNS: tl.constexpr = CHUNKS // WARPS
    SHARED: tl.constexpr = SHARED_COST * TILES
    missed, begin, end = _part(places_ptr, ENTRIES, TILES, SHARED, FETCHERS, PROGRAMS)
    if (missed > 0) & (tl.program_id(0) < FETCHERS):
        _missed_tiles(
            missed, hidden_ptr, peaks_ptr, words_ptr, scales_ptr, cold_ptr, places_ptr, slot_ptr, partial_ptr,
            records_ptr, BLOCKS, TILES, CHOSEN, ROUND, FENCED, FETCHERS, WARPS, RECORD, WORDS, SCALES,
        )  # fmt: skip
        return
    shared_tiles(
        begin, end, hidden_ptr, peaks_ptr, shared_words_ptr, shared_scales_ptr, slot_ptr, partial_ptr,
        BLOCKS, TILES, CHOSEN, SCALED, ROUND, SHARED_COST, WARPS,
    )  # fmt: skip

    # Other tiles are numbered from the first place on: they lie behind those of missed experts and of the shared one.
    before = (missed + 1) * TILES
    begin, end = before + tl.maximum(begin - SHARED, 0), before + tl.maximum(end - SHARED, 0)
    row = lanes.places(WARPS)[1]
    lies = _lies(places_ptr + tl.minimum(begin // TILES, ENTRIES) * COLUMNS)
    words, scales = _tile(
        words_ptr, scales_ptr, records_ptr, lies, begin % TILES, TILES, CHUNKS, RECORD, WORDS, SCALES
    )
    ahead = ()
    for turn in tl.static_range(TURNS):
        ahead = ahead + (fp4.turn_weights(words, scales, turn, WARPS),)
    while begin < end:  # all it has of one expert
        number = begin // TILES
        own = _lies(places_ptr + number * COLUMNS)
        behind = _lies(places_ptr + tl.minimum(number + 1, ENTRIES) * COLUMNS)
        entry = tl.load(places_ptr + number * COLUMNS) - 1
        slot = tl.load(slot_ptr + entry * 8 + row)
        rows = entry_rows(hidden_ptr, peaks_ptr, entry, BLOCKS, WARPS, ROUND)
        stop = tl.minimum(end, (number + 1) * TILES)
        for index in range(loop_bound(begin), loop_bound(stop)):
            # Behind its last tile a program reads that one again, as in `walking_kernels`.
            following = tl.minimum(index + 1, end - 1)
            lies = tl.where(following < stop, own, behind)
            words, scales = _tile(
                words_ptr,
                scales_ptr,
                records_ptr,
                lies,
                following % TILES,
                TILES,
                CHUNKS,
                RECORD,
                WORDS,
                SCALES,
            )
            sums = lanes.zero_sums(WARPS)
            coming = ()
            for turn in tl.static_range(TURNS):
                sums = fp4.add_turn(sums, ahead[turn], rows[turn])
                coming = coming + (fp4.turn_weights(words, scales, turn, WARPS),)
            ahead = coming
            store_partial_at(sums, slot, index % TILES, partial_ptr, TILES, CHOSEN, WARPS)
            tl.debug_barrier()
        begin = stop
