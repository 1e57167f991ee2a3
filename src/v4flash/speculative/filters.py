"""From logits to the law that tokens are drawn from: temperature, top-k, top-p, min-p.

Knows: the sampling options, their legal ranges, and the law they make of a row of logits. Does not know:
randomness, drafts, or how laws are compared.

Order: temperature, then top-k, then top-p over what top-k left (renormalised), then min-p relative to the
most likely token. This is the order of Hugging Face transformers' generation; vLLM applies min-p before
top-k, and llama.cpp applies temperature last.

Tokens are ranked by (logit, descending; id, ascending), a total order, so top-k keeps exactly k tokens and
top-p exactly the shortest sufficient prefix even where logits are equal. transformers keeps every token that
ties with the k-th.

The options are arrays, not Python numbers: one compiled program serves every setting. Branches are chosen by
`jax.lax.switch`/`cond` on these scalars, so a disabled filter costs nothing.
"""

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError

_INT32_MAX = np.iinfo(np.int32).max


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
    logits = jnp.asarray(logits)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    vocabulary = logits.shape[-1]
    top_k_on = (params.top_k > 0) & (params.top_k < vocabulary)
    top_p_on = params.top_p < 1

    def greedy():
        return jax.nn.one_hot(greedy_token(logits), vocabulary, dtype=logits.dtype)

    def unranked():
        return _normalise(_min_p(_weights(logits, params.temperature), params.min_p))

    def ranked():
        weights = _weights(logits, params.temperature)
        order = _order_code(logits)
        weights = jax.lax.cond(top_k_on, lambda w: _top_k(order, w, params.top_k), lambda w: w, weights)
        weights = jax.lax.cond(top_p_on, lambda w: _top_p(order, w, params.top_p), lambda w: w, weights)
        return _normalise(_min_p(weights, params.min_p))

    branch = jnp.where(is_greedy(params), 0, jnp.where(top_k_on | top_p_on, 2, 1))
    return jax.lax.switch(branch, [greedy, unranked, ranked])


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


def _top_k(order, weights, top_k):
    ones = jnp.ones((), weights.dtype)
    return jnp.where(_shortest_prefix(order, ones, top_k.astype(weights.dtype)), weights, 0)


def _top_p(order, weights, top_p):
    # The first token alone weighs 1; a target above 0 keeps the prefix from being empty when top_p is 0.
    target = jnp.maximum(top_p * jnp.sum(weights, axis=-1), jnp.finfo(weights.dtype).tiny)
    return jnp.where(_shortest_prefix(order, weights, target), weights, 0)


def _order_code(logits):
    """Unsigned integers [..., V] that compare as the logits do (-0 equals +0)."""
    word = jnp.uint32 if logits.dtype == jnp.float32 else jnp.uint64
    sign = jnp.asarray(1 << (jnp.iinfo(word).bits - 1), word)
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), word)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _shortest_prefix(order, weights, target):
    """Mask of the shortest ranked prefix that carries at least `target` weight.

    Sorting a whole vocabulary costs more than a hundred milliseconds on a small CPU. Instead the logit at
    the cut is found bit by bit, each bit with one sum over the row; where several tokens share that logit,
    a second search finds the last id that is needed. Sums of non-negative numbers in one fixed order
    never decrease when a term grows, so rounding cannot mislead the search.

    Args:
      order: unsigned [..., V], from `_order_code`.
      weights: float [..., V] or [], non-negative.
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

    def settle_bit(step, cut):
        trial = cut | (jnp.ones((), rank.dtype) << (bits - 1 - step).astype(rank.dtype))
        mass = jnp.sum(jnp.where(rank >= trial[..., None], weights, 0), axis=-1)
        return jnp.where(mass >= target, trial, cut)

    return jax.lax.fori_loop(0, bits, settle_bit, jnp.zeros(rank.shape[:-1], rank.dtype))
