"""The output projection of attention as a Triton launch; `reference` defines it.

Knows: shapes, and how both products are cut. Does not know: the bodies (`kernels`).
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import device_barrier, launch, tiles, tuning
from pallas_kernels.attention_output import kernels
from pallas_kernels.dense import fused as dense
from pallas_kernels.dense.packing import half_terms
from pallas_kernels.device_numbers import triton_type
from pallas_kernels.tiles import PackedMatrix

# held: halves of the second product's first turn that its programs hold in registers while they wait. splits: shares of
# the columns (None: few). each: tiles that a program walks over (`dense.kernels.walking_fp8_program`), where it can.
UNTUNED = {"held": 1, "splits": None, "each": 1, "second_splits": None, "second_each": 1}


def counter_lines(width: int, round_block: int) -> int:
    """Lines of counters that `project` needs for a latent of `width` columns."""
    return 1 + -(-(width // _block(round_block)) // device_barrier.LINE_WORDS)


def _block(round_block: int) -> int:
    """Columns that one program finishes."""
    return round_block or tiles.TILE


def project(
    heads: jax.Array,
    first: PackedMatrix,
    second: PackedMatrix,
    counters: jax.Array,
    *,
    groups: int,
    scale_block: int,
    round_block: int,
    dtype,
) -> tuple[jax.Array, jax.Array]:
    """`reference.project` in one launch: the output in parts float32 [S, R, D], and the next counters.

    Args: as there, and
      scale_block: block of both matrices' weight scales, 128 or 32.
      counters: from `device_barrier.counters`, at least `counter_lines` lines.
    """
    columns = first.words.shape[0] * tiles.TILE
    if round_block % tiles.TILE or columns % _block(round_block):
        raise ValueError(
            f"{columns} columns in rounding blocks of {round_block}, expected a multiple of 32 that divides"
        )
    lines = counter_lines(columns, round_block)
    if counters.shape[0] < lines * device_barrier.LINE_WORDS:
        raise ValueError(
            f"{counters.shape[0]} counters, expected {lines} lines of {device_barrier.LINE_WORDS}"
        )
    latent = jax.ShapeDtypeStruct((tiles.ROWS, columns), jnp.float16 if round_block else dtype)
    near = dense.fp8_settings(heads, first, scale_block, groups)
    far = dense.fp8_settings(latent, second, scale_block)
    untuned = {"warps": min(near["WARPS"], far["WARPS"])}
    name = tuning.by_shape(columns, second.words.shape[0] * tiles.TILE)
    tile = tuning.choice("attention_output", name, UNTUNED | untuned)
    warps = tile["warps"]
    near = dense.fp8_settings(heads, first, scale_block, groups, warps=warps, splits=tile["splits"])
    far = dense.fp8_settings(latent, second, scale_block, warps=warps, splits=tile["second_splits"])
    joined = _block(round_block) // tiles.TILE
    each = dense.tiles_each(near, math.gcd(joined, near["TILES"] // groups), tile["each"])
    second_each = dense.tiles_each(far, far["TILES"], tile["second_each"])
    out, _, _, counters = launch.call(
        kernels.output_projection,
        half_terms(heads),
        *first,
        *second,
        counters,
        grid=(near["grid"][0] // each + far["grid"][0] // second_each,),
        outputs=[
            dense.partial(far["SPLITS"], far["TILES"]),
            jax.ShapeDtypeStruct(
                (far["TERMS"], *latent.shape), jnp.float16 if far["TERMS"] > 1 else latent.dtype
            ),
            dense.partial(near["SPLITS"], near["TILES"]),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ],
        aliases={5: 3},
        num_warps=warps,
        **{name: near[name] for name in ("BLOCKS", "TILES", "SPLITS", "BFLOAT", "TERMS", "SCALED", "WARPS")},
        **{f"SECOND_{name}": far[name] for name in ("TILES", "SPLITS", "BFLOAT", "TERMS")},
        GROUPS=groups,
        JOINED=joined,
        DTYPE=triton_type(dtype),
        ROUND=bool(round_block),
        EACH=each,
        SECOND_EACH=second_each,
        HELD=tile["held"],
    )
    return out, counters
