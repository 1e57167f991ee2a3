"""The part of a decoding state that later rows can still see, by absolute position.

Knows: which slots of each ring, and which entries, count at a given length. Does not know: what is compared with
what, or how rows are computed. Everything else in a state is stale: rows of rejected drafts, rows that left the
window, slots never written.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from v4flash.config import OVERLAPPED_RATIO, ModelConfig
from v4flash.state import DecodeState

_NGRAM_REACH = 3  # an n-gram memory of order 4 reads three tokens back
_TUPLES = {"windows": "window", "draft_windows": "draft window"}
_MAPPINGS = {"entries": False, "index_keys": False, "pending": True, "index_pending": True}


def _visible_slots(config: ModelConfig, state: DecodeState) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """(field, layer or stage, visible slots from the oldest to the newest) of every array but `length`."""
    length = int(state.length)

    def ring(capacity: int, reach: int) -> np.ndarray:
        return np.arange(max(0, length - reach), length) % capacity

    yield "tokens", None, ring(state.tokens.shape[0], _NGRAM_REACH)
    for layer, rows in enumerate(state.windows):
        yield "windows", layer, ring(rows.shape[0], config.sliding_window - 1)
    for stage, rows in enumerate(state.draft_windows):
        yield "draft_windows", stage, ring(rows.shape[0], config.sliding_window)
    for field, is_ring in _MAPPINGS.items():
        for layer, rows in getattr(state, field).items():
            ratio = config.layers[layer].ratio
            overlap = ratio if config.compressor_position_bias and ratio == OVERLAPPED_RATIO else 0
            pending = ring(rows.shape[0], length % ratio + overlap)
            yield field, layer, pending if is_ring else np.arange(length // ratio)


def visible_state(config: ModelConfig, state: DecodeState) -> dict[str, np.ndarray]:
    """Every visible array on the host, under names such as 'window 3' or 'entries 2'; oldest rows first."""
    seen = {"length": np.asarray(state.length)}
    for field, key, slots in _visible_slots(config, state):
        array = getattr(state, field)
        name = field if key is None else f"{_TUPLES.get(field, field)} {key}"
        seen[name] = np.asarray(array if key is None else array[key])[slots]
    return seen


def without_stale_rows(config: ModelConfig, state: DecodeState) -> DecodeState:
    """The same state with every row zero that nothing can see any more."""
    kept: dict = {}
    for field, key, slots in _visible_slots(config, state):
        array = getattr(state, field) if key is None else getattr(state, field)[key]
        kept.setdefault(field, {})[key] = jnp.zeros_like(array).at[slots].set(array[slots])
    arrays = {field: tuple(found.values()) if field in _TUPLES else found for field, found in kept.items()}
    return state.replace(**arrays | {"tokens": kept["tokens"][None]})
