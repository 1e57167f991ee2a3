"""The laws of all rows of a pass in one persistent Triton kernel.

Knows: how programs share rows and their vocabulary (reference.py says what is computed, device_laws.py how). Does not
know: shapes of a model, or how the launch is made (fused.py).

    every program     the largest logit of its slice of one row
                      -- barrier of the row --
                      top-k, top-p, masses and law, with the barriers of device_laws.py

G programs share a row, and rows do not wait for each other. All programs must be resident at once. In Triton's
interpreter the parts are the outer axis of the grid (APART).
"""

import triton
import triton.language as tl

from pallas_kernels.device_barrier import LINE, barrier
from pallas_kernels.device_laws import part_of_law, whole_law


@triton.jit
def store_top(
    program, row, logits, tops, V: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """The largest logit of this program's slice."""
    ids = program * OWN * BLOCK + tl.arange(0, OWN * BLOCK)
    value = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    tl.store(tops + row * G + program, tl.max(value, axis=0))


@triton.jit
def sampling_law(
    logits, options, counters_in, tops, laws, masses, sums, ties, aboves, counters,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The law of each row; grid (1, rows * G), or (PARTS, rows * G) with APART."""
    program, row = tl.program_id(1) % G, tl.program_id(1) // G
    temperature, top_k = tl.load(options), tl.load(options + 1)
    top_p, min_p = tl.load(options + 2), tl.load(options + 3)
    if APART:
        part = tl.program_id(0)
        if part == 0:
            store_top(program, row, logits, tops, V, BLOCK, OWN, G)
        else:
            part_of_law(
                program, row, part, logits, tops, temperature, top_k, top_p, min_p, laws, masses,
                sums, ties, aboves, V, BLOCK, BLOCKS, BP, OWN, G, GP,
            )  # fmt: skip
    else:
        own = counters + row * LINE
        store_top(program, row, logits, tops, V, BLOCK, OWN, G)
        barrier(own, 0, program, G)
        whole_law(
            program, row, logits, tops, temperature, top_k, top_p, min_p, laws, masses,
            sums, ties, aboves, own, V, BLOCK, BLOCKS, BP, OWN, G, GP,
        )  # fmt: skip
