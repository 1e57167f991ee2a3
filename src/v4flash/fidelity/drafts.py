"""What the drafter says behind a given context, greedily chained.

Knows: one block of k rows from the taps of the context rows its window can see. Does not know: files, or
verification; the taps come from the target (`logits.TargetPass`) or from elsewhere.
"""

import dataclasses
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine.programs import executable
from v4flash.errors import UsageError
from v4flash.speculative.step import MAX_DRAFT, greedy_drafts
from v4flash.state import DecodeState


@dataclasses.dataclass(frozen=True)
class DraftOutput:
    """One block of k rows, on the host.

    Attributes:
      base_logits: float32 [k, V], before the Markov bias.
      logits: float32 [k, V], after it, each row biased by the draft before it.
      draft_ids: int32 [k], the largest of each row of `logits`.
      confidence_logit, confidence: float32 [k], before and after the sigmoid.
    """

    base_logits: np.ndarray
    logits: np.ndarray
    draft_ids: np.ndarray
    confidence_logit: np.ndarray
    confidence: np.ndarray


class DraftPass:
    """The drafter of a loaded checkpoint, run in blocks of exactly `k` rows.

    Raises UsageError when the checkpoint has no drafter, or k is not from 1 to MAX_DRAFT.
    """

    def __init__(self, loaded: LoadedModel, k: int, *, cache: Path | None = None):
        config = loaded.config
        if config.draft is None:
            raise UsageError(f"{loaded.path} has no drafter; give a checkpoint that has one")
        if not 1 <= k <= MAX_DRAFT:
            raise UsageError(f"k is {k}, expected 1 to {MAX_DRAFT}")
        self.k, self.window = k, config.sliding_window
        self.width = len(config.draft.target_layer_ids) * config.hidden_size
        self._params = loaded.params
        graphdef, dtype = loaded.graphdef, loaded.numerics.dtype

        def run(
            params: nnx.State, taps: jax.Array, first: jax.Array, count: jax.Array, anchor: jax.Array
        ) -> dict[str, jax.Array]:
            model = nnx.merge(graphdef, params)
            # The drafter reads its own windows only, so the smallest context will do.
            state = DecodeState.create(config, 1, taps.shape[0], dtype)
            state = model.drafter.commit(state, taps.astype(dtype), first, count)
            block, drafts = greedy_drafts(model, state.replace(length=first + count), anchor, k)
            return {
                "base_logits": block.base_logits,
                "logits": drafts.logits,
                "draft_ids": drafts.ids,
                "confidence_logit": drafts.confidence,
                "confidence": jax.nn.sigmoid(drafts.confidence),
            }

        scalar = jnp.zeros((), jnp.int32)
        names = [field.name for field in dataclasses.fields(DraftOutput)]
        self._run, self.cached = executable(
            "draft_pass",
            run,
            (self._params, jnp.zeros((self.window, self.width)), scalar, scalar, scalar),
            dict.fromkeys(names, 0),
            (),
            (repr(config), repr(loaded.numerics), repr(k)),
            cache,
        )

    def __call__(self, taps: np.ndarray, first: int, anchor: int) -> DraftOutput:
        """Drafts behind context rows at positions first.., the anchor standing right after the last of them.

        Args: taps float32 [rows, n * D], rows at least the window's (or all, behind a shorter context).
        Raises UsageError for another width, or when rows that the window sees are absent.
        """
        rows = len(taps)
        if taps.ndim != 2 or taps.shape[1] != self.width:
            raise UsageError(f"taps have shape {list(taps.shape)}, expected [rows, {self.width}]")
        if rows < min(self.window, first + rows) or rows == 0:
            raise UsageError(
                f"taps cover positions {first} to {first + rows - 1}, expected every position from "
                f"{max(0, first + rows - self.window)}: the drafter reads the last {self.window}"
            )
        seen = taps[-self.window :]
        padded = np.zeros((self.window, self.width), np.float32)
        padded[: len(seen)] = seen
        numbers = (first + rows - len(seen), len(seen), anchor)
        scalars = [jnp.asarray(number, jnp.int32) for number in numbers]
        return DraftOutput(**jax.device_get(self._run(self._params, jnp.asarray(padded), *scalars)))
