"""Many streams of the target's own text at once, for the drafter to learn from.

Knows: batched plain sampling. Does not know: drafting; this is no decoder for users, who have one stream.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from v4flash.state import DecodeState
from v4flash.training.stored_weights import Skeleton, Weights


def make_sampler(skeleton: Skeleton, new_tokens: int) -> Callable:
    """A jitted function (stored weights, key, prompts [B, P], temperature [B]) -> tokens [B, P + new_tokens].

    Every stream has its own fresh state: the prompt in one pass, then a token a step. A stream goes on after
    an end mark, as the training text does. Temperatures must be positive.
    """

    def sample(stored: Weights, key: jax.Array, prompts: jax.Array, temperature: jax.Array) -> jax.Array:
        model = skeleton.model(stored)
        streams, length = prompts.shape

        def advance(tokens: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
            count = jnp.int32(tokens.shape[0])
            output, state = model.backbone.trunk(tokens, state, count)
            return model.backbone.logits(output.hidden[-1:])[0], state.advance(count)

        def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
            return jax.random.categorical(key, logits / temperature[:, None]).astype(jnp.int32)

        def start(tokens: jax.Array):
            state = DecodeState.create(
                skeleton.config, length + new_tokens, max_rows=length, dtype=skeleton.numerics.dtype
            )
            return advance(tokens, state)

        logits, states = jax.vmap(start)(prompts)
        first_key, *keys = jax.random.split(key, new_tokens)

        def step(carry, key):
            newest, states = carry
            logits, states = jax.vmap(advance)(newest[:, None], states)
            following = pick(logits, key)
            return (following, states), newest

        first = pick(logits, first_key)
        (last, _), drawn = jax.lax.scan(step, (first, states), jnp.stack(keys))
        return jnp.concatenate([prompts, drawn.T, last[:, None]], axis=1)

    return jax.jit(sample)
