"""Expert weights from the published layout to the tiles that the kernels stream.

Knows: which rows of w1 and w3 share a tile. Does not know: the bits of a tile (`pallas_kernels.tiles`), or which
experts stay on a device: an arena is any stack of packed experts, and expert ids index that stack.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.tiles import PackedMatrix

CHANNELS = tiles.TILE // 2  # gate channels, and as many up channels, of a tile


class PackedExperts(NamedTuple):
    """Gate and up as one matrix [2 F, D] in tiles of 16 + 16 rows, and down [D, F]; FP4 stacked or FP8."""

    gate_up: PackedMatrix
    down: PackedMatrix


def interleaved(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Rows of gate and up [..., F, X] as [..., 2 F, X]: 16 gate rows, then the up rows of the same channels."""
    shape = (*gate.shape[:-2], -1, CHANNELS, gate.shape[-1])
    both = jnp.stack([gate.reshape(shape), up.reshape(shape)], axis=-3)
    return both.reshape(*gate.shape[:-2], -1, gate.shape[-1])


def pack_routed(w1, w1_scale, w3, w3_scale, w2, w2_scale, name: str = "expert") -> PackedExperts:
    """FP4 experts: w1, w3 uint8 [..., F, D/2] and w2 [..., D, F/2], scale bytes per row and 32 columns.

    F must be a multiple of 32, D too. Raises ValueError for scales that packing cannot hold (`tiles.pack_fp4`).
    """
    _require_multiples(w1.shape[-2], w2.shape[-2], name)
    return PackedExperts(
        tiles.pack_fp4(interleaved(w1, w3), interleaved(w1_scale, w3_scale), f"{name}.w1 or w3"),
        tiles.pack_fp4(w2, w2_scale, f"{name}.w2"),
    )


def pack_shared(w1, w1_scale, w3, w3_scale, w2, w2_scale, block: int, name: str = "expert") -> PackedExperts:
    """The FP8 expert: w1, w3 E4M3 [F, D] and w2 [D, F], scale bytes per block x block weights."""
    _require_multiples(w1.shape[-2], w2.shape[-2], name)
    gate, up = (tiles.scales_of_halves(scale, block, w1.shape[-2]) for scale in (w1_scale, w3_scale))
    scale = jnp.stack([gate, up], axis=-2).reshape(*gate.shape[:-2], -1, gate.shape[-1])
    return PackedExperts(
        tiles.pack_fp8_halves(interleaved(w1, w3), scale, block, f"{name}.w1 or w3"),
        tiles.pack_fp8(w2, w2_scale, block, f"{name}.w2"),
    )


def _require_multiples(width: int, hidden: int, name: str) -> None:
    if width % tiles.BLOCK or hidden % tiles.BLOCK:
        raise ValueError(
            f"{name} has {width} channels over a model width of {hidden}, expected multiples of {tiles.BLOCK}"
        )
