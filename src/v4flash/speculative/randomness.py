"""Counter-based randomness: every draw is a function of (seed, absolute position, purpose) alone.

Knows: how a seed becomes a key, how a key, a token position and a purpose become uniforms, and how uniforms
become a token of a given law. Does not know: where the laws come from (filters.py) or what is done with the
draws (rejection.py).

Nothing is counted and no generator state is carried from step to step, so a run can be repeated from its
seed whatever the draft length, and cutting a step short moves no later draw. The three purposes never share
a key: a draft drawn with the noise that later judges or replaces it would bend the emitted law.

Positions are those of the token being drawn: the draft token that would stand at position t, the coin that
accepts or refuses it, and the token emitted at t in its stead all use position t.
"""

import enum
import operator

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError

_GENERATOR = "threefry2x32"
_WORD_BITS = 32
_SEED_LIMIT = 2**64
# Apart from every Purpose, so that no step key equals the key of a draw.
_ROUND = np.uint32(0)


class Purpose(enum.IntEnum):
    """What a draw is for. Other values would change what every seed means."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def seed_key(seed: int) -> jax.Array:
    """Turn a seed into key data: uint32 [2], plain data that can be carried in a state or an argument.

    Both halves of a 64-bit seed count, with or without jax's 64-bit mode.

    Raises:
      UsageError: `seed` is not an integer from 0 to 2**64 - 1.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool | np.bool_) or not 0 <= number < _SEED_LIMIT:
        raise UsageError(f"seed: expected a whole number from 0 to {_SEED_LIMIT - 1}, found {seed!r}.")
    low, high = number % 2**_WORD_BITS, number >> _WORD_BITS
    key = jax.random.key(np.uint32(low), impl=_GENERATOR)
    return jax.random.key_data(jax.random.fold_in(key, np.uint32(high)))


def round_key(key_data, first_position):
    """Key data for one speculative step, so that a position drafted again in a later step gets fresh noise.

    Steps begin at ever larger positions, hence no two share a key. Needed by the block-wise accept rule only:
    token by token, noise behind the first refusal has decided nothing and may be used again.

    Args:
      key_data: uint32 [2], from `seed_key`.
      first_position: int [], absolute position of the first token the step may emit.

    Returns:
      uint32 [2].
    """
    key = jax.random.wrap_key_data(key_data, impl=_GENERATOR)
    own = jax.random.fold_in(key, jnp.asarray(first_position).astype(jnp.uint32))
    return jax.random.key_data(jax.random.fold_in(own, _ROUND))


def uniform(key_data, position, purpose: Purpose, *, draws: tuple[int, ...] = (), dtype=jnp.float32):
    """Uniform numbers in [0, 1).

    Args:
      key_data: uint32 [2], from `seed_key`.
      position: integer [...], absolute token positions, at least 0.
      purpose: what the draw is for (static).
      draws: shape of the independent numbers wanted for each position (static); () gives one.
      dtype: float32 (multiples of 2**-23) or float64.

    Returns:
      dtype [..., *draws]. An entry depends on its own position only, not on the others beside it.
    """
    position = jnp.asarray(position)
    key = jax.random.wrap_key_data(key_data, impl=_GENERATOR)

    def at(one_position):
        own = jax.random.fold_in(jax.random.fold_in(key, one_position), np.uint32(purpose))
        return jax.random.uniform(own, draws, dtype)

    flat = jax.vmap(at)(position.reshape(-1).astype(jnp.uint32))
    return flat.reshape(position.shape + draws)


def categorical(probs, key_data, position, purpose: Purpose):
    """Draw one token from each law, by inversion of its distribution function (see `invert`).

    Args:
      probs: float [..., V], non-negative; need not sum to one.
      key_data: uint32 [2], from `seed_key`.
      position: integer, broadcastable to [...]; the absolute position of the token drawn.
      purpose: what the draw is for (static).

    Returns:
      int32 [...].
    """
    probs = jnp.asarray(probs)
    position = jnp.broadcast_to(jnp.asarray(position), probs.shape[:-1])
    return invert(probs, uniform(key_data, position, purpose, draws=(2,), dtype=probs.dtype))


def invert(probs, uniforms):
    """The token that two uniform numbers select from a law.

    The vocabulary is cut into about sqrt(V) blocks of about sqrt(V) tokens. The first number picks a block by
    the blocks' masses, the second a token inside it. Compared with one running sum over V this needs no long
    scan, and the second number keeps its whole resolution for the tokens of an unlikely block, so the grid
    of float32 uniforms does not thin out a long flat tail. Compared with the Gumbel trick it needs two random
    numbers instead of V.

    A token of probability zero is never selected, whatever rounding does to the sums.

    Args:
      probs: float [..., V], non-negative; need not sum to one. A row with NaN or without any mass selects an
        arbitrary token of the vocabulary.
      uniforms: same dtype [..., 2], in [0, 1).

    Returns:
      int32 [...], in [0, V).
    """
    vocabulary = probs.shape[-1]
    width = 1 << (vocabulary.bit_length() // 2)
    padding = -vocabulary % width
    padded = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, padding)])
    blocks = padded.reshape(*probs.shape[:-1], -1, width)
    block = _first_past(jnp.sum(blocks, axis=-1), uniforms[..., 0])
    chosen = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    token = block * width + _first_past(chosen, uniforms[..., 1])
    return jnp.minimum(token, vocabulary - 1)


def _first_past(weights, level):
    """First index with weight whose running sum exceeds `level` times the total; else the last such."""
    running = jnp.cumsum(weights, axis=-1)
    present = weights > 0
    past = (running > level[..., None] * running[..., -1:]) & present
    first = jnp.argmax(past, axis=-1)
    last = weights.shape[-1] - 1 - jnp.argmax(present[..., ::-1], axis=-1)
    return jnp.where(jnp.any(past, axis=-1), first, last).astype(jnp.int32)
