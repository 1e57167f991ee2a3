"""Triton bodies of the head.

Knows: how the best of a tile's 32 tokens is found per row, and of all tiles. Does not know: sampling.

A tile's winner is one 64-bit number: the logit's bits in an order-preserving form above the complement of the token
id, so that the largest is the best logit and, among equals, the lowest id.
"""

import triton
import triton.language as tl

from pallas_kernels.register_mma import bf16, lanes

_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ordered(x):
    """Bits of float32 x as int32 in the order of the numbers, -0 as +0; applied to those bits it inverts itself."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LAST)


@triton.jit
def tile_winners(
    rows_ptr,
    weight_ptr,
    winners_ptr,
    logits_ptr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    LOGITS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """winners int32 [8, tiles, 2]: ordered bits of a tile's best logit, and the last number minus its token id.

    rows bf16 [TERMS, 8, COLUMNS]; weight bf16 [32 * tiles, COLUMNS]; logits float32 [8, 32 * tiles], written if LOGITS.
    Grid (tiles,).
    """
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    weight_ptr += tile.to(tl.int64) * (32 * COLUMNS)
    sums = bf16.tile_sums(weight_ptr, rows_ptr, 0, COLUMNS, 1, WARPS, TERMS)
    first, second = lanes.sum_over_warps(sums, WARPS)
    channel, row, owner = lanes.places(WARPS)
    token = tile * 32 + channel
    if LOGITS:
        place = logits_ptr + row * (32 * tiles) + token
        tl.store(place, first, mask=owner)
        tl.store(place + 16, second, mask=owner)
    token = tl.where(second > first, token + 16, token)
    key = (_ordered(tl.maximum(first, second)).to(tl.int64) << 32) | (0 - token + _LAST).to(tl.int64)
    # Threads are [copies of four warps, row / 8 of the tile, parity of the activation row, g, q].
    key = tl.max(tl.reshape(key, (WARPS // 4, 2, 2, 8, 4)), 3)
    key = tl.max(tl.max(key, 1), 0)
    row = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 4)[None, :]
    place = winners_ptr + (row * tiles + tile) * 2
    tl.store(place, (key >> 32).to(tl.int32))
    tl.store(place + 1, (key & _LAST).to(tl.int32))


@triton.jit
def winners(
    tiles_ptr,
    token_ptr,
    logit_ptr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """The best of a row's TILES winners: token int32 [8] and logit float32 [8]. Grid (8,).

    A winner is a pair of int32 as `tile_winners` writes it; rows, tiles and the parts of a pair lie ROW, TILE and PART
    numbers apart.
    """
    row = tl.program_id(0)
    tile = tl.arange(0, PADDED)
    place = tiles_ptr + row * ROW + tile * TILE
    order = tl.load(place, mask=tile < TILES, other=-0x80000000)
    rest = tl.load(place + PART, mask=tile < TILES, other=0)
    best = tl.max((order.to(tl.int64) << 32) | rest.to(tl.int64), 0)
    order = (best >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & _LAST)
    tl.store(token_ptr + row, _LAST - (best & _LAST).to(tl.int32))
    tl.store(logit_ptr + row, bits.to(tl.float32, bitcast=True))
