"""Logits of whole texts by a model that decodes.

Knows: that logits stand behind each row of a pass. Does not know: how texts are run, or what the logits are compared
with. For checkpoints that are not decoded with, see logits.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.fidelity.text_passes import TextPasses


class ModelLogits:
    """(ids) -> float32 [N, V], logits behind each of N ids of a text that fits the model's context.

    Args: cache, folder of compiled programs; None switches it off.
    """

    def __init__(self, model: LanguageModel, cache: Path | None = None):
        self._passes = TextPasses(
            model, lambda backbone, trunk: backbone.logits(trunk.hidden), "model_logits", cache
        )

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        return np.concatenate([logits.astype(np.float32)[:rows] for logits, rows in self._passes(ids)])
