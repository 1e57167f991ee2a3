"""The decoding state: one pytree, addressed by absolute position.

Knows: how many rows each cache needs, how rows are written to rings, and which position a ring slot holds.
Does not know: how rows are computed. A slot's position follows from arithmetic alone, so dropping rejected
rows is one smaller number (`length`): stale rows lie outside every mask and are overwritten later.

Why rings are longer than the window: a pass of T rows writes all of them before any is read, and up to T of
them may be rejected. With at least `window + T - 1` slots no row that a later query may still see is lost.
"""

import dataclasses

import jax
import jax.numpy as jnp

from v4flash.config import OVERLAPPED_RATIO, ModelConfig

_ALIGN = 8


def ring_capacity(span: int, max_rows: int) -> int:
    """Slots for a ring whose readers look `span` positions back while passes write `max_rows` rows."""
    return -(-(span + max_rows - 1) // _ALIGN) * _ALIGN


def ring_positions(capacity: int, last: jax.Array) -> jax.Array:
    """Absolute position held by each slot [capacity] when `last` is the newest written one; may be negative."""
    return last - (last - jnp.arange(capacity, dtype=jnp.int32)) % capacity


def ring_write(ring: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Stores rows[:count] at positions start, start+1, ...; other slots keep their rows.

    Args: ring [R, ...]; rows [T, ...] with T <= R; start, count int32 scalars.
    """
    if rows.shape[0] > ring.shape[0]:
        raise ValueError(
            f"{rows.shape[0]} rows for a ring of {ring.shape[0]}; create the state with max_rows >= rows"
        )
    source = ring_positions(ring.shape[0], start + count - 1) - start
    chosen = rows[jnp.clip(source, 0, rows.shape[0] - 1)].astype(ring.dtype)
    return jnp.where((source >= 0).reshape(-1, *[1] * (ring.ndim - 1)), chosen, ring)


def ring_read(ring: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows at absolute `positions` [...]; the caller masks positions the ring does not hold."""
    return ring[positions % ring.shape[0]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything one stream remembers.

    Attributes:
      length: int32 [], the number of committed tokens; the next row stands at this position.
      tokens: int32 [R], ring of token ids (n-gram memory reads a few positions back).
      windows: per backbone layer [R, head_dim], ring of rotated and rounded key-value rows.
      entries: {layer: [N, head_dim]} compressed entries of each layer that owns a compressor.
      index_keys: {layer: [N, index_head_dim]} index keys beside them, where the entries are chosen by index.
      pending: {layer: [R, 2, C]} float32 ring of compressor values and gates.
      index_pending: {layer: [R, 2, C]} the same for an index compressor of its own.
      draft_windows: per drafter stage [R, head_dim], ring of context rows (committed positions only).
    """

    length: jax.Array
    tokens: jax.Array
    windows: tuple[jax.Array, ...]
    entries: dict[int, jax.Array]
    index_keys: dict[int, jax.Array]
    pending: dict[int, jax.Array]
    index_pending: dict[int, jax.Array]
    draft_windows: tuple[jax.Array, ...]

    @classmethod
    def create(cls, config: ModelConfig, context: int, max_rows: int, dtype=jnp.float32) -> "DecodeState":
        """An empty state for `context` positions and passes of at most `max_rows` rows."""
        window = ring_capacity(config.sliding_window, max_rows)
        entries, index_keys, pending, index_pending = {}, {}, {}, {}
        for layer in config.layers:
            if not layer.owns_entries:
                continue
            slots = context // layer.ratio + closing_entries(max_rows, layer.ratio)
            entries[layer.index] = jnp.zeros((slots, config.head_dim), dtype)
            halves = 2 if config.compressor_position_bias and layer.ratio == OVERLAPPED_RATIO else 1
            rows = ring_capacity(halves * layer.ratio, max_rows)
            if layer.ratio > 1:
                pending[layer.index] = jnp.zeros((rows, 2, halves * config.head_dim), jnp.float32)
            if layer.owns_indexer:
                index_keys[layer.index] = jnp.zeros((slots, config.index_head_dim), dtype)
                if not config.latent_index_keys:
                    shape = (rows, 2, halves * config.index_head_dim)
                    index_pending[layer.index] = jnp.zeros(shape, jnp.float32)
        stages = config.draft.stages if config.draft else 0
        return cls(
            length=jnp.zeros((), jnp.int32),
            tokens=jnp.zeros((window,), jnp.int32),
            windows=tuple(jnp.zeros((window, config.head_dim), dtype) for _ in config.layers),
            entries=entries,
            index_keys=index_keys,
            pending=pending,
            index_pending=index_pending,
            draft_windows=tuple(jnp.zeros((window, config.head_dim), dtype) for _ in range(stages)),
        )

    def replace(self, **changes) -> "DecodeState":
        return dataclasses.replace(self, **changes)

    def with_window(self, layer: int, ring: jax.Array) -> "DecodeState":
        return self.replace(windows=self.windows[:layer] + (ring,) + self.windows[layer + 1 :])

    def with_item(self, field: str, layer: int, value: jax.Array) -> "DecodeState":
        """Replaces one layer's array in a per-layer mapping such as `entries`."""
        return self.replace(**{field: getattr(self, field) | {layer: value}})

    def advance(self, count: jax.Array) -> "DecodeState":
        """Commits the first `count` rows of the pass that was just written."""
        return self.replace(length=self.length + count)


def closing_entries(rows: int, ratio: int) -> int:
    """The most groups of `ratio` positions that a pass of `rows` rows can complete."""
    return -(-rows // ratio)


def write_entries(cache: jax.Array, new: jax.Array, first: jax.Array, valid: jax.Array) -> jax.Array:
    """Stores new[i] at entry first + i where valid[i]; the cache keeps slack so that the block always fits.

    Args: cache [N, d]; new [E, d]; first int32 []; valid bool [E].
    """
    old = jax.lax.dynamic_slice_in_dim(cache, first, new.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(
        cache, jnp.where(valid[:, None], new.astype(cache.dtype), old), first, 0
    )
