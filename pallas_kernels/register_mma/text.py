"""PTX text of the weight-streaming building blocks; the package says how they fit together.

Knows: each instruction sequence and the order of its operands. Does not know: Triton.

In every text `$0`, `$1`, ... are the results and then the inputs, in the order each docstring gives.
"""

# The bits of the fp16 number 1e-4 * 2^7: a smaller block maximum counts as this one. 1e-4 is the floor of the
# published activation rounding, 2^7 the factor `tiles.HIDDEN_GAIN` that these rows carry.
_FLOOR_BITS = 0x228E
_FP4_MASK = "0x8E008E00"


def _operands(first: int, count: int) -> list[str]:
    return [f"${i}" for i in range(first, first + count)]


def _mma(d: list[str], a: list[str], b: list[str], c: list[str], kind: str) -> str:
    d, a, b, c = (", ".join(part) for part in (d, a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"


def _block(*lines: str) -> str:
    return "\n".join(["{", *lines, "}"])


def loads(
    count: int, stride: int, how: str, *, words: int = 4, guarded: bool = False, fenced: bool = False
) -> str:
    """Loads of `words` words each (16 bytes) at one pointer, `stride` bytes apart.

    Guarded: load i is made where the operand after the pointer exceeds i, and gives zeros elsewhere.
    Fenced: a warp barrier keeps the loads together; without it ptxas may spread them over the arithmetic.
    """
    total = words * count
    lines = [".reg .pred p;", *(f"mov.b32 ${i}, 0;" for i in range(total))] if guarded else []
    for i in range(count):
        target = ", ".join(_operands(words * i, words))
        if guarded:
            lines.append(f"setp.gt.s32 p, ${total + 1}, {i};")
        guard = "@p " if guarded else ""
        lines.append(f"{guard}ld.global{how}.v{words}.b32 {{{target}}}, [${total} + {i * stride}];")
    return _block(*lines, *(["bar.warp.sync 0xffffffff;"] if fenced else []))


def fence() -> str:
    """Loads written in front of it are not made behind it: out a zero; in any word."""
    return _block("bar.warp.sync 0xffffffff;", "mov.b32 $0, 0;")


def stores(count: int, stride: int, *, guarded: bool = False) -> str:
    """Stores of four words (16 bytes) each at one pointer, `stride` bytes apart: out a zero; in words, pointer.

    Guarded: store i is made where the operand after the pointer exceeds i.
    """
    pointer, left = f"${1 + 4 * count}", f"${2 + 4 * count}"
    lines = ["mov.b32 $0, 0;", *([".reg .pred p;"] if guarded else [])]
    for i in range(count):
        given = ", ".join(_operands(1 + 4 * i, 4))
        if guarded:
            lines.append(f"setp.gt.s32 p, {left}, {i};")
        guard = "@p " if guarded else ""
        lines.append(f"{guard}st.global.v4.b32 [{pointer} + {i * stride}], {{{given}}};")
    return _block(*lines)


def loads_of_rows(count: int, how: str, *, guarded: bool) -> str:
    """16-byte loads of `count` pointers, kept together; guarded as above, all or none."""
    words = 4 * count
    lines = [".reg .pred p;", *(f"mov.b32 ${i}, 0;" for i in range(words))] if guarded else []
    if guarded:
        lines.append(f"setp.gt.s32 p, ${words + count}, 0;")
    for i in range(count):
        target = ", ".join(_operands(4 * i, 4))
        lines.append(f"{'@p ' if guarded else ''}ld.global{how}.v4.b32 {{{target}}}, [${words + i}];")
    return _block(*lines, "bar.warp.sync 0xffffffff;")


def fp4_block(column_block: int) -> str:
    """32 rows x 32 columns of FP4: out 8 sums; in 4 words of weights, 4 of activations, 4 of scales, 8 sums."""
    weights, rows, sums = _operands(8, 4), _operands(12, 4), _operands(20, 8)
    scale = f"${16 + column_block}"
    d = ["d0", "d1", "d2", "d3"]
    exponents = (
        [f"shl.b32 t, {scale}, 23;"],
        [f"shl.b32 t, {scale}, 14;", "and.b32 t, t, 0x3F800000;"],
        [f"shl.b32 t, {scale}, 7;", "and.b32 t, t, 0x3F800000;"],
        [f"and.b32 t, {scale}, 0x3F800000;"],
    )
    lines = [".reg .b32 t, v, y, a0, a1, a2, a3;", ".reg .f32 z, f, d0, d1, d2, d3;", "mov.b32 z, 0;"]
    for half in range(2):
        for step in range(2):
            word = weights[2 * half + step]
            lines += [
                f"and.b32 a0, {word}, {_FP4_MASK};",
                f"shl.b32 t, {word}, 8;",
                f"and.b32 a1, t, {_FP4_MASK};",
                f"shr.u32 t, {word}, 3;",
                f"shl.b32 v, {word}, 7;",
                "lop3.b32 y, t, v, 0x0E0E0E0E, 0xE4;",  # bits of t under the mask, of v elsewhere
                f"and.b32 a2, y, {_FP4_MASK};",
                "shl.b32 t, y, 8;",
                f"and.b32 a3, t, {_FP4_MASK};",
                _mma(
                    d,
                    ["a0", "a1", "a2", "a3"],
                    rows[2 * step : 2 * step + 2],
                    d if step else ["z"] * 4,
                    "f16",
                ),
            ]
        for eight in range(2):
            lines += [*exponents[2 * half + eight], "mov.b32 f, t;"]
            for parity in range(2):
                slot = 4 * half + 2 * eight + parity
                lines.append(f"fma.rn.f32 ${slot}, d{2 * eight + parity}, f, {sums[slot]};")
    return _block(*lines)


def fp8_step() -> str:
    """16 rows x 32 columns of FP8: out 4 sums; in 2 words of row g, 2 of row g + 8, 4 of activations, 4 sums."""
    out, sums, rows = _operands(0, 4), _operands(12, 4), _operands(8, 4)
    lines = [".reg .b16 l, h;", ".reg .b32 a0, a1, a2, a3;"]
    for step in range(2):
        for row in range(2):
            lines += [
                f"mov.b32 {{l, h}}, ${4 + 2 * row + step};",
                f"cvt.rn.f16x2.e4m3x2 a{row}, l;",
                f"cvt.rn.f16x2.e4m3x2 a{2 + row}, h;",
            ]
        lines.append(
            _mma(out, ["a0", "a1", "a2", "a3"], rows[2 * step : 2 * step + 2], out if step else sums, "f16")
        )
    return _block(*lines)


def bf16_step() -> str:
    """16 rows x 32 columns of BF16: out 4 sums; in 4 words of row g, 4 of row g + 8, 4 of activations, 4 sums."""
    out, upper, lower, rows, sums = (_operands(first, 4) for first in (0, 4, 8, 12, 16))
    lines = []
    for step in range(2):
        i = 2 * step
        a = [upper[i], lower[i], upper[i + 1], lower[i + 1]]
        lines.append(_mma(out, a, rows[i : i + 2], out if step else sums, "bf16"))
    return _block(*lines)


def bf16_pair() -> str:
    """Two float32 numbers as a word of bf16 ones: out a word; in the lower and the upper number."""
    return "cvt.rn.bf16x2.f32 $0, $2, $1;"


def bf16_thirds() -> str:
    """Two float32 numbers as three words of bf16 ones that add up to them: out 3 words, the largest first; in as above.

    A float32 has 24 bits and a bf16 8; each remainder is exact. (The last may underflow below 2^-110.)
    """
    lines = [".reg .b32 u, v, x, y;", "mov.b32 x, $3;", "mov.b32 y, $4;"]
    for third in range(3):
        lines.append(f"cvt.rn.bf16x2.f32 ${third}, y, x;")
        if third < 2:
            lines += [
                f"shl.b32 u, ${third}, 16;",
                f"and.b32 v, ${third}, 0xFFFF0000;",
                "sub.f32 x, x, u;",
                "sub.f32 y, y, v;",
            ]
    return _block(*lines)


def sum_of_quad() -> str:
    """The sum of the q = 0..3 lanes' numbers, for each of them: out one; in one number."""
    lines = [".reg .b32 t, s;", "mov.b32 s, $1;"]
    for distance in (1, 2):
        lines += [f"shfl.sync.bfly.b32 t, s, {distance}, 0x1F, 0xFFFFFFFF;", "add.f32 s, s, t;"]
    return _block(*lines, "mov.b32 $0, s;")


def peak_of_channels() -> str:
    """The largest of the g = 0..7 lanes' numbers, for every lane: out one; in one non-negative integer."""
    lines = [".reg .b32 t, m;", "mov.b32 m, $1;"]
    for distance in (4, 8, 16):
        lines += [f"shfl.sync.bfly.b32 t, m, {distance}, 0x1F, 0xFFFFFFFF;", "max.u32 m, m, t;"]
    return _block(*lines, "mov.b32 $0, m;")


def rounding_scales(whole_chunk: bool) -> str:
    """Factors of the activations' FP8 rounding: out 1 / scale and scale, each twice as fp16; in two words, a block.

    The words hold this lane's four peaks of eight channels: those of block q of a chunk. All four lanes of a quad
    together give the scale of the whole chunk, or the one of block $4 that of its 32 columns.

    With the peak 1.f * 2^e the scale is 2^(e - 8), or 2^(e - 7) where 1.f exceeds 1.75 (448 is 1.75 * 2^8): adding
    0xFF to the bits of the peak carries into the exponent just then.
    """
    lines = [
        ".reg .b32 m, t;",
        "max.xorsign.abs.f16x2 m, $2, $3;",
        "and.b32 m, m, 0x7FFF7FFF;",
        "shr.u32 t, m, 16;",
        "and.b32 m, m, 0xFFFF;",
        "max.u32 m, m, t;",
    ]
    if whole_chunk:
        for distance in (1, 2):
            lines += [f"shfl.sync.bfly.b32 t, m, {distance}, 0x1F, 0xFFFFFFFF;", "max.u32 m, m, t;"]
    else:
        lines.append("shfl.sync.idx.b32 m, m, $4, 0x1C1F, 0xFFFFFFFF;")  # lanes in groups of four
    return _block(
        *lines,
        f"max.u32 m, m, {_FLOOR_BITS};",
        "add.u32 m, m, 0xFF;",
        "shr.u32 m, m, 10;",
        "sub.u32 t, 38, m;",  # exponent bits of 1 / scale: 15 - (m - 15 - 8)
        "mul.lo.u32 $0, t, 0x04000400;",
        "sub.u32 t, m, 8;",
        "shl.b32 t, t, 10;",
        "max.u32 t, t, 0x200;",  # the smallest scale, 2^-15, is a subnormal fp16
        "mul.lo.u32 $1, t, 0x00010001;",
    )


def round_words() -> str:
    """The FP8 round trip of eight activations: out 4 words; in 4 words, and the factors of `rounding_scales`."""
    lines = [".reg .b32 y;", ".reg .b16 e;"]
    for i in range(4):
        lines += [
            f"mul.rn.f16x2 y, ${4 + i}, $8;",
            "cvt.rn.satfinite.e4m3x2.f16x2 e, y;",
            "cvt.rn.f16x2.e4m3x2 y, e;",
            f"mul.rn.f16x2 ${i}, y, $9;",
        ]
    return _block(*lines)


def half_from_bfloat(words: int) -> str:
    """Words of two bf16 numbers to words of two fp16 numbers."""
    lines = [".reg .b32 t, v;"]
    for i in range(words):
        word = f"${words + i}"
        lines += [
            f"shl.b32 t, {word}, 16;",
            f"and.b32 v, {word}, 0xFFFF0000;",
            f"cvt.rn.f16x2.f32 ${i}, v, t;",
        ]
    return _block(*lines)


def sum_over_warps(warps: int) -> str:
    """Adds 8 sums of each lane over the warps through shared memory; see the module's note for who gets which."""
    lines = [
        f".shared .align 16 .b8 partial[{1024 * warps}];",
        ".reg .b32 lane, warp, mine, all;",
        ".reg .f32 u, v;",
        "mov.u32 lane, %tid.x;",
        "shr.u32 warp, lane, 5;",
        "and.b32 lane, lane, 31;",
        "shl.b32 lane, lane, 2;",
        "mov.u32 all, partial;",
        "add.u32 all, all, lane;",
        "shl.b32 mine, warp, 10;",
        "add.u32 mine, mine, all;",
        *(f"st.shared.f32 [mine + {128 * slot}], ${2 + slot};" for slot in range(8)),
        "bar.sync 0;",
        "and.b32 warp, warp, 3;",
        "shl.b32 warp, warp, 7;",
        "add.u32 all, all, warp;",
        "ld.shared.f32 $0, [all];",
        "ld.shared.f32 $1, [all + 512];",
    ]
    for warp in range(1, warps):
        lines += [
            f"ld.shared.f32 u, [all + {1024 * warp}];",
            f"ld.shared.f32 v, [all + {1024 * warp + 512}];",
            "add.f32 $0, $0, u;",
            "add.f32 $1, $1, v;",
        ]
    return _block(*lines)
