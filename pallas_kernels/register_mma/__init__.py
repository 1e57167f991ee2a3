"""Building blocks of the weight-streaming kernels: Triton used as a language of single threads.

Knows: how one warp multiplies a tile of 32 weight rows with 8 activation rows entirely in registers, for FP4,
FP8 and BF16 weights, and how warps that split the columns add up. Does not know: what a matrix is for, where
tiles lie in an arena (`pallas_kernels.tiles` packs them), or what happens to the sums.

Every tensor here has shape [32 * warps], one element a thread, and the work is inline assembly (`text`) around
`mma.sync.m16n8k16`: 16 weight rows are its first operand, the 8 activation rows its second, so nothing is padded.
A lane is 4 * g + q, with g = 0..7 and q = 0..3:

                    32 columns of a block                        what lane (g, q) holds
              q=0      q=1      q=2      q=3
    row g    [0..7]  [8..15]  [16..23] [24..31]     weights of rows g, g + 8, g + 16 and g + 24 of the tile
    row g+8  [0..7]  [8..15]  [16..23] [24..31]     and of activation row g: its own 8 columns of each block
    ...
                                                    sums: weight rows g (+8, 16, 24) x activation rows 2q, 2q + 1

The instruction names columns (2q, 2q + 1, 2q + 8, 2q + 9) where this file gives a lane its 8 consecutive ones.
A sum over columns does not care in which order they come, as long as both operands agree, and this order makes
a plain row-major activation row (and a plain BF16 weight row) an operand as it lies: 16 bytes a lane and block.

A chunk is 128 columns, four blocks. The 8 sums of a lane are numbered 4 * (row / 16) + 2 * (row / 8 % 2) +
(activation row % 2). The warps of a program take chunks in turn; `lanes.sum_over_warps` leaves thread (warp w,
lane g, q) with the sums of weight rows 8 * (w / 2) + g and 16 + 8 * (w / 2) + g for activation row 2q + w % 2
(w below 4; further warps hold copies).

FP4 weights: one 32-bit word holds the 8 weights a lane feeds to one `mma`. Each of its bytes is two E2M1 codes
spread over free bits, `s...eem.` and `.eem...s`; masked, either one is the high byte of an fp16 number that
is the weight times 2^-14 (E2M1's subnormal included). Nine integer instructions unpack a word. Scales are applied
to the sums of a 32-column block, which is exact; four of them share a word as 7-bit exponents.
FP8 weights become fp16 by one conversion for two of them, and scales are applied to the sums too.

Measured on an H200, these forms stream FP4 at 85 to 92 % and BF16 at all of the bandwidth a copy reaches; short
programs with many warps resident did best, and prefetching a turn ahead in registers worst.
"""
