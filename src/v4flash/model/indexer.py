"""The lightning indexer: which compressed entries each query attends to.

Knows: index queries and keys, their scores, the total order of the selection (score, then lower entry) and
V4.1's candidate blocks. Does not know: attention over the chosen entries.

Source: DeepSeek inference/model.py (`Indexer`), V4.1's two-level selection included.
"""

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.config import LayerConfig, ModelConfig
from v4flash.model.compressor import Compressor
from v4flash.model.numerics import Linear, Norm, Numerics, rope_frequencies, rotate
from v4flash.state import DecodeState, write_entries

INDEX_BLOCK = 32
TEACHING_WEIGHT = 2e-5  # below one over the rows of a training batch: the indexer learns beside the model


@dataclasses.dataclass(frozen=True)
class Selection:
    """Entries chosen for each query, as the mask [T, N] or as the ids [T, K] with their validity [T, K].

    `scores` [T, N], beside a mask, are the index scores it came from; training teaches them what attention
    then looked at (`teach_index`).
    """

    mask: jax.Array | None = None
    scores: jax.Array | None = None
    ids: jax.Array | None = None
    valid: jax.Array | None = None


@jax.custom_vjp
def _with_slope(output: jax.Array, scores: jax.Array, slope: jax.Array) -> jax.Array:
    """`output` unchanged; in a backward pass `scores` receives the gradient `slope`."""
    return output


_with_slope.defvjp(
    lambda output, scores, slope: (output, slope),
    lambda slope, gradient: (gradient, slope, jnp.zeros_like(slope)),
)


def teach_index(output: jax.Array, scores: jax.Array, weights: jax.Array, allowed: jax.Array) -> jax.Array:
    """Passes attention's output on; when trained, the index scores learn the attention over their entries.

    A hard choice gives its scores no gradient, so their loss is stated here: TEACHING_WEIGHT per row times the
    divergence KL(attention || softmax(scores)) over the allowed entries. It touches nothing but the indexer,
    whose inputs are cut off from the gradient. Source: the DeepSeek-V3.2 report's training of its indexer.

    Args: output, any array of the attention; scores [T, N]; weights [T, H, N], attention over the entries;
    allowed bool [T, N].
    """
    attention = jnp.sum(weights.astype(jnp.float32), axis=1)
    mass = jnp.sum(attention, axis=-1, keepdims=True)
    usable = mass > 0
    attention = attention / jnp.where(usable, mass, 1.0)
    guess = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(jnp.float32).min), axis=-1)
    slope = jnp.where(usable & allowed, guess - attention, 0.0) * TEACHING_WEIGHT
    return _with_slope(output, scores, jax.lax.stop_gradient(slope))


def visible_entries(positions: jax.Array, ratio: int, slots: int) -> jax.Array:
    """bool [T, N]: entry j is visible to the query at position t when its group is complete, j < (t+1)//ratio."""
    return jnp.arange(slots, dtype=jnp.int32) < ((positions + 1) // ratio)[:, None]


def index_scores(query: jax.Array, key: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    """sum_h weight[t, h] * relu(query[t, h] . key[n]) in float32: [T, N]. Zero is always +0."""
    hits = jax.nn.relu(numerics.product("thd,nd->thn", query, key))
    scores = jnp.sum(hits * weight[..., None], axis=1)
    return jnp.where(scores == 0, 0.0, scores)


def top_entries(scores: jax.Array, allowed: jax.Array, count: int) -> Selection:
    """The `count` best allowed entries of each row, ties to the lower index, as ids and validity."""
    best, ids = jax.lax.top_k(jnp.where(allowed, scores, -jnp.inf), count)
    return Selection(ids=ids, valid=best > -jnp.inf)


def kth_largest(scores: jax.Array, k: int) -> jax.Array:
    """The k-th largest value of each row of float32 scores [T, N] without NaN and -0, exactly: [T, 1].

    Floats order like their bits once negative ones are complemented and the sign is flipped. The answer is
    built bit by bit from the top by counting; for many rows that reads less memory than sorting them.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)

    def add_bit(step, edge):
        raised = edge | (sign >> step.astype(jnp.uint32))
        enough = jnp.sum(ordered >= raised, axis=-1, keepdims=True) >= k
        return jnp.where(enough, raised, edge)

    edge = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((scores.shape[0], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(jnp.where(edge >= sign, edge ^ sign, ~edge), jnp.float32)


def top_mask(scores: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """The same set as `top_entries`, as a mask [T, N]."""
    if count >= scores.shape[-1]:
        return allowed
    scores = jnp.where(allowed, jax.lax.stop_gradient(scores), -jnp.inf)
    edge = kth_largest(scores, count)
    above = scores > edge
    tied = allowed & (scores == edge)
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= room))


def candidate_blocks(scores: jax.Array, visible: jax.Array, block: int, count: int) -> jax.Array:
    """Entries [T, N] inside the `count` best blocks of `block` entries, the newest visible block forced in.

    A block's score is the best visible score in it; blocks without a visible entry are never kept.
    """
    rows, slots = scores.shape
    pad = -slots % block
    padded = jnp.pad(jnp.where(visible, scores, -jnp.inf), ((0, 0), (0, pad)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(rows, -1, block), axis=-1)
    newest = (jnp.sum(visible, axis=-1) - 1) // block
    forced = jnp.arange(best.shape[-1]) == newest[:, None]
    kept = top_mask(jnp.where(forced, jnp.inf, best), best > -jnp.inf, count)
    return jnp.repeat(kept, block, axis=-1)[:, :slots]


class Indexer(nnx.Module):
    """Scores a source's entries for each query and keeps the best `index_topk`.

    Parameters: wq_b [Hi*di, q_lora], weights_proj [Hi, D]; at V4.1 key owners wk [di, head_dim] and k_norm; at
    V4 owners a compressor of width di.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, numerics: Numerics):
        heads, width = config.index_n_heads, config.index_head_dim
        self.config, self.layer, self.numerics = config, layer, numerics
        scores = layer.owns_indexer
        latent = layer.owns_entries and config.latent_index_keys
        pooled = layer.owns_entries and not config.latent_index_keys
        self.wq_b = Linear(heads * width, config.q_lora_rank, "fp8", config, numerics) if scores else None
        self.weights_proj = Linear(heads, config.hidden_size, "bf16", config, numerics) if scores else None
        self.wk = Linear(width, config.head_dim, "bf16", config, numerics) if latent else None
        self.k_norm = Norm(width, config.rms_norm_eps, numerics) if latent else None
        self.compressor = Compressor(config, layer.ratio, width, numerics) if pooled else None

    @property
    def frequencies(self) -> np.ndarray:
        return rope_frequencies(
            self.config.compress_rope, min(self.config.qk_rope_head_dim, self.config.index_head_dim)
        )

    def rounded(self, x: jax.Array) -> jax.Array:
        """Rotation to the Hadamard basis (V4) and FP4 rounding of index vectors, in `qat` mode only.

        Without rounding the orthonormal Hadamard transform cancels in every dot product, so it is left out.
        """
        if not self.numerics.quantise:
            return x
        return formats.fp4_index_round_trip(
            formats.hadamard_transform(x) if self.config.hadamard_index else x, INDEX_BLOCK
        )

    def write_keys(
        self, state: DecodeState, x: jax.Array, latent: jax.Array, count: jax.Array
    ) -> DecodeState:
        """Adds the index keys of entries that close inside this pass."""
        layer, ratio = self.layer.index, self.layer.ratio
        if self.compressor is not None:
            x = jax.lax.stop_gradient(x)
            key, first, valid, ring = self.compressor(x, state.index_pending[layer], state.length, count)
            state = state.with_item("index_pending", layer, ring)
        else:
            key = self.k_norm(self.wk(jax.lax.stop_gradient(latent)))
            first = state.length // ratio
            valid = (first + jnp.arange(key.shape[0]) + 1) * ratio <= state.length + count
        index = first + jnp.arange(key.shape[0], dtype=jnp.int32)
        key = self.rounded(rotate(key, index * ratio, self.frequencies))
        return state.with_item("index_keys", layer, write_entries(state.index_keys[layer], key, first, valid))

    def __call__(
        self,
        x: jax.Array,
        q_latent: jax.Array,
        keys: jax.Array,
        positions: jax.Array,
        candidates: jax.Array | None,
    ) -> tuple[Selection, jax.Array | None]:
        """Selection for rows x [T, D] over index keys [N, di], and the candidate mask this layer publishes."""
        config = self.config
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        query = self.wq_b(q_latent).reshape(x.shape[0], config.index_n_heads, config.index_head_dim)
        query = self.rounded(rotate(query, positions, self.frequencies))
        weight = (
            self.weights_proj(x).astype(jnp.float32) * (config.index_head_dim * config.index_n_heads) ** -0.5
        )
        scores = index_scores(query, keys, weight, self.numerics)
        visible = visible_entries(positions, self.layer.ratio, keys.shape[0])
        if self.layer.candidate == "source":
            candidates = candidate_blocks(
                scores, visible, config.candidate_block_size, config.candidate_topk_blocks
            )
        allowed = visible & candidates if self.layer.candidate == "member" else visible
        count = min(config.index_topk, keys.shape[0])
        if reads_densely(x.shape[0], count, keys.shape[0]):
            return Selection(mask=top_mask(scores, allowed, count), scores=scores), candidates
        return top_entries(scores, allowed, count), candidates


def reads_densely(rows: int, chosen: int, slots: int) -> bool:
    """Whether attention reads all entries once under a mask instead of gathering each row's choice."""
    return slots <= rows * chosen
