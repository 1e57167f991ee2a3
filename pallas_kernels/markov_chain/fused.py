"""Launches the fused Markov chain; the results of reference.py.

Knows: shapes, how the vocabulary is cut into slices, and how many programs may wait for each other. Does not know:
the arithmetic.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.device_laws import PARTS
from pallas_kernels.markov_chain import kernels
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import ChainSpec
from pallas_kernels.sampling_law.fused import options_of, shared_arrays, slices

COUNTER_LINES = 1
WARPS = 8
# All programs must be resident at once: two per processor of an H200, which has 132 of them and the fewest in mind.
GREEDY_PROGRAMS = 264
DRAWN_PROGRAMS = 132  # drawing takes more registers
MOST_TOKENS = 16
_TILE = 64  # rows of the bias' head that a program works on at once


def layout(spec: ChainSpec, programs: int) -> dict[str, int]:
    """The kernel's constants: slices as of laws, and each of them as TILES tiles of BV tokens."""
    cut = slices(spec.vocabulary, programs)
    own = cut["OWN"] * cut["BLOCK"]
    tile = min(_TILE, own)
    return cut | dict(RANK=spec.rank, BV=tile, TILES=own // tile)


def chain(
    spec: ChainSpec,
    base: jax.Array,
    anchor: jax.Array,
    embed: jax.Array,
    head: jax.Array,
    count: jax.Array,
    counters: jax.Array,
    draw: Draw | None = None,
    programs: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.chain` in one launch: ids [K], logits or laws [K, V], and the counters for the next kernel.

    Args: as there, and
      counters: from `device_barrier.counters`, at least COUNTER_LINES lines.
      programs: how many programs the GPU surely keeps resident, by default those of an H200.
    """
    tokens = base.shape[0]
    if base.shape[1] != spec.vocabulary or tokens > MOST_TOKENS:
        raise ValueError(
            f"base logits are {base.shape}, expected at most {MOST_TOKENS} rows of {spec.vocabulary}"
        )
    if head.shape != (spec.vocabulary, spec.rank) or embed.shape != head.shape:
        raise ValueError(
            f"tables are {embed.shape} and {head.shape}, expected {(spec.vocabulary, spec.rank)}"
        )
    tiles = layout(spec, programs or (GREEDY_PROGRAMS if draw is None else DRAWN_PROGRAMS))
    drawn, used = draw is not None, tiles["G"]
    if drawn:
        options, uniforms = options_of(draw.filters), draw.uniforms
        laws = shared_arrays(tokens, spec.vocabulary, tiles["BLOCKS"], used)
    else:  # what only drawing reads and writes has no room
        options, uniforms = jnp.ones((4,), jnp.float32), jnp.zeros((1, 2), jnp.float32)
        laws = shared_arrays(1, 1, 1, 1)
    rounds = (tokens * PARTS if drawn else tokens + 1) if launch.INTERPRETED else 1
    operands = [base, anchor.reshape(1), embed, head, count.reshape(1), options, uniforms, counters]
    ids, logits, _, _, laws, *_, counters = launch.call(
        kernels.chain,
        *operands,
        grid=(rounds, used),
        outputs=[
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens, spec.vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((tokens, used), jnp.float32),
            jax.ShapeDtypeStruct((tokens, used), jnp.int32),
            *laws,
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ],
        aliases={len(operands) - 1: 9},
        num_warps=WARPS,
        K=tokens,
        DRAWN=drawn,
        APART=launch.INTERPRETED,
        **tiles,
    )
    if drawn:
        return ids, jnp.where(jnp.arange(tokens)[:, None] < count, laws, 0.0), counters
    return ids, logits, counters
