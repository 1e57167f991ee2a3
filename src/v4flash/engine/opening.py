"""From a checkpoint folder to weights and programs, on the backend that was asked for or on one that can run.

Knows: in which order a checkpoint is compiled for, read and packed, and what `auto` falls back to. Does not know: text,
sessions, or how a person is told.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from v4flash.checkpoint.loading import LoadedModel, with_drafter
from v4flash.checkpoint.loading import load as load_checkpoint
from v4flash.config import ModelConfig
from v4flash.engine import backends, programs, ways
from v4flash.engine.backends import Backend
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.numerics import Numerics
from v4flash.placement.table import Placement

Opened = tuple[LoadedModel, programs.Programs, Backend]
Say = Callable[[str], Any]


def open_checkpoint(
    path: Path,
    numerics: Numerics,
    *,
    backend: str,
    rows: int,
    chunk: int | None,
    context: int,
    drafter: bool,
    cache: Path | None,
    say: Say,
    experts: ways.Wanted,
    placement: Placement | None,
) -> Opened:
    """The checkpoint, its programs, and the backend they are of.

    Args: backend, 'auto', 'xla' or 'fused'; chunk, None for what suits the backend; placement, of the routed experts,
    None where they are resident; the rest as in `language_model.load`. Raises CapacityError where 'fused' cannot run,
    UsageError where the backend has no such way for experts.
    """
    chosen = backends.choose(backend, numerics, rows)
    if placement is not None:
        chosen = ways.suited(chosen, backend, experts.way)
        shapes, _ = _shapes(chosen, rows, chunk, context)
        told = ways.Opening(path, numerics, shapes, placement, drafter, cache, say)
        return *ways.opener(experts.way, chosen.name)(told), chosen
    if chosen.name == backends.FUSED:
        shapes, note = _shapes(chosen, rows, chunk, context)
        try:
            packed = open_packed(path, numerics, shapes, cache, FusedBodies, drafter=drafter, say=say)
            return *packed, dataclasses.replace(
                chosen, note="; ".join(filter(None, (note, chosen.note))) or None
            )
        except backends.NoFusedBody as error:
            if backend != backends.AUTO:
                raise
            chosen = Backend(backends.XLA, backends.reason(error))
    shapes, _ = _shapes(chosen, rows, chunk, context)
    say(f"loading {path}")
    loaded = load_checkpoint(path, numerics, drafter=drafter)
    say("compiling")
    pinned = programs.build(loaded.graphdef, loaded.params, loaded.config, numerics, shapes, cache)
    return loaded, pinned, chosen


def open_packed(
    path: Path,
    numerics: Numerics,
    shapes: programs.Shapes,
    cache: Path | None,
    bodies: type[ReferenceBodies],
    *,
    drafter: bool = True,
    say: Say = lambda sentence: None,
) -> tuple[LoadedModel, programs.Programs]:
    """A checkpoint with its weights packed (`params` is a PackedModel, `graphdef` None) and programs on `bodies`.

    The programs are made first, from shapes alone: what they refuse is known before gigabytes are read.
    Raises NoFusedBody where bodies or packing do not take the checkpoint.
    """
    config = with_drafter(ModelConfig.from_file(path), drafter)
    numerics = dataclasses.replace(numerics, packed=True)
    say("compiling")
    abstract = backends.packed_shapes(config, numerics)
    pinned = programs.build(None, abstract, config, numerics, shapes, cache, bodies=bodies)
    say(f"loading {path}")
    loaded = load_checkpoint(path, numerics, drafter=drafter)
    model = loaded.model
    loaded = dataclasses.replace(loaded, graphdef=None, params=None)
    say("packing")
    return dataclasses.replace(loaded, params=backends.packed_weights(model)), pinned


def _shapes(
    chosen: Backend, rows: int, chunk: int | None, context: int
) -> tuple[programs.Shapes, str | None]:
    """The programs' sizes, and a note where they are not those asked for."""
    length, note = backends.chosen_chunk(chosen, chunk)
    return programs.Shapes(rows, length, context), note
