"""Launches the laws of all rows; the results of reference.py.

Knows: shapes, and how many programs may wait for each other. Does not know: the arithmetic.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import device_narrowing as narrowing
from pallas_kernels import launch
from pallas_kernels.device_laws import PARTS
from pallas_kernels.sampling_law import kernels
from pallas_kernels.sampling_law.reference import Filters

MOST_ROWS = COUNTER_LINES = 8
WARPS = 8
# All programs must be resident at once: one per processor of an H200, which has 132 of them and the fewest in mind.
PROGRAMS = 132


def layout(vocabulary: int, programs: int) -> dict[str, int]:
    """The kernel's constants: of a row, G programs of OWN blocks of BLOCK tokens, about the square root of V each."""
    block = 1 << (vocabulary.bit_length() // 2)
    blocks = -(-vocabulary // block)
    own = 1 << (-(-blocks // programs) - 1).bit_length()
    used = -(-blocks // own)
    return dict(
        V=vocabulary, BLOCK=block, BLOCKS=blocks, BP=_padded(blocks), OWN=own, G=used, GP=_padded(used)
    )


def _padded(number: int) -> int:
    return 1 << (number - 1).bit_length()


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
    tiles = layout(vocabulary, programs // rows)
    numbers = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    options = jnp.stack([number.astype(jnp.float32) for number in numbers])

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    made = launch.call(
        kernels.sampling_law,
        logits,
        options,
        counters,
        grid=(PARTS if launch.INTERPRETED else 1, rows * tiles["G"]),
        outputs=[
            array(rows, vocabulary),
            array(rows, tiles["G"]),
            array(rows, tiles["G"], dtype=jnp.int32),
            array(rows, tiles["BLOCKS"]),
            array(rows, narrowing.ROUNDS, narrowing.PASSES, tiles["G"], narrowing.TRIALS),
            array(rows, narrowing.ROUNDS, tiles["BLOCKS"], dtype=jnp.int32),
            array(rows, narrowing.ROUNDS, tiles["G"]),
            array(*counters.shape, dtype=jnp.int32),
        ],
        aliases={2: 7},
        num_warps=WARPS,
        APART=launch.INTERPRETED,
        **tiles,
    )
    return made[0], made[-1]
