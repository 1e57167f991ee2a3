"""Triton bodies of what is fetched before a pass asks for it; `early` defines them.

Knows: which program decides for which layer, and how a copy is shared out. Does not know: who guesses.
"""

import triton
import triton.language as tl

from pallas_kernels.experts import early, tiers

HOT, UNUSED = tl.constexpr(tiers.HOT), tl.constexpr(early.UNUSED)
COUNTED = tl.constexpr(len(early.COUNTED))
TOGETHER = tl.constexpr(16)  # guessed experts that are looked at together


@triton.jit
def plan_fetches(
    table_ptr,
    named_ptr,
    _owners_ptr,
    _ages_ptr,
    _fetches_ptr,
    _counts_ptr,
    owners_ptr,
    ages_ptr,
    fetches_ptr,
    counts_ptr,
    EXPERTS: tl.constexpr,
    NAMED: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE_EXPERTS: tl.constexpr,
    WIDE_SLOTS: tl.constexpr,
):
    """`early.plan`, a program a layer. WIDE sizes are powers of two."""
    layer = tl.program_id(0)
    expert, slot = tl.arange(0, WIDE_EXPERTS), tl.arange(0, WIDE_SLOTS)
    real, own = slot < SLOTS, layer * SLOTS + slot
    named = tl.zeros((WIDE_EXPERTS,), tl.int32)
    for start in range(0, NAMED, TOGETHER):
        place = start + tl.arange(0, TOGETHER)
        some = tl.load(named_ptr + layer * NAMED + place, mask=place < NAMED, other=0)
        named = tl.maximum(named, tl.max((expert[:, None] + 1 == some[None, :]).to(tl.int32), axis=1))
    tier = tl.load(table_ptr + (layer * EXPERTS + expert) * 2, mask=expert < EXPERTS, other=HOT)
    owner = tl.load(owners_ptr + own, mask=real, other=0)
    age = tl.load(ages_ptr + own, mask=real, other=0)
    before = tl.load(fetches_ptr + own, mask=real, other=0)
    wanted = (named > 0) & (tier != HOT)
    hits = (wanted[:, None] & real[None, :] & (expert[:, None] + 1 == owner[None, :])).to(tl.int32)
    coming = wanted & (tl.max(hits, axis=1) == 0)
    free = real & (tl.max(hits, axis=0) == 0)
    turn = tl.cumsum(coming.to(tl.int32), axis=0) - coming.to(tl.int32)
    elder = (age[:, None] > age[None, :]) | ((age[:, None] == age[None, :]) & (slot[:, None] < slot[None, :]))
    rank = tl.sum((elder & free[:, None]).to(tl.int32), axis=0)
    into = coming[:, None] & free[None, :] & (turn[:, None] == rank[None, :])
    newcomer = tl.max(tl.where(into, expert[:, None] + 1, 0), axis=0)
    comes = newcomer > 0
    tl.store(owners_ptr + own, tl.where(comes, newcomer, owner), mask=real)
    tl.store(ages_ptr + own, tl.where(comes, UNUSED, age), mask=real)
    tl.store(fetches_ptr + own, newcomer, mask=real)
    used = (before > 0) & (before == owner) & (age == 0)
    counts = counts_ptr + layer * COUNTED
    tl.store(counts, tl.load(counts) + tl.sum(comes.to(tl.int32), axis=0))
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(used.to(tl.int32), axis=0))


@triton.jit
def fetch_experts(
    layer_ptr,
    cold_ptr,
    table_ptr,
    fetches_ptr,
    _turn_ptr,
    _records_ptr,
    turn_ptr,
    records_ptr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RECORD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """`early.fetch`: each of PROGRAMS programs copies every PROGRAMS-th piece of WORDS words of a record."""
    layer, first = tl.load(layer_ptr), tl.program_id(0) * WORDS
    for slot in range(SLOTS):
        coming = tl.load(fetches_ptr + layer * SLOTS + slot)
        if coming > 0:
            home = tl.load(table_ptr + (layer * EXPERTS + coming - 1) * 2 + 1).to(tl.int64)
            source, target = cold_ptr + home * RECORD, records_ptr + slot * RECORD
            for start in range(0, RECORD, PROGRAMS * WORDS):
                word = start + first + tl.arange(0, WORDS)
                piece = tl.load(source + word, mask=word < RECORD, eviction_policy="evict_first")
                tl.store(target + word, piece, mask=word < RECORD)
