"""A function that runs in pieces on a first device while a second one computes between them.

Knows: the order of pieces and exchanges, and which values live how long. Does not know: what is computed, or how
pieces were compiled.

    first device     piece 0 | piece 1            | piece 2 | piece 3            | ...
                           \\ x                  / y       \\                    /
    second device            computation 0 ------           computation 1 -----

Nothing here waits for a device: a piece is queued as soon as the values it takes have names, and the only wait is for
the second device's thread to name its result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from v4flash.placement.cutting import Cut
from v4flash.placement.second_device import SecondDevice


@dataclasses.dataclass(frozen=True)
class Staged:
    """Calls the pieces of `cut`; called as the function that was cut.

    Attributes:
      programs: one for each piece; None for a piece that leaves nothing.
    """

    cut: Cut
    programs: tuple[Callable, ...]
    second: SecondDevice

    def __call__(self, *arguments: Any) -> Any:
        """The function's result; what it was cut with as donated is not usable afterwards.

        Raises V4FlashError where the second device does not do its part.
        """
        values: dict[core.Var, Any] = dict(zip(self.cut.arguments, jax.tree.leaves(arguments), strict=True))
        for piece, program in zip(self.cut.pieces, self.programs, strict=True):
            if program is not None:
                made = program(*[values[var] for var in piece.inputs])
                values.update(zip(piece.outputs, made, strict=True))
            exchange = piece.exchange
            if exchange is not None and exchange.sent is not None:
                sent = [values[var] for var in exchange.sent]
                values[exchange.ticket] = self.second.send(exchange.place, sent)
            elif exchange is not None:
                values[exchange.received] = self.second.receive(values[exchange.ticket])
            for var in piece.dropped:
                del values[var]
        found = [
            _constant(atom) if isinstance(atom, core.Literal) else values[atom] for atom in self.cut.results
        ]
        return jax.tree.unflatten(self.cut.structure, found)


def _constant(atom: core.Literal) -> jax.Array:
    return jax.device_put(np.asarray(atom.val, atom.aval.dtype))
