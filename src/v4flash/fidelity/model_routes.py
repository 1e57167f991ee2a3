"""Expert ids of whole texts by a model that decodes.

Knows: which expert ids a pass gives, and that its dead rows are left out. Does not know: how texts are run, or what the
ids are counted for.
"""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from v4flash.engine.language_model import LanguageModel
from v4flash.fidelity.text_passes import TextPasses


class ModelRoutes:
    """(ids) -> int32 [L, N, K], the experts that each layer chose for N ids of a text that fits the model's context.

    Args: cache, folder of compiled programs; None switches it off.
    """

    def __init__(self, model: LanguageModel, cache: Path | None = None):
        self._passes = TextPasses(
            model, lambda backbone, trunk: jnp.stack(trunk.routes), "model_routes", cache
        )

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        return np.concatenate(
            [routes.astype(np.int32)[:, :rows] for routes, rows in self._passes(ids)], axis=1
        )
