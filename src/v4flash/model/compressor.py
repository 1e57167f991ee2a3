"""Compressed entries: groups of consecutive tokens pooled into one key-value row.

Knows: the pooling rules of both families and how entries that close inside a pass are found in the ring of
pending rows. Does not know: who attends to the entries, or how an index key is made from them.

    positions   ... 4 5 6 7 | 8 9 10 11 | 12 ...        ratio 4, overlapped (V4):
    entry 2 =   first halves of 4..7  +  second halves of 8..11, softmax per channel over the eight

Source: DeepSeek inference/model.py (`Compressor`).
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.config import OVERLAPPED_RATIO, ModelConfig
from v4flash.model.numerics import Linear, Norm, Numerics
from v4flash.state import closing_entries, ring_read, ring_write


class Compressor(nnx.Module):
    """Pools tokens into entries of `width` channels; see `pooled` for the rule."""

    def __init__(self, config: ModelConfig, ratio: int, width: int, numerics: Numerics):
        self.ratio = ratio
        self.width = width
        self.numerics = numerics
        self.overlap = config.compressor_position_bias and ratio == OVERLAPPED_RATIO
        halves = 2 if self.overlap else 1
        self.wkv = Linear(halves * width, config.hidden_size, "bf16", config, numerics)
        self.wgate = (
            Linear(halves * width, config.hidden_size, "bf16", config, numerics) if ratio > 1 else None
        )
        biased = config.compressor_position_bias
        self.ape = nnx.Param(jnp.zeros((ratio, halves * width), jnp.float32)) if biased else None
        self.norm = Norm(width, config.rms_norm_eps, numerics)

    def __call__(
        self, x: jax.Array, ring: jax.Array | None, start: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Pools the entries that rows x [T, D] at positions start.. complete.

        Returns: (latent entries [E, width] before rotation, first entry index, valid [E], new ring).
        """
        rows = x.shape[0]
        positions = start + jnp.arange(rows, dtype=jnp.int32)
        value = self.numerics.exact_product("tk,nk->tn", x, self.wkv.weight[...])
        first = start // self.ratio
        index = first + jnp.arange(closing_entries(rows, self.ratio), dtype=jnp.int32)
        valid = (index + 1) * self.ratio <= start + count
        if self.ratio == 1:
            return self.norm(value.astype(self.numerics.dtype)), first, valid, None
        gate = self.numerics.exact_product("tk,nk->tn", x, self.wgate.weight[...])
        if self.ape is not None:
            gate = gate + self.ape[...][positions % self.ratio]
        ring = ring_write(ring, jnp.stack([value, gate], axis=1), start, count)
        pooled = self.pooled(ring, index)
        return self.norm(pooled.astype(self.numerics.dtype)), first, valid, ring

    def pooled(self, ring: jax.Array, index: jax.Array) -> jax.Array:
        """Gate-weighted mean of each entry's items, per channel, float32: [E, width]."""
        members = index[:, None] * self.ratio + jnp.arange(self.ratio, dtype=jnp.int32)
        own = ring_read(ring, members)
        value, gate = own[:, :, 0, -self.width :], own[:, :, 1, -self.width :]
        if self.overlap:
            before = members - self.ratio
            previous = ring_read(ring, before)[..., : self.width]
            missing = (before < 0)[..., None]
            value = jnp.concatenate([jnp.where(missing, 0.0, previous[:, :, 0]), value], axis=1)
            gate = jnp.concatenate([jnp.where(missing, -jnp.inf, previous[:, :, 1]), gate], axis=1)
        return jnp.sum(jax.nn.softmax(gate, axis=1) * value, axis=1)
