"""Down by few programs, each of which walks over many tiles.

Knows: which tiles are whose, and what comes into registers when. Does not know: the arithmetic around the products, or
the other form of the same launch, one program a tile (`kernels`), whose bits it gives; or experts in two memories
(`walking_tier_kernels`), over whose tiles programs walk in the same steps.

Down reads as many bytes of rows as of weights if every tile has them for itself, and rounds them each time. Here a
program keeps an expert's rows, loaded and rounded once, while its tiles pass by.
"""

import triton
import triton.language as tl

from pallas_kernels.device_tiles import loop_bound
from pallas_kernels.experts.kernels import shared_sums, store_partial
from pallas_kernels.register_mma import fp4, lanes


@triton.jit
def _part(count_ptr, TILES: tl.constexpr, SHARED: tl.constexpr, PROGRAMS: tl.constexpr):
    """How many experts are listed, and where this program's part of the work begins and ends."""
    count = tl.load(count_ptr)
    program, work = tl.program_id(0), SHARED + count * TILES
    return count, program * work // PROGRAMS, (program + 1) * work // PROGRAMS


@triton.jit
def _turn_weights(
    words_ptr, scales_ptr, index, turn: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr
):
    """Weights and scales of a turn of the tile with this number."""
    return fp4.turn_weights(
        words_ptr + index * (CHUNKS * 512), scales_ptr + index * (CHUNKS * 32), turn, WARPS
    )


@triton.jit
def entry_rows(
    hidden_ptr, peaks_ptr, entry, BLOCKS: tl.constexpr, WARPS: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    """The rows of an entry for all turns of its tiles, rounded."""
    rows_ptr = hidden_ptr + (entry + 1) * (8 * 32 * BLOCKS)
    peaks_ptr += (entry + 1) * (8 * 4 * BLOCKS)
    rows = ()
    for turn in tl.static_range(BLOCKS // (4 * WARPS)):
        rows = rows + (fp4.turn_rows(rows_ptr, peaks_ptr, turn, BLOCKS, WARPS, ROUND),)
    return rows


@triton.jit
def shared_tiles(
    begin, end, hidden_ptr, peaks_ptr, shared_words_ptr, shared_scales_ptr, slot_ptr, partial_ptr,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, CHOSEN: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr,
    SHARED_COST: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The shared expert's tiles in a part of the work, from `begin` to `end`: those whose first unit lies in it."""
    SHARED: tl.constexpr = SHARED_COST * TILES
    where = lanes.places(WARPS)
    first = (tl.minimum(begin, SHARED) + SHARED_COST - 1) // SHARED_COST
    last = (tl.minimum(end, SHARED) + SHARED_COST - 1) // SHARED_COST
    for tile in range(loop_bound(first), loop_bound(last)):
        sums = shared_sums(
            shared_words_ptr, shared_scales_ptr, tile, hidden_ptr, peaks_ptr, BLOCKS, SCALED, ROUND, WARPS
        )
        store_partial(sums, where, -1, tile, slot_ptr, partial_ptr, TILES, CHOSEN, WARPS)
        tl.debug_barrier()  # the shared memory of sums is used again


@triton.jit
def down(
    hidden_ptr,
    peaks_ptr,
    words_ptr,
    scales_ptr,
    shared_words_ptr,
    shared_scales_ptr,
    ids_ptr,
    count_ptr,
    slot_ptr,
    partial_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    ENTRIES: tl.constexpr,
    SHARED_COST: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """`kernels.down` by PROGRAMS programs that are all there from the start; BLOCKS fills whole turns of all warps.

    All have equal parts of the work: the shared expert's tiles, of which each counts as SHARED_COST others, then those
    of the listed experts. A listed expert's tile comes into registers while the one before is multiplied. Whoever has
    tiles of both does the listed expert's first. Grid (PROGRAMS,).
    """
    CHUNKS: tl.constexpr = BLOCKS // 4
    TURNS: tl.constexpr = CHUNKS // WARPS
    SHARED: tl.constexpr = SHARED_COST * TILES
    where = lanes.places(WARPS)
    count, begin, end = _part(count_ptr, TILES, SHARED, PROGRAMS)
    begin, end = tl.maximum(begin - SHARED, 0), tl.maximum(end - SHARED, 0)
    entry = begin // TILES
    expert = tl.load(ids_ptr + entry, mask=entry < count, other=0)
    ahead = ()
    for turn in tl.static_range(TURNS):
        index = expert * TILES + begin % TILES
        ahead = ahead + (_turn_weights(words_ptr, scales_ptr, index, turn, CHUNKS, WARPS),)
    for entry in range(loop_bound(begin // TILES), loop_bound((end + TILES - 1) // TILES)):
        own = tl.load(ids_ptr + entry) * TILES
        behind = tl.load(ids_ptr + tl.minimum(entry + 1, ENTRIES - 1)) * TILES
        rows = entry_rows(hidden_ptr, peaks_ptr, entry, BLOCKS, WARPS, ROUND)
        left = end - entry * TILES
        first = tl.maximum(begin - entry * TILES, 0)
        for tile in range(loop_bound(first), loop_bound(tl.minimum(left, TILES))):
            # Behind its last tile a program reads that one again: loads on a condition need registers that a second
            # program on the processor would miss.
            following = tl.where(tile + 1 < TILES, own + tile + 1, behind)
            following = tl.where(tile + 1 < left, following, own + tile)
            sums = lanes.zero_sums(WARPS)
            coming = ()
            for turn in tl.static_range(TURNS):
                sums = fp4.add_turn(sums, ahead[turn], rows[turn])
                coming = coming + (_turn_weights(words_ptr, scales_ptr, following, turn, CHUNKS, WARPS),)
            ahead = coming
            store_partial(sums, where, entry, tile, slot_ptr, partial_ptr, TILES, CHOSEN, WARPS)
            tl.debug_barrier()

    # Worked out again: the loops above need the registers.
    count, begin, end = _part(count_ptr, TILES, SHARED, PROGRAMS)
    shared_tiles(
        begin, end, hidden_ptr, peaks_ptr, shared_words_ptr, shared_scales_ptr, slot_ptr, partial_ptr,
        BLOCKS, TILES, CHOSEN, SCALED, ROUND, SHARED_COST, WARPS,
    )  # fmt: skip
