"""The index selection fused into two launches: scores with the best of each block, and the exact choice.

Knows: how rows and keys are shared among programs, and how the best are found without sorting. Does not know: the
meaning (`reference`).

Scores live in slots: slot s is entry s, for a member it is entry s % block of its candidate block s // block. The
slots that a row uses are a run from 0, because only the last listed block can hold entries not yet visible.

The choice is exact and needs two small searches, however many slots there are: the `topk` best slots lie in the
`topk` best blocks, where blocks are ordered by their best score and then by number. (If a chosen slot lay in none
of them, each would hold a slot that precedes it.) Either search builds the smallest chosen value bit by bit from
the top, counting, and stops as soon as the count is right.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import launch, tuning
from pallas_kernels.device_tiles import (
    cast,
    fp4_index_round_trip,
    hadamard_signs_of,
    loop_bound,
    partial_sum,
    product,
    query_tile,
    rounded,
)
from pallas_kernels.index_selection import reference
from pallas_kernels.index_selection.reference import Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns

INDEX_BLOCK = tl.constexpr(reference.INDEX_BLOCK)
NARROW_WIDTH = 64
LONG = 1 << 13  # blocks of a row from which more threads share them
MOST_BLOCKS = 1 << 14  # a row's blocks are held in registers, and two counts share one integer


@triton.jit
def visible_entries(length, count, row, RATIO: tl.constexpr):
    """How many entries rows `row` see; none beyond the live rows."""
    return tl.where(row < count, (length + row + 1) // RATIO, 0)


@triton.jit
def used_slots(seen, blocks_ptr, row, ROLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots rows `row` use: their visible entries, or for a member those in its candidate blocks."""
    if ROLE == "member":
        listed = tl.load(blocks_ptr + row)
        return listed * BLOCK - (tl.cdiv(seen, BLOCK) * BLOCK - seen)
    else:
        return seen


@triton.jit
def entries_of(
    slot, wanted, candidates_ptr, row, ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr
):
    """The entries in slots `slot` where `wanted`."""
    if ROLE == "member":
        return (
            tl.load(candidates_ptr + row * KEPT + slot // BLOCK, mask=wanted, other=0) * BLOCK + slot % BLOCK
        )
    else:
        return slot


@triton.jit
def index_scores(
    q_ptr, weights_ptr, table_ptr, keys_ptr, length_ptr, count_ptr, candidates_ptr, listed_ptr,
    scores_ptr, best_ptr,
    Q: tl.constexpr, W: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, RATIO: tl.constexpr, QUANTISE: tl.constexpr, HADAMARD: tl.constexpr,
    ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, TRIVIAL: tl.constexpr,
    BLOCKS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (programs over keys, R / ROWS). Writes scores [R, BLOCKS * BLOCK] and their block maxima [R, BLOCKS].

    Writes nothing for rows that use at most TRIVIAL slots all together: nothing is left to choose there.
    """
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    M: tl.constexpr = ROWS * HEADS
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    first_row = tl.program_id(1) * ROWS
    group = first_row + tl.arange(0, ROWS)
    slots = used_slots(visible_entries(length, count, group, RATIO), listed_ptr, group, ROLE, BLOCK)
    most = tl.max(slots, axis=0)
    if most > TRIVIAL:
        member = tl.arange(0, M)
        row = first_row + member // HEADS
        head = member % HEADS
        q = query_tile(q_ptr, table_ptr, row, head, dtype, Q, R, WIDTH, ROPE, 0.0, False, M, WIDTH)
        if QUANTISE and HADAMARD:
            axis = tl.arange(0, WIDTH)
            signs = hadamard_signs_of(axis[:, None], axis[None, :])
            q = rounded(product(cast(q, dtype), signs.to(dtype)) * WIDTH**-0.5, dtype)
        if QUANTISE:
            q = fp4_index_round_trip(q, INDEX_BLOCK, M, WIDTH)
        q = cast(q, dtype)
        weight = partial_sum(weights_ptr, row * W[1] + W[2] + head, member < M, W[0], R * W[1])
        weight = rounded(weight, dtype) * SCALE

        column = tl.arange(0, WIDTH)[None, :]
        step = tl.num_programs(0)
        slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
        entry = entries_of(slot, slot < most, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
        for tile in range(loop_bound(tl.program_id(0)), loop_bound(tl.cdiv(most, TILE)), loop_bound(step)):
            slot = tile * TILE + tl.arange(0, TILE)
            keys = tl.load(keys_ptr + entry[:, None] * WIDTH + column, mask=(slot < most)[:, None], other=0.0)
            following = slot + step * TILE
            entry = entries_of(following, following < most, candidates_ptr, first_row, ROLE, BLOCK, KEPT)
            hits = tl.maximum(product(keys, tl.trans(q)), 0.0) * weight[None, :]
            total = tl.sum(tl.reshape(hits, (TILE, ROWS, HEADS)), axis=2)
            total = tl.where(total == 0.0, 0.0, total)
            total = tl.where(slot[:, None] < slots[None, :], total, -float("inf"))
            place = group[None, :] * (BLOCKS * BLOCK) + slot[:, None]
            tl.store(scores_ptr + place, total, mask=(slot < most)[:, None])
            block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
            peak = tl.max(tl.reshape(total, (TILE // BLOCK, BLOCK, ROWS)), axis=1)
            tl.store(
                best_ptr + group[None, :] * BLOCKS + block[:, None],
                peak,
                mask=(block * BLOCK < most)[:, None],
            )


@triton.jit
def chosen_places(values, valid, COUNT: tl.constexpr):
    """Which of values [M], more than COUNT of them valid, are the COUNT best, and each one's place among those.

    Ties go to the lower number. Values are float32 without NaN and -0, so that their bits, with the sign bit
    turned and negative ones complemented, order them.
    """
    bits = values.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    ordered = tl.where(valid, ordered, 0)
    edge = tl.full((), 0, tl.uint32)
    found = tl.sum(valid.to(tl.int32), axis=0)
    bit = 31
    while (bit >= 0) & (found != COUNT):
        raised = edge | (tl.full((), 1, tl.uint32) << bit)
        reached = tl.sum((ordered >= raised).to(tl.int32), axis=0)
        enough = reached >= COUNT
        edge = tl.where(enough, raised, edge)
        found = tl.where(enough, reached, found)
        bit -= 1
    above = (ordered > edge) & valid
    tied = (ordered == edge) & valid
    room = COUNT - tl.sum(above.to(tl.int32), axis=0)
    both = above.to(tl.int32) + (tied.to(tl.int32) << 16)
    before = tl.cumsum(both, axis=0) - both
    ties_before = before >> 16
    return above | (tied & (ties_before < room)), (before & 0xFFFF) + tl.minimum(ties_before, room)


@triton.jit
def list_blocks(best_ptr, out_ptr, row, blocks, newest, COUNT: tl.constexpr, BLOCKS: tl.constexpr,
                PADDED: tl.constexpr):  # fmt: skip
    """Writes the COUNT best of more than COUNT blocks in rising order; block `newest` counts as the very best."""
    block = tl.arange(0, PADDED)
    value = tl.load(best_ptr + row * BLOCKS + block, mask=block < blocks, other=0.0)
    value = tl.where(block == newest, float("inf"), value)
    chosen, place = chosen_places(value, block < blocks, COUNT)
    tl.store(out_ptr + place, block, mask=chosen)


@triton.jit
def index_choice(
    scores_ptr, best_ptr, length_ptr, count_ptr, candidates_ptr, listed_ptr,
    ids_ptr, counts_ptr, published_ptr, published_counts_ptr, work_ptr,
    RATIO: tl.constexpr, ROLE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TOPK: tl.constexpr, PADDED_TOPK: tl.constexpr, PADDED_KEPT: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one row's choice, and the candidate blocks if it is a source's."""
    row = tl.program_id(0)
    seen = visible_entries(tl.load(length_ptr), tl.load(count_ptr), row, RATIO)
    slots = used_slots(seen, listed_ptr, row, ROLE, BLOCK)
    blocks = tl.cdiv(slots, BLOCK)

    if ROLE == "source":
        tl.store(published_counts_ptr + row, tl.minimum(blocks, KEPT))
        place = tl.arange(0, PADDED_KEPT)
        if blocks > KEPT:
            list_blocks(best_ptr, published_ptr + row * KEPT, row, blocks, (seen - 1) // BLOCK, KEPT, BLOCKS,
                        PADDED_BLOCKS)  # fmt: skip
        else:
            tl.store(
                published_ptr + row * KEPT + place, tl.where(place < blocks, place, -1), mask=place < KEPT
            )

    tl.store(counts_ptr + row, tl.minimum(slots, TOPK))
    place = tl.arange(0, PADDED_TOPK)
    if slots <= TOPK:
        entry = entries_of(place, place < slots, candidates_ptr, row, ROLE, BLOCK, KEPT)
        tl.store(ids_ptr + row * TOPK + place, tl.where(place < slots, entry, -1), mask=place < TOPK)
    else:
        number = tl.arange(0, PADDED_TOPK * BLOCK)
        block = number // BLOCK
        if blocks > TOPK:
            list_blocks(best_ptr, work_ptr + row * TOPK, row, blocks, -1, TOPK, BLOCKS, PADDED_BLOCKS)
            tl.debug_barrier()
            block = tl.load(work_ptr + row * TOPK + block, mask=block < TOPK, other=BLOCKS)
        slot = block * BLOCK + number % BLOCK
        valid = slot < slots
        value = tl.load(scores_ptr + row * (BLOCKS * BLOCK) + slot, mask=valid, other=0.0)
        chosen, order = chosen_places(value, valid, TOPK)
        wanted = entries_of(slot, chosen, candidates_ptr, row, ROLE, BLOCK, KEPT)
        tl.store(ids_ptr + row * TOPK + order, wanted, mask=chosen)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def rows_together(rows: int, spec: IndexSpec, columns: int) -> int:
    """How many rows share a program's keys: up to `columns` query heads; a member's rows have keys of their own."""
    together = 1
    while spec.role != "member" and rows % (2 * together) == 0 and 2 * together * spec.heads <= columns:
        together *= 2
    return together


def choose(
    q: Columns,
    weights: Columns,
    table: jax.Array,
    keys: jax.Array,
    length: jax.Array,
    count: jax.Array,
    spec: IndexSpec,
    candidates: Listed | None = None,
    tile: dict[str, int] | None = None,
) -> tuple[Listed, Listed | None]:
    """`reference.choose` in two launches. `tile` overrides the measured choice for the scores."""
    rows, member = q.rows, spec.role == "member"
    tile = tile or tuning.tiles("index_selection")["scores" if spec.width > NARROW_WIDTH else "narrow"]
    together = rows_together(rows, spec, tile["columns"])
    blocks = spec.kept if member else -(-keys.shape[0] // spec.block)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"{keys.shape[0]} entries in blocks of {spec.block}, expected at most {MOST_BLOCKS} blocks; "
            "choose a shorter context"
        )
    if keys.dtype != spec.type:
        raise ValueError(f"index keys are {keys.dtype}, expected {spec.dtype}")
    lists = (candidates.ids, candidates.counts) if member else (length, length)
    trivial = min(spec.topk, spec.kept * spec.block) if spec.role == "source" else spec.topk
    common = dict(RATIO=spec.ratio, ROLE=spec.role or "none", BLOCK=spec.block, KEPT=max(spec.kept, 1))
    values, peaks = launch.call(
        index_scores,
        *(q.partials, weights.partials, table, keys, length, count, *lists),
        grid=(max(1, tile["programs"] * together // rows), rows // together),
        outputs=[
            jax.ShapeDtypeStruct((rows, blocks * spec.block), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
        ],
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        Q=q.layout,
        W=weights.layout,
        R=rows,
        HEADS=spec.heads,
        WIDTH=spec.width,
        ROPE=spec.rope,
        QUANTISE=spec.quantise,
        HADAMARD=spec.hadamard,
        TRIVIAL=trivial,
        BLOCKS=blocks,
        SCALE=(spec.width * spec.heads) ** -0.5,
        ROWS=together,
        TILE=tile["keys"],
        **common,
    )
    published = (rows, spec.kept) if spec.role == "source" else (1, 1)
    shapes = [(rows, spec.topk), (rows,), published, (rows,), (rows, spec.topk)]
    ids, counts, kept, kept_counts, _ = launch.call(
        index_choice,
        *(values, peaks, length, count, *lists),
        grid=(rows,),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        num_warps=tuning.tiles("index_selection")["long selection" if blocks > LONG else "selection"][
            "warps"
        ],
        BLOCKS=blocks,
        PADDED_BLOCKS=_power_of_two(blocks),
        TOPK=spec.topk,
        PADDED_TOPK=_power_of_two(spec.topk),
        PADDED_KEPT=_power_of_two(common["KEPT"]),
        **common,
    )
    return Listed(ids, counts), Listed(kept, kept_counts) if spec.role == "source" else candidates
