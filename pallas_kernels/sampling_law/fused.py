"""Launches the laws of all rows; the results of reference.py.

Knows: shapes, how a vocabulary is cut into slices, and how many programs may wait for each other. Does not know: the
arithmetic.
"""

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import device_narrowing as narrowing
from pallas_kernels import launch
from pallas_kernels.device_laws import PARTS
from pallas_kernels.sampling_law import kernels
from pallas_kernels.sampling_law.reference import Filters
from pallas_kernels.sampling_law.specs import block_of

MOST_ROWS = COUNTER_LINES = 8
WARPS = 8
# All programs must be resident at once: one per processor of an H200, which has 132 of them and the fewest in mind.
PROGRAMS = 132


def slices(vocabulary: int, programs: int) -> dict[str, int]:
    """Constants of kernels that make laws: of a row, G programs of OWN blocks of BLOCK tokens each."""
    block = block_of(vocabulary)
    blocks = triton.cdiv(vocabulary, block)
    own = triton.next_power_of_2(triton.cdiv(blocks, programs))
    used = triton.cdiv(blocks, own)
    return dict(
        V=vocabulary, BLOCK=block, BLOCKS=blocks, BP=triton.next_power_of_2(blocks), OWN=own, G=used,
        GP=triton.next_power_of_2(used),
    )  # fmt: skip


def options_of(filters: Filters) -> jax.Array:
    """The filters as kernels take them: float32 [4], temperature, top-k, top-p, min-p."""
    numbers = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    return jnp.stack([number.astype(jnp.float32) for number in numbers])


def shared_arrays(rows: int, vocabulary: int, blocks: int, programs: int) -> list[jax.ShapeDtypeStruct]:
    """The outputs laws, masses, sums, ties and aboves, in which the programs of each row meet."""
    filters = (rows, narrowing.ROUNDS)
    return [
        jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
        jax.ShapeDtypeStruct((*filters, narrowing.PASSES, programs, narrowing.TRIALS), jnp.float32),
        jax.ShapeDtypeStruct((*filters, blocks), jnp.int32),
        jax.ShapeDtypeStruct((*filters, programs), jnp.float32),
    ]


def laws(
    logits: jax.Array, filters: Filters, counters: jax.Array, programs: int = PROGRAMS
) -> tuple[jax.Array, jax.Array]:
    """`reference.laws` in one launch: float32 [R, V], and the counters for the next kernel.

    Args: as there, at most MOST_ROWS rows, and
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
      programs: how many programs the GPU surely keeps resident.
    """
    rows, vocabulary = logits.shape
    if rows > MOST_ROWS:
        raise ValueError(f"logits have {rows} rows, expected at most {MOST_ROWS}")
    tiles = slices(vocabulary, programs // rows)
    blocks, used = tiles["BLOCKS"], tiles["G"]
    _, made, *_, counters = launch.call(
        kernels.sampling_law,
        logits,
        options_of(filters),
        counters,
        grid=(PARTS if launch.INTERPRETED else 1, rows * used),
        outputs=[
            jax.ShapeDtypeStruct((rows, used), jnp.float32),
            *shared_arrays(rows, vocabulary, blocks, used),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ],
        aliases={2: 6},
        num_warps=WARPS,
        APART=launch.INTERPRETED,
        **tiles,
    )
    return made, counters
