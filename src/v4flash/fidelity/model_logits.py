"""Logits of whole texts by a model that decodes: the same weights, backend and number types.

Knows: one more program beside the two that decode, run in chunks of the prefill's length. Does not know: what the
logits are compared with. For checkpoints that are not decoded with, see logits.py.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.engine.programs import new_state


class ModelLogits:
    """(ids) -> float32 [N, V], logits behind each of N ids of a text that fits the model's context.

    Args: cache, folder of compiled programs; None switches it off.
    """

    def __init__(self, model: LanguageModel, cache: Path | None = None):
        self._model, self._chunk = model, model.programs.shapes.chunk

        def run(params, decode, tokens, count):
            backbone = model.programs.model(params).backbone
            trunk, written = backbone.trunk(tokens, decode, count)
            return written.advance(count), backbone.logits(trunk.hidden)

        decode = jax.eval_shape(self._empty)
        tokens, count = jnp.zeros((self._chunk,), jnp.int32), jnp.zeros((), jnp.int32)
        self._run, _ = model.programs.runner.pin(
            "model_logits",
            run,
            (model.params, decode, tokens, count),
            (decode, 0),
            1,
            (model.backend, repr(model.config), repr(model.numerics), repr(model.programs.shapes)),
            cache,
        )

    def _empty(self):
        return new_state(self._model.config, self._model.numerics, self._model.programs.shapes)

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        decode, found = self._empty(), []
        for start in range(0, len(ids), self._chunk):
            part = list(ids[start : start + self._chunk])
            tokens = jnp.asarray(part + [0] * (self._chunk - len(part)), jnp.int32)
            decode, logits = self._run(self._model.params, decode, tokens, jnp.asarray(len(part), jnp.int32))
            found.append(np.asarray(self._model.programs.runner.read(logits), np.float32)[: len(part)])
        return np.concatenate(found)
