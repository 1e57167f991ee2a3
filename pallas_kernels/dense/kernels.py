"""Triton bodies of the dense products.

Knows: which program works on which tile and share of the columns. Does not know: why a matrix is multiplied.

A program is one tile of 32 weight rows and one of SPLITS shares of the columns; its warps split the share further.
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import clear, count_out, wait
from pallas_kernels.device_prefetch import prefetch
from pallas_kernels.register_mma import bf16, fp8, lanes


@triton.jit
def _store(sums, tile, split, out_ptr, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Writes a program's sums to out [SPLITS, 8, 32 * TILES]."""
    channel, row, owner = lanes.places(WARPS)
    first, second = lanes.sum_over_warps(sums, WARPS)
    place = out_ptr + (split * 8 + row) * (32 * TILES) + tile * 32 + channel
    tl.store(place, first, mask=owner)
    tl.store(place + 16, second, mask=owner)


@triton.jit
def fp8_program(
    program,
    rows_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
):
    tile, split = program % TILES, program // TILES
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    index = tile.to(tl.int64)
    rows = rows_ptr + tile // (TILES // GROUPS) * (32 * BLOCKS)
    sums = fp8.tile_sums(
        words_ptr + index * (CHUNKS * 1024),
        scales_ptr + index * (CHUNKS * 2),
        rows,
        rows,
        split * WARPS,
        GROUPS * BLOCKS * 32,
        BLOCKS,
        SPLITS,
        WARPS,
        SCALED,
        0,
        BFLOAT,
        TERMS,
        FENCED,
        False,
    )
    _store(sums, tile, split, out_ptr, TILES, WARPS)


@triton.jit
def prefetch_fp8(
    program, words_ptr, BLOCKS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Asks for the words that `fp8_program` of the same number reads, from its turn FIRST on."""
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    tile, split = program % TILES, program // TILES
    words = words_ptr + tile.to(tl.int64) * (CHUNKS * 1024)
    for turn in tl.static_range(FIRST, (CHUNKS + SPLITS * WARPS - 1) // (SPLITS * WARPS)):
        first = (turn * SPLITS + split) * WARPS
        chunks = tl.minimum(CHUNKS - first, WARPS)
        if chunks > 0:
            prefetch(words + first * 1024, chunks * 4096)


@triton.jit
def waiting_fp8_program(
    program,
    rows_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    counters,
    LINE: tl.constexpr,
    ARRIVALS: tl.constexpr,
    waiters,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """`fp8_program` of rows that ARRIVALS programs of smaller numbers write, which then arrive at LINE.

    Meanwhile HELD halves (0, 1 or 2) of the weights of its first turn, if that is a whole one, come into registers, the
    rest into the second-level cache. `waiters`: how many programs wait at the line.
    """
    tile, split = program % TILES, program // TILES
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    words = words_ptr + tile.to(tl.int64) * (CHUNKS * 1024)
    scales = scales_ptr + tile.to(tl.int64) * (CHUNKS * 2)
    HALVES: tl.constexpr = HELD if BLOCKS >= 4 * SPLITS * WARPS else 0
    held = None
    if HALVES:
        held = fp8.held_turn(words, scales, split * WARPS, HALVES, WARPS)
    prefetch_fp8(program, words_ptr, BLOCKS, TILES, SPLITS, WARPS, 1 if HALVES else 0)
    behind = wait(counters, LINE, ARRIVALS)
    before = count_out(counters, LINE)
    rows = rows_ptr + behind
    sums = fp8.tile_sums(
        words + behind, scales, rows, rows, split * WARPS, BLOCKS * 32,
        BLOCKS, SPLITS, WARPS, SCALED, 0, BFLOAT, TERMS, False, False, held,
    )  # fmt: skip
    _store(sums, tile, split, out_ptr, TILES, WARPS)
    clear(counters, LINE, waiters, before)


@triton.jit
def walking_fp8_program(
    program,
    rows_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    counters,
    LINE: tl.constexpr,
    ARRIVALS: tl.constexpr,
    waiters,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    EACH: tl.constexpr,
    WARPS: tl.constexpr,
):
    """`fp8_program` of EACH tiles, one after the other, of a share of their columns that is a turn of all warps.

    A tile's weights come into registers while the one before is multiplied, and the rows stay there. So few programs,
    all there from a launch's start, ask the memory for something all the time. With ARRIVALS as
    `waiting_fp8_program`: the first tile's weights come while the program waits.
    """
    CHUNKS: tl.constexpr = BLOCKS // 4
    STEPS: tl.constexpr = TILES // EACH
    tile, split = program % STEPS * EACH, program // STEPS
    words = words_ptr + tile.to(tl.int64) * (CHUNKS * 1024)
    scales = scales_ptr + tile.to(tl.int64) * (CHUNKS * 2)
    ahead = fp8.held_turn(words, scales, split * WARPS, 2, WARPS)
    rows = rows_ptr + tile // (TILES // GROUPS) * (32 * BLOCKS)
    if ARRIVALS:
        rows += wait(counters, LINE, ARRIVALS)
        before = count_out(counters, LINE)
    for place in range(EACH):
        words += CHUNKS * 1024
        scales += CHUNKS * 2
        there = program * 0 + (EACH - 1 - place)  # above 0 while there is a next tile
        sums = lanes.zero_sums(WARPS)
        following = ()
        for half in tl.static_range(2):
            sums = fp8.add_half_turn(
                sums, ahead[half], rows, split * WARPS, half, GROUPS * BLOCKS * 32, WARPS, SCALED, BFLOAT, TERMS
            )  # fmt: skip
            following = following + (fp8.half_turn(words, scales, split * WARPS, half, there, WARPS),)
        ahead = following
        _store(sums, tile + place, split, out_ptr, TILES, WARPS)
        tl.debug_barrier()  # the shared memory of sums is used again
    if ARRIVALS:
        clear(counters, LINE, waiters, before)


@triton.jit
def _bf16_program(
    program,
    rows_ptr,
    weight_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    TERMS: tl.constexpr,
    WARPS: tl.constexpr,
):
    tile, split = program % TILES, program // TILES
    weight_ptr += tile.to(tl.int64) * (32 * COLUMNS)
    sums = bf16.tile_sums(weight_ptr, rows_ptr, split * WARPS, COLUMNS, SPLITS, WARPS, TERMS)
    _store(sums, tile, split, out_ptr, TILES, WARPS)


@triton.jit
def waiting_bf16_program(
    program,
    rows_ptr,
    weight_ptr,
    out_ptr,
    counters,
    LINE: tl.constexpr,
    ARRIVALS: tl.constexpr,
    waiters,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    TERMS: tl.constexpr,
    HELD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """`_bf16_program` of rows that others write, as `waiting_fp8_program`; HELD says whether to hold its first turn."""
    tile, split = program % TILES, program // TILES
    weight_ptr += tile.to(tl.int64) * (32 * COLUMNS)
    held = None
    if HELD and COLUMNS >= 64 * SPLITS * WARPS:
        held = bf16.held_turn(weight_ptr, split * WARPS, COLUMNS, WARPS)
    behind = wait(counters, LINE, ARRIVALS)
    before = count_out(counters, LINE)
    sums = bf16.tile_sums(
        weight_ptr + behind, rows_ptr + behind, split * WARPS, COLUMNS, SPLITS, WARPS, TERMS, held
    )
    _store(sums, tile, split, out_ptr, TILES, WARPS)
    clear(counters, LINE, waiters, before)


@triton.jit
def fp8_product(
    rows_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BFLOAT: tl.constexpr,
    TERMS: tl.constexpr,
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """out[s] = rows W^T over share s of the columns; rows 16-bit [TERMS, 8, GROUPS * 32 * BLOCKS].

    out float32 [SPLITS, 8, 32 * TILES]. The tiles form GROUPS, each with its own columns of the rows. SCALED: block
    of the weight scales, 128 or 32. BFLOAT: the rows are bf16. FENCED:
    keep weight loads together. Grid (TILES * SPLITS,).
    """
    fp8_program(
        tl.program_id(0), rows_ptr, words_ptr, scales_ptr, out_ptr,
        BLOCKS, TILES, GROUPS, SPLITS, SCALED, BFLOAT, TERMS, FENCED, WARPS,
    )  # fmt: skip


@triton.jit
def bf16_product(
    rows_ptr,
    weight_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    TERMS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """out[s] = rows W^T over share s of the columns; rows bf16 [TERMS, 8, COLUMNS], weight [32 * TILES, COLUMNS].

    out float32 [SPLITS, 8, 32 * TILES]. Grid (TILES * SPLITS,).
    """
    _bf16_program(tl.program_id(0), rows_ptr, weight_ptr, out_ptr, COLUMNS, TILES, SPLITS, TERMS, WARPS)
