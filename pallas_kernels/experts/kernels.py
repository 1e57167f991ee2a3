"""Triton bodies of the two expert launches.

Knows: which program works on which tile of which expert, and the arithmetic around the products. Does not know:
how experts were chosen, or how the partial outputs are summed.

A program is one tile (32 weight rows) of one entry of the expert list; entry -1 is the shared expert, whose FP8
tiles are twice as long and therefore start first. Programs of empty entries exit at once. Where rows divide into whole
turns of all warps, down has another form (`walking_kernels`): few programs that walk over many tiles.

The FP8 rounding of the hidden rows happens where down loads them: a scale needs 128 channels, and those come from
eight gate-and-up programs, which would have to wait for each other. They leave the largest of each eight channels
beside the rows, so that a quad of down's lanes finds a block's scale with one load and two shuffles. For this late
rounding to act as if it had seen the unrounded numbers, the rows are kept in fp16 rounded to odd: the last bit is
set where bits were lost, which keeps them on the right side of every tie. They carry HIDDEN_GAIN, with which every
rounded value is an fp16 number.
"""

import triton
import triton.language as tl

from pallas_kernels.device_numbers import rounded
from pallas_kernels.register_mma import fp4, fp8, lanes


@triton.jit
def _listed(ids_ptr, count_ptr, entry):
    """The expert of an entry of the list, -1 past its end; 0 for the shared expert's entry, -1."""
    expert = tl.load(ids_ptr + entry, mask=entry >= 0, other=0)
    return tl.where(entry < tl.load(count_ptr), expert, -1).to(tl.int64)


@triton.jit
def _sticky_half(x):
    """float32 to fp16, rounded to odd; `reference.sticky_half`."""
    near = x.to(tl.float16)
    wide = near.to(tl.float32)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    bits -= (tl.abs(wide) > tl.abs(x)).to(tl.int32)
    bits |= (wide != x).to(tl.int32)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def shared_sums(
    words_ptr,
    scales_ptr,
    tile,
    rows_ptr,
    peaks_ptr,
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The sums of one tile of the shared expert's FP8 weights, of rows rounded by ROUND columns (0: as they are)."""
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    words, scales = words_ptr + tile * (CHUNKS * 1024), scales_ptr + tile * (CHUNKS * 2)
    return fp8.tile_sums(
        words,
        scales,
        rows_ptr,
        peaks_ptr,
        0,
        32 * BLOCKS,
        BLOCKS,
        1,
        WARPS,
        SCALED,
        ROUND,
        False,
        1,
        True,
        True,
    )


@triton.jit
def store_hidden(
    sums,
    where,
    entry,
    tile,
    weight_ptr,
    slot_ptr,
    hidden_ptr,
    peaks_ptr,
    TILES: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The hidden rows of one tile of an entry (-1: the shared expert), and their peaks; `where`: its `lanes.places`."""
    channel, row, owner = where
    gain = tl.where(entry < 0, 1.0, fp4.GAIN)
    gate, up = lanes.sum_over_warps(sums, WARPS)
    gate, up = rounded(gate * gain, DTYPE), rounded(up * gain, DTYPE)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    routes = tl.maximum(entry, 0) * 8 + row
    weight = tl.where(entry < 0, 1.0, tl.load(weight_ptr + routes))
    used = (tl.load(slot_ptr + routes) >= 0) | (entry < 0)
    hidden = rounded(gate / (1.0 + tl.exp(-gate)) * up * weight, DTYPE) * lanes.HIDDEN_GAIN
    if ROUND:
        hidden = _sticky_half(hidden)
    else:
        hidden = hidden.to(tl.float16)
    place = ((entry + 1) * 8 + row) * (16 * TILES) + tile * 16 + channel
    tl.store(hidden_ptr + place, hidden, mask=owner & used)
    warp, g, q = lanes.position(WARPS)
    size = hidden.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    peak = lanes.peak_of_channels(size).to(tl.int16).to(tl.float16, bitcast=True)
    place = ((entry + 1) * 8 + row) * (2 * TILES) + tile * 2 + channel // 8
    tl.store(peaks_ptr + place, peak, mask=owner & used & (g == 0))


@triton.jit
def store_partial(
    sums,
    where,
    entry,
    tile,
    slot_ptr,
    partial_ptr,
    TILES: tl.constexpr,
    CHOSEN: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The partial outputs of one tile of an entry (-1: the shared expert); `where`: its `lanes.places`."""
    channel, row, owner = where
    routes = tl.maximum(entry, 0) * 8
    gain = tl.where(entry < 0, 1.0, fp4.GAIN) / lanes.HIDDEN_GAIN
    pair = lanes.sum_over_warps(sums, WARPS)
    slot = tl.where(entry < 0, CHOSEN, tl.load(slot_ptr + routes + row))
    _store_pair(pair, gain, where, slot, tile, partial_ptr, TILES, CHOSEN)


@triton.jit
def store_partial_at(
    sums, slot, tile, partial_ptr, TILES: tl.constexpr, CHOSEN: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """`store_partial` of a listed entry whose slots in the rows of `lanes.places` are known."""
    pair, gain = lanes.sum_over_warps(sums, WARPS), fp4.GAIN / lanes.HIDDEN_GAIN
    _store_pair(pair, gain, lanes.places(WARPS), slot, tile, partial_ptr, TILES, CHOSEN)


@triton.jit
def _store_pair(
    pair, gain, where, slot, tile, partial_ptr, TILES: tl.constexpr, CHOSEN: tl.constexpr
):  # fmt: skip
    channel, row, owner = where
    first, second = pair
    place = partial_ptr + (row * (CHOSEN + 1) + slot) * (32 * TILES) + tile * 32 + channel
    used = owner & (slot >= 0)
    DTYPE: tl.constexpr = partial_ptr.dtype.element_ty
    tl.store(place, rounded(first * gain, DTYPE).to(DTYPE), mask=used)
    tl.store(place + 16, rounded(second * gain, DTYPE).to(DTYPE), mask=used)


@triton.jit
def gate_up(
    rows_ptr,
    words_ptr,
    scales_ptr,
    shared_words_ptr,
    shared_scales_ptr,
    ids_ptr,
    count_ptr,
    weight_ptr,
    slot_ptr,
    hidden_ptr,
    peaks_ptr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND: tl.constexpr,
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """hidden[1 + entry] = silu(min(gate, LIMIT)) * clip(up, -LIMIT, LIMIT) * routing weight, for its routed rows.

    rows fp16 [8, 32 * BLOCKS]; hidden fp16 [1 + entries, 8, 16 * TILES], entry 0 of it the shared expert's; peaks
    fp16 [1 + entries, 8, 2 * TILES], the largest size of each 8 channels. A tile is 16 gate rows and the 16 up rows
    of the same channels. Grid (TILES, 1 + entries).
    """
    tile, entry = tl.program_id(0), tl.program_id(1) - 1
    expert = _listed(ids_ptr, count_ptr, entry)
    if expert < 0:
        return
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    index = expert * TILES + tile
    where = lanes.places(WARPS)
    if entry < 0:
        sums = shared_sums(
            shared_words_ptr, shared_scales_ptr, index, rows_ptr, rows_ptr, BLOCKS, SCALED, 0, WARPS
        )
    else:
        sums = fp4.tile_sums(
            words_ptr + index * (CHUNKS * 512),
            scales_ptr + index * (CHUNKS * 32),
            rows_ptr,
            rows_ptr,
            4,
            BLOCKS,
            WARPS,
            0,
            False,
            FENCED,
        )
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
    FENCED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """partial[row, slot of this entry] = hidden W2^T of the entry's routed rows; the shared expert's slot is CHOSEN.

    hidden fp16 [1 + entries, 8, 32 * BLOCKS] times HIDDEN_GAIN, with its peaks; partial [8, CHOSEN + 1, 32 * TILES].
    ROUND columns of a hidden row share a scale of its FP8 rounding, 0 for none. Grid (TILES, 1 + entries).
    """
    tile, entry = tl.program_id(0), tl.program_id(1) - 1
    expert = _listed(ids_ptr, count_ptr, entry)
    if expert < 0:
        return
    CHUNKS: tl.constexpr = (BLOCKS + 3) // 4
    index = expert * TILES + tile
    rows_ptr = hidden_ptr + (entry + 1) * (8 * 32 * BLOCKS)
    peaks_ptr += (entry + 1) * (8 * 4 * BLOCKS)
    where = lanes.places(WARPS)
    warp, g, q = lanes.position(WARPS)
    routes = tl.maximum(entry, 0) * 8
    if entry < 0:
        sums = shared_sums(
            shared_words_ptr, shared_scales_ptr, index, rows_ptr, peaks_ptr, BLOCKS, SCALED, ROUND, WARPS
        )
    else:
        sums = fp4.tile_sums(
            words_ptr + index * (CHUNKS * 512),
            scales_ptr + index * (CHUNKS * 32),
            rows_ptr,
            peaks_ptr,
            tl.where(tl.load(slot_ptr + routes + g) >= 0, 4, 0),
            BLOCKS,
            WARPS,
            ROUND,
            True,
            FENCED,
        )
    store_partial(sums, where, entry, tile, slot_ptr, partial_ptr, TILES, CHOSEN, WARPS)
