"""Logits, drafter taps and residual streams of whole prompts, computed in chunks.

Knows: one compiled program for each chunk length, run from an empty decode state, the last chunk padded with
dead rows. Does not know: files, or whose numbers these are compared with.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.loading import LoadedModel
from v4flash.engine.programs import executable
from v4flash.errors import CapacityError, V4FlashError
from v4flash.state import DecodeState


@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """What the target computes for N tokens, all float32 on the host.

    Attributes:
      logits: [N, V].
      taps: [N, n * D], the drafter's context rows; None where the model was loaded without a drafter.
      streams: [L, N, S, D], residual streams after every layer; None unless asked for.
    """

    logits: np.ndarray
    taps: np.ndarray | None
    streams: np.ndarray | None


class TargetPass:
    """The target of a loaded checkpoint, run over prompts of at most `context` tokens.

    Args:
      loaded: the checkpoint.
      context: positions the state keeps.
      chunk: rows of one pass.
      streams: also return the residual streams.
      cache: folder of compiled programs; None switches the cache off.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        context: int,
        chunk: int = 128,
        streams: bool = False,
        cache: Path | None = None,
    ):
        self.context, self.chunk = context, chunk
        self._params = loaded.params
        self._empty = functools.partial(
            DecodeState.create, loaded.config, context, chunk, loaded.numerics.dtype
        )
        graphdef = loaded.graphdef

        def run(
            params: nnx.State, decode: DecodeState, tokens: jax.Array, count: jax.Array
        ) -> tuple[DecodeState, dict[str, jax.Array]]:
            backbone = nnx.merge(graphdef, params).backbone
            trunk, written = backbone.trunk(tokens, decode, count, keep_streams=streams)
            found = {"logits": backbone.logits(trunk.hidden)}
            if trunk.taps is not None:
                found["taps"] = trunk.taps.astype(jnp.float32)
            if streams:
                found["streams"] = jnp.stack(trunk.streams, axis=1).astype(jnp.float32)
            return written.advance(count), found

        names = ["logits", *["taps"] * bool(loaded.config.draft), *["streams"] * streams]
        decode = jax.eval_shape(self._empty)
        self._run, self.cached = executable(
            "target_pass",
            run,
            (self._params, decode, jnp.zeros((chunk,), jnp.int32), jnp.zeros((), jnp.int32)),
            (decode, dict.fromkeys(names, 0)),
            (1,),
            (repr(loaded.config), repr(loaded.numerics), repr((chunk, context, streams))),
            cache,
        )

    def __call__(self, ids: Sequence[int]) -> TargetOutput:
        """Runs one prompt of at least one token from an empty state.

        Raises CapacityError when it exceeds the context, V4FlashError where logits are not finite.
        """
        if len(ids) > self.context:
            raise CapacityError(
                f"{len(ids):,} ids exceed the context of {self.context:,}; shorten the list or raise it"
            )
        decode = self._empty()
        parts: dict[str, list[np.ndarray]] = {}
        for start in range(0, len(ids), self.chunk):
            tokens = np.zeros((self.chunk,), np.int32)
            part = ids[start : start + self.chunk]
            tokens[: len(part)] = part
            decode, found = self._run(
                self._params, decode, jnp.asarray(tokens), jnp.asarray(len(part), jnp.int32)
            )
            for name, rows in jax.device_get(found).items():
                parts.setdefault(name, []).append(rows[: len(part)])
        joined = {name: np.concatenate(rows) for name, rows in parts.items()}
        _require_finite(joined["logits"])
        streams = joined.get("streams")
        if streams is not None:
            streams = np.ascontiguousarray(np.moveaxis(streams, 1, 0))
        return TargetOutput(joined["logits"], joined.get("taps"), streams)


def _require_finite(logits: np.ndarray) -> None:
    broken = ~np.isfinite(logits).all(axis=-1)
    if broken.any():
        raise V4FlashError(
            f"non-finite logits at position {int(np.argmax(broken))}: the checkpoint holds NaN or infinity; "
            "check the weights with `v4flash inspect`"
        )
