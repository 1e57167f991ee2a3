"""The output projection of attention in Triton.

Knows: how the programs of one launch share both products. Does not know: shapes of a model, or how the launch is made
(`fused`).

    programs of the first product   a tile of 32 rows and a share of the columns; whoever is the last of a rounding
                                    block adds its shares up, rounds them and leaves the block of the latent
    programs of the second          weights under way while they wait for all blocks, then a tile and a share each

The programs of the second product start as those of the first end, so that the memory is never idle in between.
"""

import triton
import triton.language as tl

from pallas_kernels.dense.kernels import fp8_program, waiting_fp8_program, walking_fp8_program
from pallas_kernels.device_barrier import LINE, arrive, is_last
from pallas_kernels.device_numbers import round_activations, rounded
from pallas_kernels.device_tiles import partial_sum

LATCH = tl.constexpr(0)  # line of the latch between both products; tickets of blocks are the words behind it


@triton.jit
def finish_block(
    partial_ptr, out_ptr, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    DTYPE: tl.constexpr, ROUND: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Adds a block's shares of the columns, rounds the sums to DTYPE and, with ROUND, as activations of one block.

    partial float32 [SPLITS, 8, WIDTH]; out [TERMS, 8, WIDTH], of which the BLOCK columns from block * BLOCK are
    written; two terms are those of `dense.packing.half_terms`.
    """
    place = tl.arange(0, 8)[:, None] * WIDTH + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = rounded(partial_sum(partial_ptr, place, place >= 0, SPLITS, 8 * WIDTH), DTYPE)
    if ROUND:
        total = round_activations(total, 1)
    if TERMS == 2:
        upper = (total.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        tl.store(out_ptr + 8 * WIDTH + place, (total - upper).to(tl.float16))
        total = upper
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty))


@triton.jit
def output_projection(
    heads_ptr, words_ptr, scales_ptr, second_words_ptr, second_scales_ptr, counters_in,
    out_ptr, latent_ptr, partial_ptr, counters,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, BFLOAT: tl.constexpr,
    TERMS: tl.constexpr, SECOND_TILES: tl.constexpr, SECOND_SPLITS: tl.constexpr, SECOND_BFLOAT: tl.constexpr,
    SECOND_TERMS: tl.constexpr, SCALED: tl.constexpr, JOINED: tl.constexpr, DTYPE: tl.constexpr,
    ROUND: tl.constexpr, HELD: tl.constexpr, EACH: tl.constexpr, SECOND_EACH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """out[s] = the second product over share s of the latent's columns, float32 [SECOND_SPLITS, 8, ...].

    heads 16-bit [TERMS, 8, GROUPS * 32 * BLOCKS]; JOINED tiles of the first product form a rounding block. HELD as in
    `waiting_fp8_program`. EACH and SECOND_EACH tiles of a program, as `walking_fp8_program` if more than one; EACH
    divides JOINED. Grid (TILES / EACH * SPLITS + SECOND_TILES / SECOND_EACH * SECOND_SPLITS,).
    """
    program = tl.program_id(0)
    FIRST: tl.constexpr = TILES // EACH * SPLITS
    if program < FIRST:
        if EACH > 1:
            walking_fp8_program(
                program, heads_ptr, words_ptr, scales_ptr, partial_ptr, counters, LATCH, 0, 0,
                BLOCKS, TILES, GROUPS, SPLITS, SCALED, BFLOAT, TERMS, EACH, WARPS,
            )  # fmt: skip
        else:
            fp8_program(
                program, heads_ptr, words_ptr, scales_ptr, partial_ptr,
                BLOCKS, TILES, GROUPS, SPLITS, SCALED, BFLOAT, TERMS, False, WARPS,
            )  # fmt: skip
        block = program % (TILES // EACH) * EACH // JOINED
        if is_last(counters + LINE + block, 0, JOINED // EACH * SPLITS):
            finish_block(
                partial_ptr, latent_ptr, block, 32 * TILES, 32 * JOINED, SPLITS, DTYPE, ROUND, SECOND_TERMS
            )
            arrive(counters, LATCH)
    elif SECOND_EACH > 1:
        walking_fp8_program(
            program - FIRST, latent_ptr, second_words_ptr, second_scales_ptr, out_ptr, counters, LATCH,
            TILES // JOINED, SECOND_TILES // SECOND_EACH * SECOND_SPLITS, TILES, SECOND_TILES, 1, SECOND_SPLITS,
            SCALED, SECOND_BFLOAT, SECOND_TERMS, SECOND_EACH, WARPS,
        )  # fmt: skip
    else:
        waiting_fp8_program(
            program - FIRST, latent_ptr, second_words_ptr, second_scales_ptr, out_ptr, counters, LATCH,
            TILES // JOINED, SECOND_TILES * SECOND_SPLITS, TILES, SECOND_TILES, SECOND_SPLITS, SCALED,
            SECOND_BFLOAT, SECOND_TERMS, HELD, WARPS,
        )  # fmt: skip
