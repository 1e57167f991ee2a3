"""Whole texts through a model that decodes: the same weights, backend and number types.

Knows: one more program beside the two that decode, run in chunks of the prefill's length. Does not know: what is taken
of a pass, or what for.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.engine.programs import new_state


class TextPasses:
    """Passes over texts that fit the model's context, and what `taken` gives of each.

    Args:
      taken: (backbone, its trunk's output) -> array, with the rows of a pass on one of its axes.
      name: of the program, for the cache.
      cache: folder of compiled programs; None switches it off.
    """

    def __init__(self, model: LanguageModel, taken: Callable, name: str, cache: Path | None = None):
        self._model, self._chunk = model, model.programs.shapes.chunk

        def run(params, decode, tokens, count):
            backbone = model.programs.model(params).backbone
            trunk, written = backbone.trunk(tokens, decode, count)
            return written.advance(count), taken(backbone, trunk)

        decode = jax.eval_shape(self._empty)
        tokens, count = jnp.zeros((self._chunk,), jnp.int32), jnp.zeros((), jnp.int32)
        self._run, _ = model.programs.runner.pin(
            name,
            run,
            (model.params, decode, tokens, count),
            (decode, 0),
            (1,),
            (model.backend, repr(model.config), repr(model.numerics), repr(model.programs.shapes)),
            cache,
        )

    def _empty(self):
        return new_state(self._model.config, self._model.numerics, self._model.programs.shapes)

    def __call__(self, ids: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
        """What is taken of each chunk of the text, and how many of its rows are the text's."""
        decode = self._empty()
        for start in range(0, len(ids), self._chunk):
            part = list(ids[start : start + self._chunk])
            tokens = jnp.asarray(part + [0] * (self._chunk - len(part)), jnp.int32)
            decode, found = self._run(self._model.params, decode, tokens, jnp.asarray(len(part), jnp.int32))
            yield np.asarray(self._model.programs.runner.read(found)), len(part)
