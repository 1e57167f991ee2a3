"""The attention core fused: query norm and rotation, gathering keys, softmax, and the rotation back.

Knows: how rows, heads and keys are shared among programs. Does not know: the meaning (`reference`).

A program takes one row, a block of heads and one of up to `splits` parts of the row's keys, and leaves an
unnormalised sum, a maximum and a denominator. The last program of a row and block of heads to finish
(`device_barrier`) adds the parts up in their order. Few keys are one part, and nothing is left to add up. A row's bits
depend on its own keys and position only, never on its neighbours.

    key tiles of a row     | near | near | near | near | far | far | ... |
    parts                  |---- 0 ----|---- 1 ----|---- ...        (equal numbers of tiles)
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import launch, tuning
from pallas_kernels.attention.reference import Block, Chosen, FarKeys, Visible
from pallas_kernels.attention.specs import AttentionSpec
from pallas_kernels.device_barrier import LINE, LINE_WORDS, is_last
from pallas_kernels.device_tiles import (
    cast,
    chunked,
    loop_bound,
    prefetch,
    product,
    queries,
    query_loads,
    rounded,
    settled,
    turn_factors,
    turned,
)
from pallas_kernels.rows import Columns

NAMES = {type(None): "none", Chosen: "chosen", Visible: "visible", Block: "block"}
NARROW_WIDTH = 128
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_slots(ids_ptr, row, tile, near_tiles, near, far, start, KEYS: tl.constexpr, RING: tl.constexpr,
              IDS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Where the keys of one tile lie: rows [TILE] of the ring for near tiles, of the far array behind them.

    `start` is the slot of the first near key; the ring is longer than the window, so it is passed once at most. A
    tile's places behind the last key repeat it: what is loaded is always a key, and no load needs a mask.
    """
    is_near = tile < near_tiles
    place = tl.where(is_near, tile, tile - near_tiles) * TILE + tl.arange(0, TILE)
    place = tl.maximum(tl.minimum(place, tl.where(is_near, near, far) - 1), 0)
    ring = start + place
    slot = place
    if KEYS == "chosen":
        # As a sum over one row: each thread loads few ids, not all those of the keys that it will load.
        slot = tl.sum(tl.load(ids_ptr + row * IDS + tl.minimum(place, IDS - 1)[None, :]), axis=0)
    return tl.where(is_near, tl.where(ring >= RING, ring - RING, ring), slot)


@triton.jit
def prefetch_keys(ring_ptr, far_ptr, slots, tile, near_tiles, end, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Brings the keys of one tile in front of `end` into L2 while the queries are made."""
    ELEMENTS: tl.constexpr = 1024 // ring_ptr.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    if tile < end:
        source = tl.where(tile < near_tiles, ring_ptr, far_ptr)
        line = tl.arange(0, PADDED // ELEMENTS if PADDED > ELEMENTS else 1) * ELEMENTS
        prefetch(source + slots[:, None] * WIDTH + tl.minimum(line, WIDTH - 1)[None, :])


@triton.jit
def finish(output, out_ptr, table_ptr, row, heads, columns, dtype: tl.constexpr,
           H: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
           PADDED: tl.constexpr):  # fmt: skip
    """Rotates back and stores one row's block of heads [BLOCK, PADDED]."""
    cosine, sine = turn_factors(table_ptr, row, WIDTH, ROPE, PADDED)
    output = turned(rounded(output, dtype), cosine[None, :], -sine[None, :], BLOCK, PADDED)
    places = (row * H + heads)[:, None] * WIDTH + columns[None, :]
    tl.store(out_ptr + places, cast(output, dtype), mask=(columns < WIDTH)[None, :])


@triton.jit
def combine(sums_ptr, peaks_ptr, sink_ptr, out_ptr, table_ptr, row, heads, columns, parts, dtype: tl.constexpr,
            SPLITS: tl.constexpr, R: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
            BLOCK: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Adds the first `parts` parts of one row's block of heads in their order, and finishes it."""
    CHUNK: tl.constexpr = PADDED if PADDED < 128 else 128
    column, head = chunked(heads, CHUNK, PADDED)
    sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
    peak = sink
    for part in tl.static_range(SPLITS):
        places = ((part * R + row) * H + head) * 2
        there = (head >= 0) & (part < parts)
        raised = tl.load(peaks_ptr + places, mask=there, other=-float("inf"), cache_modifier=".cg")
        peak = tl.maximum(peak, raised)
    denominator = tl.exp2(sink - peak)
    total = tl.zeros((BLOCK, PADDED // CHUNK, CHUNK), tl.float32)
    # Unrolled, so that the loads of all parts are under way together.
    for part in tl.static_range(SPLITS):
        places = (part * R + row) * H + head
        there = (head >= 0) & (part < parts)
        own = tl.load(peaks_ptr + places * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
        share = tl.exp2(own - peak)
        denominator += share * tl.load(
            peaks_ptr + places * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"
        )
        total += share * tl.load(
            sums_ptr + places * PADDED + column, mask=there & (column >= 0), other=0.0, cache_modifier=".cg"
        )
    output = tl.reshape(total * (1.0 / denominator), (BLOCK, PADDED))
    finish(output, out_ptr, table_ptr, row, heads, columns, dtype, H, WIDTH, ROPE, BLOCK, PADDED)


@triton.jit
def attention_core(
    q_ptr, table_ptr, sink_ptr, length_ptr, count_ptr, ring_ptr, far_ptr, ids_ptr, counts_ptr,
    counters_ptr, out_ptr, sums_ptr, peaks_ptr, counters_out_ptr,
    KEYS: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    FAR: tl.constexpr, IDS: tl.constexpr, RATIO: tl.constexpr, SCALE: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, H / BLOCK, R). Scores are kept in units of log 2; SCALE holds that factor.

    Parts have up to TILES tiles each, or more where there are SPLITS parts.
    """
    dtype: tl.constexpr = ring_ptr.dtype.element_ty
    part = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.program_id(2)
    heads = group * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, PADDED)
    length = tl.load(length_ptr)
    count = tl.load(count_ptr)
    chosen = tl.load(counts_ptr + row) if KEYS == "chosen" else 0
    sink = tl.load(sink_ptr + heads).to(tl.float32) * LOG2_E
    q, cosine, sine = query_loads(q_ptr, table_ptr, row, heads, Q, R, 1, H, WIDTH, ROPE, BLOCK, PADDED)

    position = length + row
    if KEYS == "block":
        newest = length - 1
        last = newest
    else:
        newest = position
        last = length + count - 1
    start = tl.maximum(newest - WINDOW + 1, 0)
    near = tl.minimum(newest, last) - start + 1
    if KEYS == "chosen":
        far = chosen
    elif KEYS == "visible":
        far = tl.minimum((position + 1) // RATIO, FAR)
    elif KEYS == "block":
        far = count
    else:
        far = 0
    near = tl.where(row < count, tl.maximum(near, 0), 0)
    far = tl.where(row < count, far, 0)
    start = start % RING
    near_tiles = tl.cdiv(near, TILE)
    tiles = near_tiles + tl.cdiv(far, TILE)
    if SPLITS == 1:
        parts: tl.constexpr = 1
    else:
        parts = tl.minimum(tl.maximum(tl.cdiv(tiles, TILES), 1), SPLITS)
    first = tl.minimum(part * tiles // parts, tiles)
    end = tl.minimum((part + 1) * tiles // parts, tiles)

    peak = sink
    shares = tl.zeros((BLOCK, TILE), tl.float32)
    HALF: tl.constexpr = PADDED // 2
    half = tl.arange(0, HALF)
    lower = tl.zeros((BLOCK, HALF), tl.float32)
    upper = tl.zeros((BLOCK, HALF), tl.float32)
    # One tile ahead, so that the keys' loads wait for no load of their own turn.
    slots = key_slots(ids_ptr, row, first, near_tiles, near, far, start, KEYS, RING, IDS, TILE)
    following = key_slots(ids_ptr, row, first + 1, near_tiles, near, far, start, KEYS, RING, IDS, TILE)
    prefetch_keys(ring_ptr, far_ptr, slots, first, near_tiles, end, WIDTH, PADDED)
    prefetch_keys(ring_ptr, far_ptr, following, first + 1, near_tiles, end, WIDTH, PADDED)
    q = cast(queries(q, cosine, sine, dtype, WIDTH, EPS, NORM, BLOCK, PADDED), dtype)
    # Two chains of products that do not wait for each other, each half as long.
    q_lower, q_upper = tl.split(tl.trans(tl.reshape(q, (BLOCK, 2, HALF)), 0, 2, 1))
    for tile in range(loop_bound(first), loop_bound(end)):
        is_near = tile < near_tiles
        place = tl.where(is_near, tile, tile - near_tiles) * TILE + tl.arange(0, TILE)
        exists = place < tl.where(is_near, near, far)
        source = tl.where(is_near, ring_ptr, far_ptr)
        places = source + slots[:, None] * WIDTH + half[None, :]
        keys_lower = tl.load(places)
        if WIDTH == PADDED:
            keys_upper = tl.load(places + HALF)
        else:
            keys_upper = tl.load(places + HALF, mask=(HALF + half < WIDTH)[None, :], other=0.0)
        slots = key_slots(ids_ptr, row, tile + 1, near_tiles, near, far, start, KEYS, RING, IDS, TILE)
        # Settled, or Triton would make the one the other's start.
        scores = settled(product(q_lower, tl.trans(keys_lower)))
        scores = (scores + settled(product(q_upper, tl.trans(keys_upper)))) * SCALE
        scores = tl.where(exists[None, :], scores, -float("inf"))
        raised = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - raised)
        weights = tl.exp2(scores - raised[:, None])
        shares = shares * shrink[:, None] + weights
        narrow = cast(weights, dtype)
        lower = lower * shrink[:, None] + product(narrow, keys_lower)
        upper = upper * shrink[:, None] + product(narrow, keys_upper)
        peak = raised

    denominator = tl.sum(shares, axis=1)
    if parts == 1:
        if part == 0:
            denominator += tl.exp2(sink - peak)
            output = tl.reshape(tl.trans(tl.join(lower, upper), 0, 2, 1), (BLOCK, PADDED))
            output = output * (1.0 / denominator)[:, None]
            finish(output, out_ptr, table_ptr, row, heads, columns, dtype, H, WIDTH, ROPE, BLOCK, PADDED)
    elif part < parts:
        places = (part * R + row) * H + heads
        tl.store(peaks_ptr + places * 2, peak)
        tl.store(peaks_ptr + places * 2 + 1, denominator)
        tl.store(sums_ptr + places[:, None] * PADDED + half[None, :], lower)
        tl.store(sums_ptr + places[:, None] * PADDED + HALF + half[None, :], upper)
        line = counters_out_ptr + (row * (H // BLOCK) + group) * LINE
        if is_last(line, 0, parts):
            combine(sums_ptr, peaks_ptr, sink_ptr, out_ptr, table_ptr, row, heads, columns, parts, dtype,
                    SPLITS, R, H, WIDTH, ROPE, BLOCK, PADDED)  # fmt: skip


def chosen_tile(kind: str, spec: AttentionSpec) -> dict[str, int]:
    """The measured choice for one kind of far keys; `narrow` is for heads that would leave a tile mostly empty."""
    return tuning.tiles("attention")[kind if spec.width > NARROW_WIDTH else "narrow"]


def counter_lines(rows: int, spec: AttentionSpec) -> int:
    """Lines of counters that `attend` uses for passes of `rows` rows."""
    blocks = [min(chosen_tile(kind, spec)["heads"], spec.heads) for kind in NAMES.values()]
    return rows * (spec.heads // min(blocks))


def attend(
    q: Columns,
    table: jax.Array,
    sink: jax.Array,
    ring: jax.Array,
    length: jax.Array,
    count: jax.Array,
    far: FarKeys,
    counters: jax.Array,
    spec: AttentionSpec,
    tile: dict[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attend` in one launch: the output [R, H * d] in the model's type, and the counters.

    `counters` come from `device_barrier.counters(counter_lines(R, spec))`; the kernel leaves them at zero.
    `tile` overrides the measured choice (keys heads, keys, splits, tiles, warps, stages). Rows beyond `count` are zero.
    """
    rows, kind = q.rows, NAMES[type(far)]
    tile = tile or chosen_tile(kind, spec)
    block, splits = min(tile["heads"], spec.heads), tile["splits"]
    if counters.shape[0] < rows * (spec.heads // block) * LINE_WORDS:
        raise ValueError(
            f"{counters.shape[0]} counters, expected at least {rows * (spec.heads // block)} lines of {LINE_WORDS}"
        )
    if ring.shape[0] < spec.window + rows - 1 and kind != "block":
        raise ValueError(f"a ring of {ring.shape[0]} slots, expected at least {spec.window + rows - 1}")
    keys = ring if far is None else far.keys if kind == "block" else far.entries
    if keys.dtype != ring.dtype or ring.dtype != spec.type:
        raise ValueError(f"ring {ring.dtype} and far keys {keys.dtype}, expected {spec.dtype} for both")
    ids, counts = (far.ids, far.counts) if kind == "chosen" else (length, count)
    parts = (splits, rows, spec.heads) if splits > 1 else (1, 1, 1)
    out, _, _, counters = launch.call(
        attention_core,
        *(q.partials, table, sink, length, count, ring, keys, ids, counts, counters),
        grid=(splits, spec.heads // block, rows),
        outputs=[
            jax.ShapeDtypeStruct((rows, spec.heads * spec.width), spec.type),
            jax.ShapeDtypeStruct((*parts, spec.padded), jnp.float32),
            jax.ShapeDtypeStruct((*parts, 2), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ],
        aliases={9: 3},
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        KEYS=kind,
        Q=q.layout,
        R=rows,
        H=spec.heads,
        WIDTH=spec.width,
        ROPE=spec.rope,
        EPS=spec.norm_eps or 0.0,
        NORM=spec.norm_eps is not None,
        WINDOW=spec.window,
        RING=ring.shape[0],
        FAR=keys.shape[0],
        IDS=ids.shape[1] if kind == "chosen" else 1,
        RATIO=far.ratio if kind == "visible" else 1,
        SCALE=spec.width**-0.5 * LOG2_E.value,
        SPLITS=splits,
        TILES=tile["tiles"],
        BLOCK=block,
        TILE=tile["keys"],
        PADDED=spec.padded,
    )
    return out, counters
