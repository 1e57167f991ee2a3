"""Launches the fused Markov chain; the results of reference.py.

Knows: shapes, how the vocabulary is cut into slices, and how many programs may wait for each other. Does not know:
the arithmetic.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.markov_chain import kernels
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import ChainSpec

COUNTER_LINES = 1
WARPS = 8
# All programs must be resident at once: two per processor of an H200, which has 132 of them and the fewest in mind.
GREEDY_PROGRAMS = 264
DRAWN_PROGRAMS = 132  # drawing takes more registers
MOST_TOKENS = 16
_TILE = 64  # rows of the bias' head that a program works on at once


def layout(spec: ChainSpec, programs: int) -> dict[str, int]:
    """The kernel's constants: G programs of TILES tiles of BV tokens, which are OWN blocks each."""
    own = 1 << (-(-spec.blocks // programs) - 1).bit_length()
    used = -(-spec.blocks // own)
    tile = min(_TILE, own * spec.block)
    return dict(
        V=spec.vocabulary, RANK=spec.rank, BV=tile, TILES=own * spec.block // tile, BLOCK=spec.block,
        BLOCKS=spec.blocks, BP=_padded(spec.blocks), OWN=own, G=used, GP=_padded(used),
    )  # fmt: skip


def _padded(number: int) -> int:
    return 1 << (number - 1).bit_length()


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
    """`reference.chain` in one launch: ids [K], logits [K, V], and the counters for the next kernel.

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
    none = jnp.zeros((1,), jnp.float32)
    if draw is None:
        options = [none, none, none]
    else:
        options = [draw.temperature.reshape(1), draw.min_p.reshape(1), draw.uniforms]
    rounds = tokens * (1 if draw is None else 2) + 1 if launch.INTERPRETED else 1
    operands = [base, anchor.reshape(1), embed, head, count.reshape(1), *options, counters]

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ids, logits, _, _, _, counters = launch.call(
        kernels.chain,
        *operands,
        grid=(rounds, tiles["G"]),
        outputs=[
            array(tokens, dtype=jnp.int32),
            array(tokens, spec.vocabulary),
            array(tokens, tiles["G"]),
            array(tokens, tiles["G"], dtype=jnp.int32),
            array(tokens, spec.blocks),
            array(*counters.shape, dtype=jnp.int32),
        ],
        aliases={len(operands) - 1: 5},
        num_warps=WARPS,
        K=tokens,
        DRAWN=draw is not None,
        APART=launch.INTERPRETED,
        **tiles,
    )
    return ids, logits, counters
