"""Where non-finite logits came from: the first bad layer, and the tensor in it that is to blame.

Knows: how to run a pass again while watching every layer, and how to look through weights and caches. Does not
know: when that is called for. Nothing here is compiled or run before something went wrong.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.names import name_template
from v4flash.config import ModelConfig
from v4flash.engine.backends import WeightForm
from v4flash.engine.visible_state import visible_state, without_stale_rows
from v4flash.speculative.filters import has_usable_logits
from v4flash.state import DecodeState

EMBEDDING, HEAD = "the embedding", "the head"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first place where a pass went wrong.

    Attributes:
      position: absolute position of the first row affected there.
      layer: 'layer 3', or EMBEDDING, or HEAD.
      tensor: published name of a weight, name of a cache, or None where both are finite.
      advice: what a person can do about it.
    """

    position: int
    layer: str
    tensor: str | None
    advice: str

    def __str__(self) -> str:
        named = (
            f"tensor {self.tensor}" if self.tensor else "no bad weight or cache, so a value overflowed in it"
        )
        return f"first bad layer: {self.layer}, {named}; {self.advice}"


class Diagnosis:
    """Runs passes of one model again and says what they stumbled over.

    Fused launches keep nothing between them that could be looked at, so their passes run again on their definitions,
    over the same packed weights.

    Args: jit, compiles a function of the weights at its first call.
    """

    def __init__(self, form: WeightForm, config: ModelConfig, jit: Callable = jax.jit):
        self._form, self._config = form, config

        def watched(params: Any, decode: DecodeState, tokens: jax.Array, count: jax.Array):
            """The written state, and whether each row is finite after embedding, every layer, and head."""
            backbone = form.plain_model(params).backbone
            trunk, written = backbone.trunk(tokens, decode, count, keep_streams=True)
            streams = jnp.stack([backbone.embedded(tokens), *trunk.streams])
            finite = jnp.all(jnp.isfinite(streams), axis=(2, 3))
            usable = has_usable_logits(backbone.logits(trunk.hidden))
            dead = jnp.arange(tokens.shape[0]) >= count
            return written.advance(count), jnp.concatenate([finite, usable[None]]) | dead

        self._watched = jit(watched)

    def of_pass(
        self, params: Any, decode: DecodeState, tokens: Sequence[int], rows: int
    ) -> tuple[DecodeState, Fault | None]:
        """Runs `tokens` (at most `rows`) behind `decode`: the state behind them, and what went wrong if anything."""
        # A masked row still enters a product with weight zero, and zero times NaN is NaN.
        decode = without_stale_rows(self._config, decode)
        padded = jnp.asarray([*tokens, *[0] * (rows - len(tokens))], jnp.int32)
        written, finite = self._watched(params, decode, padded, jnp.asarray(len(tokens), jnp.int32))
        finite = np.asarray(finite)
        if finite.all():
            return written, None
        stage = int(np.argmin(finite.all(axis=1)))
        position = int(decode.length) + int(np.argmin(finite[stage]))
        return written, self._fault(params, decode, stage, position)

    def of_text(self, params: Any, empty: DecodeState, tokens: Sequence[int], chunk: int) -> Fault | None:
        """Runs `tokens` from an empty state in chunks until something goes wrong."""
        decode = empty
        for start in range(0, len(tokens), chunk):
            decode, fault = self.of_pass(params, decode, tokens[start : start + chunk], chunk)
            if fault is not None:
                return fault
        return None

    def _fault(self, params: Any, decode: DecodeState, stage: int, position: int) -> Fault:
        layers = self._config.num_hidden_layers
        if stage == 0:
            name, roots = EMBEDDING, [("embed",)]
        elif stage > layers:
            name, roots = HEAD, [("hc_head",), ("norm",), ("head",)]
        else:
            name, roots = f"layer {stage - 1}", [("layers", stage - 1)]
        for path, values in self._form.tensors(params):
            inside = any(path[: len(root) + 1] == ("backbone", *root) for root in roots)
            if inside and not _is_finite(values):
                tensor = name_template(path, self._config.family)
                return Fault(
                    position, name, tensor, "compare the checkpoint with its source (`v4flash inspect`)"
                )
        for cache, rows in visible_state(self._config, decode).items():
            if cache.split()[-1] == str(stage - 1) and "draft" not in cache and not np.isfinite(rows).all():
                return Fault(position, name, f"cache '{cache}'", "start a new session, and report this")
        return Fault(position, name, None, "try --dtype float32")


def _is_finite(array: jax.Array) -> bool:
    """False for an array with NaN or infinity; integers, packed payloads among them, have neither."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    return bool(jnp.all(jnp.isfinite(array)))
