"""What the Markov chain of the drafter computes, in plain jax.numpy.

Knows: the low-rank bias of a row's logits by the token before it, and the choice of each token: the largest logit,
or a draw by two uniform numbers from the law that temperature and filters make of the logits. Does not know: where the
logits come from, or how drafts are verified.

    anchor -> bias + logits[0] -> token 0 -> bias + logits[1] -> token 1 -> ...

Source of the bias: DeepSeek inference/model.py (`DSparkBlock`, V4.1) and the DSpark paper.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.markov_chain.specs import ChainSpec
from pallas_kernels.sampling_law.reference import Filters, weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """How tokens are drawn instead of taken greedily.

    Attributes:
      filters: what makes the law of a token of its logits.
      uniforms: float32 [K, 2] in [0, 1): the first picks a block of tokens, the second one of its tokens.
    """

    filters: Filters
    uniforms: jax.Array


def first_past(masses: jax.Array, level: jax.Array) -> jax.Array:
    """First index with mass whose running sum exceeds `level` times the whole; else the last index with mass."""
    running = jnp.cumsum(masses)
    present = masses > 0
    past = (running > level * running[-1]) & present
    last = masses.shape[0] - 1 - jnp.argmax(present[::-1])
    return jnp.where(jnp.any(past), jnp.argmax(past), last).astype(jnp.int32)


def drawn(spec: ChainSpec, masses: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Token id int32 [] of unnormalised probabilities [V]: a block by the first number, a token of it by the second."""
    padded = jnp.pad(masses, (0, spec.blocks * spec.block - spec.vocabulary))
    blocks = padded.reshape(spec.blocks, spec.block)
    block = first_past(jnp.sum(blocks, axis=1), uniforms[0])
    return jnp.minimum(block * spec.block + first_past(blocks[block], uniforms[1]), spec.vocabulary - 1)


def chain(
    spec: ChainSpec,
    base: jax.Array,
    anchor: jax.Array,
    embed: jax.Array,
    head: jax.Array,
    count: jax.Array,
    draw: Draw | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Drafted ids int32 [K], and what they were chosen by, float32 [K, V]: biased logits, or laws when drawn.

    Args:
      base: float32 [K, V], logits before the bias.
      anchor: int32 [], the token before the first.
      embed, head: [V, rank], the two tables of the bias; products and sums are in float32.
      count: int32 [], how many tokens are wanted. Behind them ids are 0, laws zero, and logits anything (zeros here;
        the fused body leaves them unwritten).
      draw: None takes the largest logit, the lowest id where several are equal.
    """

    def row(previous: jax.Array, inputs: tuple) -> tuple:
        j, logits, uniforms = inputs
        bias = jnp.einsum(
            "r,vr->v", embed[previous].astype(jnp.float32), head.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
        by = logits + bias
        if draw is None:
            token = jnp.argmax(by).astype(jnp.int32)
        else:
            masses = weights(by, draw.filters)
            token, by = drawn(spec, masses, uniforms), masses / jnp.sum(masses)
        wanted = j < count
        return token, (jnp.where(wanted, token, 0), jnp.where(wanted, by, 0.0))

    uniforms = jnp.zeros((base.shape[0], 2)) if draw is None else draw.uniforms
    _, made = jax.lax.scan(row, anchor, (jnp.arange(base.shape[0]), base, uniforms))
    return made
