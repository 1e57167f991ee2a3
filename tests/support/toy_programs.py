"""The pinned programs of a toy model, compiled once a process."""

import functools

from toy_models import toy

from v4flash.engine import programs

SHAPES = programs.Shapes(rows=8, chunk=32, context=200)


@functools.cache
def compiled() -> programs.Programs:
    """Those of the V4.1 toy, with SHAPES."""
    model = toy("v41")
    return programs.build(model.graphdef, model.params, model.config, model.numerics, SHAPES, None)
