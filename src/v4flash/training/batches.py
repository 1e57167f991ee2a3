"""Random crops of the token streams, drawn on the device.

Knows: the files `train_CLASS.bin` and `heldout_CLASS.bin` (uint16 ids, documents framed by begin and end
marks) and how batches are drawn from them. Does not know: texts, models.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.errors import UsageError
from v4flash.training.corpus import CLASSES

TOKEN_DTYPE = np.uint16
DOCUMENT_START_SHARE = 0.4  # of the crops begin with a document, as every conversation does
# Small classes are drawn more often than their size says: a model is judged on each alike.
_SIZE_EXPONENT = 0.7
_CHAT_EMPHASIS = 2.0  # the frames of a chat are what a user of the model types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """Token streams of all classes on the device.

    Attributes:
      tokens: int32 [N], the classes one after another.
      first, size: int32 [C], each class's range in `tokens`.
      starts: int32 [M], positions of document starts; first_start, start_count: int32 [C], each class's range.
      weight: float32 [C], how often a class is drawn.
    """

    tokens: jax.Array
    first: jax.Array
    size: jax.Array
    starts: jax.Array
    first_start: jax.Array
    start_count: jax.Array
    weight: jax.Array

    @classmethod
    def read(
        cls, folder: Path, split: str, longest: int, begin_id: int, part: tuple[float, float] = (0.0, 1.0)
    ) -> "Streams":
        """Reads one split ('train' or 'heldout'); crops of up to `longest` tokens can be drawn from it.

        `part`: where to begin and end, as shares of each class's file. Documents lie in it in no order.
        """
        parts = []
        for kind in CLASSES:
            path = folder / f"{split}_{kind}.bin"
            if not path.is_file():
                raise UsageError(f"no {path.name} in {folder}; build the corpus first (docs/training.md)")
            tokens = np.fromfile(path, TOKEN_DTYPE).astype(np.int32)
            tokens = tokens[int(part[0] * len(tokens)) : int(part[1] * len(tokens))]
            parts.append(np.tile(tokens, -(-2 * longest // len(tokens))))
        return cls.of_arrays(parts, longest, begin_id)

    @classmethod
    def of_arrays(cls, parts: list[np.ndarray], longest: int, begin_id: int) -> "Streams":
        """Streams from one token array a class, in the order of the corpus classes."""
        first = np.cumsum([0, *(len(part) for part in parts[:-1])])
        starts = []
        for part, offset in zip(parts, first, strict=True):
            found = np.flatnonzero(part[: len(part) - longest] == begin_id)
            starts.append((found if len(found) else np.zeros(1, np.int64)) + offset)
        sizes = np.array([len(part) for part in parts])
        weight = sizes.astype(np.float64) ** _SIZE_EXPONENT
        weight[-1] *= _CHAT_EMPHASIS
        counts = [len(found) for found in starts]
        return cls(
            tokens=jnp.asarray(np.concatenate(parts), jnp.int32),
            first=jnp.asarray(first, jnp.int32),
            size=jnp.asarray(sizes, jnp.int32),
            starts=jnp.asarray(np.concatenate(starts), jnp.int32),
            first_start=jnp.asarray(np.cumsum([0, *counts[:-1]]), jnp.int32),
            start_count=jnp.asarray(counts, jnp.int32),
            weight=jnp.asarray(weight / weight.sum(), jnp.float32),
        )


def draw(streams: Streams, key: jax.Array, batch: int, length: int, kind: int | None = None) -> jax.Array:
    """Token crops int32 [batch, length]; of class number `kind` only, if given."""
    keys = jax.random.split(key, 4)
    classes = jax.random.choice(keys[0], streams.weight.shape[0], (batch,), p=streams.weight)
    if kind is not None:
        classes = jnp.full((batch,), kind)
    size, first = streams.size[classes], streams.first[classes]
    anywhere = first + (jax.random.uniform(keys[1], (batch,)) * (size - length)).astype(jnp.int32)
    chosen = (jax.random.uniform(keys[2], (batch,)) * streams.start_count[classes]).astype(jnp.int32)
    document = streams.starts[streams.first_start[classes] + chosen]
    framed = jax.random.uniform(keys[3], (batch,)) < DOCUMENT_START_SHARE
    offset = jnp.where(framed, document, anywhere)
    return streams.tokens[offset[:, None] + jnp.arange(length)]
