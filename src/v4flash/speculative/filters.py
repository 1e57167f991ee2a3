"""From logits to the law that tokens are drawn from: temperature, top-k, top-p, min-p.

Knows: the sampling options, their legal ranges, and the law they make of a row of logits. Does not know:
randomness, drafts, or how laws are compared.

Order: temperature, then top-k, then top-p over what top-k left (renormalised), then min-p relative to the
most likely token. This is the order of Hugging Face transformers' generation; vLLM applies min-p before
top-k, and llama.cpp applies temperature last.

Tokens are ranked by (logit, descending; id, ascending), a total order, so top-k keeps exactly k tokens and
top-p exactly the shortest sufficient prefix even where logits are equal. transformers keeps every token that
ties with the k-th.

The options are arrays, not Python numbers: one compiled program serves every setting. `kind_of_law` says which of
the bodies `LAWS` they ask for, so that a disabled filter costs nothing; a loop that needs laws chooses once, around it.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError

_INT32_MAX = np.iinfo(np.int32).max
# Bits that one pass of a search settles. A GPU reads the row once for all trial cuts of a pass and pays for passes, a
# CPU pays for sums. There passes are a loop, which compiles faster; a loop inside a captured graph may never end: the
# driver's scheduler of conditionals (580.159) was seen to wait for good.
_GPU_BITS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling options as device scalars; build with `make`, which checks the ranges.

    Attributes:
      temperature: float32 [], 0 means greedy.
      top_p: float32 [], 1 is off, 0 keeps exactly one token.
      top_k: int32 [], 0 is off, and so is anything from V up.
      min_p: float32 [], 0 is off.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array

    @classmethod
    def make(
        cls, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
    ) -> "SamplingParams":
        """Check the options on the host and turn them into arrays.

        A temperature too small for a normal float32 (below 1.2e-38) is greedy.

        Raises:
          UsageError: an option is outside its legal range, NaN, or not a number.
        """
        return cls(
            temperature=_real(
                "temperature", temperature, float(np.finfo(np.float32).max), "0 or more, finite"
            ),
            top_p=_real("top_p", top_p, 1.0, "from 0 (one token) to 1 (off)"),
            top_k=_count("top_k", top_k),
            min_p=_real("min_p", min_p, 1.0, "from 0 (off) to 1"),
        )


def _real(name, value, upper, legal):
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number <= upper:
        raise UsageError(f"{name}: expected a number {legal}, found {value!r}.")
    return jnp.asarray(number, jnp.float32)


def _count(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool | np.bool_) or number < 0:
        raise UsageError(f"{name}: expected a whole number, 0 (off) or more, found {value!r}.")
    return jnp.asarray(min(number, _INT32_MAX), jnp.int32)


def is_greedy(params: SamplingParams):
    """bool []: the temperature is zero, or too small to divide by."""
    return params.temperature < jnp.finfo(jnp.float32).tiny


def greedy_token(logits):
    """int32 [...] from [..., V]: the largest logit, the lowest id where several are equal."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def has_usable_logits(logits):
    """bool [...] from [..., V]: no NaN, no +inf, and at least one finite entry (-inf forbids a token).

    Any other row has no law. `target_law` makes NaN of it, but an argmax would hide it behind a token id, so
    whoever emits tokens must look at this flag.
    """
    top = jnp.max(logits, axis=-1)
    return jnp.isfinite(top) & ~jnp.any(jnp.isnan(logits), axis=-1)


def target_law(logits, params: SamplingParams):
    """The law of the next token after all sampling options.

    Serves target and draft rows alike: a draft must be drawn from, and judged by, the law this returns.

    Args:
      logits: float [..., V]; -inf forbids a token.
      params: the sampling options (data).

    Returns:
      float32 (float64 for float64 logits) [..., V], each row summing to one. At temperature 0 the row is
      one at the greedy token and zero elsewhere. A row without a law (see `has_usable_logits`) is NaN,
      except at temperature 0.
    """
    kind = kind_of_law(params, jnp.shape(logits)[-1])
    return jax.lax.switch(kind, [functools.partial(law, logits, params) for law in LAWS])


def kind_of_law(params: SamplingParams, vocabulary: int):
    """int32 []: which of `LAWS` these options ask for."""
    ranked = _top_k_on(params, vocabulary).astype(jnp.int32) + (params.top_p < 1)
    return jnp.where(is_greedy(params), GREEDY, UNRANKED + ranked)


def _top_k_on(params, vocabulary):
    return (params.top_k > 0) & (params.top_k < vocabulary)


def _greedy(logits, params):
    logits = _wide(logits)
    return jax.nn.one_hot(greedy_token(logits), logits.shape[-1], dtype=logits.dtype)


def _unranked(logits, params):
    return _normalise(_min_p(_weights(_wide(logits), params.temperature), params.min_p))


def _ranked_once(logits, params):
    """Either top-k or top-p: one search, whose numbers say which."""
    logits = _wide(logits)
    weights, by_count = _weights(logits, params.temperature), _top_k_on(params, logits.shape[-1])
    return _normalise(_min_p(_narrowed(_order_code(logits), weights, params, by_count), params.min_p))


def _ranked_twice(logits, params):
    """Top-k, then top-p over what it left."""
    logits = _wide(logits)
    order, weights = _order_code(logits), _weights(logits, params.temperature)
    for by_count in (True, False):
        weights = _narrowed(order, weights, params, jnp.asarray(by_count))
    return _normalise(_min_p(weights, params.min_p))


# Bodies of `target_law`, each for one kind of options.
GREEDY, UNRANKED = 0, 1
LAWS = (_greedy, _unranked, _ranked_once, _ranked_twice)


def _wide(logits):
    logits = jnp.asarray(logits)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _weights(logits, temperature):
    """Unnormalised probabilities, exactly 1 for the most likely token.

    The largest logit is taken off before the division, so a tiny temperature can only drive the others to
    zero, never anything to infinity.
    """
    return jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature.astype(logits.dtype))


def _normalise(weights):
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _min_p(weights, min_p):
    """The most likely token has weight 1, so the cut is at `min_p` itself."""
    return jnp.where(weights < min_p, 0, weights)


def _narrowed(order, weights, params, by_count):
    """The weights [..., V] that top-k, where `by_count` (bool []), or top-p leaves, zero elsewhere."""
    # The first token alone weighs 1; a target above 0 keeps the prefix from being empty when top_p is 0.
    mass = jnp.maximum(params.top_p * jnp.sum(weights, axis=-1), jnp.finfo(weights.dtype).tiny)
    target = jnp.where(by_count, params.top_k.astype(weights.dtype), mass)
    kept = _shortest_prefix(order, jnp.where(by_count, 1, weights), target)
    return jnp.where(kept, weights, 0)


def _order_code(logits):
    """Unsigned integers [..., V] that compare as the logits do (-0 equals +0)."""
    word = jnp.uint32 if logits.dtype == jnp.float32 else jnp.uint64
    sign = jnp.asarray(1 << (jnp.iinfo(word).bits - 1), word)
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), word)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _shortest_prefix(order, weights, target):
    """Mask of the shortest ranked prefix that carries at least `target` weight.

    Sorting a whole vocabulary costs more than a hundred milliseconds on a small CPU. Instead the logit at
    the cut is found a few bits at a time, with sums over the row; where several tokens share that logit,
    a second search finds the last id that is needed. Sums of non-negative numbers in one fixed order
    never decrease when a term grows, so rounding cannot mislead the search.

    Args:
      order: unsigned [..., V], from `_order_code`.
      weights: float [..., V], non-negative.
      target: float [...] or [], above 0.
    """
    vocabulary = order.shape[-1]
    cut = _largest_cut(order, jnp.iinfo(order.dtype).bits, weights, target)[..., None]
    tied = order == cut

    def by_id():
        seat = vocabulary - jnp.arange(vocabulary, dtype=jnp.uint32)
        ahead = jnp.where(order > cut, np.uint32(vocabulary), jnp.where(tied, seat, np.uint32(0)))
        # A token above the cut outranks every tied one; the first id shares its seat and is needed anyway.
        last = _largest_cut(ahead, vocabulary.bit_length(), weights, target)[..., None]
        return ahead >= jnp.maximum(last, 1)

    return jax.lax.cond(jnp.any(jnp.sum(tied, axis=-1) > 1), by_id, lambda: order >= cut)


def _largest_cut(rank, bits, weights, target):
    """Largest c [...] below 2**bits for which the weights of rank >= c still sum to `target`; 0 if none."""
    on_cpu = functools.partial(_search, bits=bits, width=1, unroll=False)
    elsewhere = functools.partial(_search, bits=bits, width=_GPU_BITS, unroll=True)
    return jax.lax.platform_dependent(rank, weights, target, cpu=on_cpu, default=elsewhere)


def _search(rank, weights, target, *, bits, width, unroll):
    """`_largest_cut`, settling `width` bits a pass."""
    passes = -(-bits // width)

    def settle(number, cut):
        low = (width * (passes - 1 - number)).astype(rank.dtype)
        trials = [cut + (rank.dtype.type(trial) << low) for trial in range(1, 2**width)]
        return cut + (
            sum((mass >= target).astype(rank.dtype) for mass in _masses(rank, weights, trials)) << low
        )

    start = jnp.zeros(rank.shape[:-1], rank.dtype)
    return jax.lax.fori_loop(0, passes, settle, start, unroll=unroll)


def _masses(rank, weights, trials):
    """Sum [...] of the weights of rank >= c for every c [...] of `trials`; the row is read once for all."""
    terms = tuple(jnp.where(rank >= trial[..., None], weights, 0) for trial in trials)
    zeros = (np.zeros((), weights.dtype),) * len(terms)

    def added(ours, theirs):
        return tuple(one + other for one, other in zip(ours, theirs, strict=True))

    return jax.lax.reduce(terms, zeros, added, (rank.ndim - 1,))
