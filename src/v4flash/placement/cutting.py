"""One function as a row of programs, cut wherever another device computes something for it.

Knows: how a traced function is cut at `send` and `receive`, which values each piece takes and leaves, and which of
them nothing needs any more. Does not know: what is computed, where, or how pieces are compiled.

    ticket = send(x)                   the piece before ends here: x leaves
    y = f(x)                           a piece of its own, while the other device works
    z = receive(ticket, like)          the piece behind begins here, with what came back

Pieces keep the order of the trace: nothing is computed earlier, or kept longer, than it was written. Both calls must
stand in the function itself, not inside a loop or a branch of it.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

_send, _receive = core.Primitive("send"), core.Primitive("receive")
_send.def_abstract_eval(lambda *values: jax.core.ShapedArray((), jnp.int32))
_receive.def_abstract_eval(lambda ticket, *, shape, dtype: jax.core.ShapedArray(shape, dtype))


def send(*values: jax.Array) -> jax.Array:
    """Hands values to the other device's next computation; returns the ticket for its result."""
    return _send.bind(*values)


def receive(ticket: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The result that `ticket` stands for: an array of this shape and type."""
    return _receive.bind(ticket, shape=tuple(like.shape), dtype=jnp.dtype(like.dtype))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What happens behind a piece: values go out, or a result comes back.

    Attributes:
      sent: the values that go out; None where a result comes back.
      place: which of the other device's computations they go to, counted from 0.
      ticket: written when values go out, read when the result comes back.
      received: the result.
    """

    ticket: core.Var
    sent: tuple[core.Var, ...] | None = None
    place: int = 0
    received: core.Var | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """One program.

    Attributes:
      function: (an array for each of `inputs`) -> one for each of `outputs`.
      inputs, outputs: the values it takes and leaves.
      donated: positions among `inputs` of arguments whose memory it may take over.
      exchange: what follows, None at the end.
      dropped: values that nothing reads behind that.
    """

    function: Callable
    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]
    donated: tuple[int, ...]
    exchange: Exchange | None
    dropped: tuple[core.Var, ...]

    @property
    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs without values."""
        return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.inputs)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A function in pieces.

    Attributes:
      arguments: the leaves of its arguments.
      pieces: in the order they run.
      results: the leaves of its result.
      structure: of the result.
    """

    arguments: tuple[core.Var, ...]
    pieces: tuple[Piece, ...]
    results: tuple[core.Var | core.Literal, ...]
    structure: jax.tree_util.PyTreeDef


def cut(function: Callable, arguments: tuple, donated: tuple[int, ...] = ()) -> Cut:
    """Cuts `function` at its exchanges.

    Args: arguments, one pytree of arrays or ShapeDtypeStructs per parameter; donated, the indices of arguments whose
    memory pieces may take over.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)

    def separate(*arguments):
        """The results without one value in two places: a caller may give away the one and keep the other."""
        seen: set[int] = set()

        def once(value):
            again, _ = id(value) in seen, seen.add(id(value))
            return jnp.copy(value) if again else jnp.asarray(value)

        return jax.tree.map(once, function(*arguments))

    traced, shape = jax.make_jaxpr(separate, return_shape=True)(*abstract)
    of_leaf = [number for number, argument in enumerate(arguments) for _ in jax.tree.leaves(argument)]
    own = frozenset(var for var, number in zip(traced.invars, of_leaf, strict=True) if number in donated)
    parts = _parts(traced.eqns)
    last = _last_reads(parts, traced.outvars)
    pieces = tuple(
        _piece(traced, equations, exchange, number, last, own)
        for number, (equations, exchange) in enumerate(parts)
    )
    return Cut(tuple(traced.invars), pieces, tuple(traced.outvars), jax.tree.structure(shape))


def _parts(equations: Sequence[core.JaxprEqn]) -> list[tuple[list[core.JaxprEqn], Exchange | None]]:
    """The equations of each piece, and the exchange behind it."""
    parts: list = []
    current: list[core.JaxprEqn] = []
    sent = itertools.count()
    for equation in equations:
        if equation.primitive is _send:
            exchange = Exchange(equation.outvars[0], tuple(equation.invars), next(sent))
        elif equation.primitive is _receive:
            exchange = Exchange(equation.invars[0], received=equation.outvars[0])
        else:
            current.append(equation)
            continue
        parts.append((current, exchange))
        current = []
    return [*parts, (current, None)]


def _last_reads(parts: Sequence[tuple], results: Sequence) -> dict[core.Var, float]:
    """When each value is read last: piece number p reads at p, the exchange behind it at p + 1/2, the caller last."""
    last: dict[core.Var, float] = {}
    for number, (equations, exchange) in enumerate(parts):
        for equation in equations:
            last |= dict.fromkeys(_variables(equation.invars), number)
        if exchange is not None:
            last |= dict.fromkeys(exchange.sent or (exchange.ticket,), number + 0.5)
    return last | dict.fromkeys(_variables(results), math.inf)


def _piece(
    traced: core.Jaxpr,
    equations: list[core.JaxprEqn],
    exchange: Exchange | None,
    number: int,
    last: dict[core.Var, float],
    own: frozenset[core.Var],
) -> Piece:
    made = {var: None for equation in equations for var in equation.outvars}
    read = {var: None for equation in equations for var in _variables(equation.invars)}
    inputs = tuple(var for var in read if var not in made and var not in traced.constvars)
    outputs = tuple(var for var in made if last.get(var, -1) > number)
    # A value that both goes in and stays for the caller cannot be given away.
    free = collections.Counter((var.aval.shape, var.aval.dtype) for var in outputs)
    donated = []
    for place, var in enumerate(inputs):
        kind = (var.aval.shape, var.aval.dtype)
        if var in own and last[var] == number and free[kind]:
            free[kind] -= 1
            donated.append(place)
    piece = traced.replace(invars=list(inputs), outvars=list(outputs), eqns=equations)

    def function(*values: jax.Array) -> list[jax.Array]:
        return list(jax.core.eval_jaxpr(piece, traced.consts, *values))

    known = {*inputs, *outputs, *((*(exchange.sent or ()), exchange.ticket) if exchange else ())}
    dropped = tuple(var for var in known if last.get(var, -1) <= number + 0.5)
    return Piece(function, inputs, outputs, tuple(donated), exchange, dropped)


def _variables(atoms: Iterable) -> list[core.Var]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]
