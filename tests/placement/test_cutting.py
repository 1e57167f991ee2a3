"""A cut function computes what the whole one does, and gives away no value that is still needed."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.placement.cutting import Exchange, cut, receive, send
from v4flash.placement.staged import Staged

WEIGHTS = {"w": jnp.arange(4.0), "unread": jnp.ones(())}
CONTROL = jnp.float32(3.0)


def stream():
    """Donated to every call, so made anew for each."""
    return {"cache": jnp.ones(4), "length": jnp.int32(7), "kept": jnp.zeros(2)}


def away(place: int, values):
    """What the other device computes."""
    return sum(values) * (place + 2)


def step(exchange, weights, stream, control):
    """Two exchanges, work between sending and receiving, and one value that comes back in two places."""
    x = stream["cache"] * weights["w"]
    first = exchange(x, control)
    y = jnp.sin(x) + control
    x = first() + y
    cache, length = stream["cache"] + x, stream["length"] + 1
    x = exchange(cache)() - y
    return {"cache": cache, "length": length, "kept": stream["kept"]}, (x, length)


def asked():
    """Exchanges with another device, as traced."""

    def exchange(*values):
        ticket = send(*values)
        return lambda: receive(ticket, values[0])

    return exchange


def computed():
    """The same at once."""
    places = iter(range(9))

    def exchange(*values):
        made = away(next(places), values)
        return lambda: made

    return exchange


class Recorder:
    """Stands for the second device, and keeps what it was asked."""

    def __init__(self):
        self.asked: list[tuple[int, int]] = []

    def send(self, place, values):
        self.asked.append((place, len(values)))
        return away(place, values)

    def receive(self, made):
        return made


def traced(*arguments):
    return step(asked(), *arguments)


@pytest.fixture
def staged() -> Staged:
    found = cut(traced, (WEIGHTS, stream(), CONTROL), donated=(1,))
    programs = tuple(
        jax.jit(piece.function, donate_argnums=piece.donated) if piece.outputs else None
        for piece in found.pieces
    )
    return Staged(found, programs, Recorder())


def test_pieces_compute_what_the_whole_function_does(staged):
    expected = jax.jit(lambda *a: step(computed(), *a))(WEIGHTS, stream(), CONTROL)
    found = staged(WEIGHTS, stream(), CONTROL)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)
    assert staged.second.asked == [(0, 2), (1, 1)]


def test_results_are_arrays_of_their_own(staged):
    """A stream is donated to the next step while the host still reads the result of this one."""
    following, (x, length) = staged(WEIGHTS, stream(), CONTROL)
    for _ in range(3):
        following, _ = staged(WEIGHTS, following, CONTROL)
    assert int(length) == 8 and int(following["length"]) == 11
    assert np.isfinite(x).all()
    assert not CONTROL.is_deleted() and not WEIGHTS["w"].is_deleted()


def test_only_the_donated_argument_is_taken_over_where_it_is_read_last(staged):
    given = stream()
    staged(WEIGHTS, given, CONTROL)
    assert given["cache"].is_deleted() and given["length"].is_deleted()
    assert not given["kept"].is_deleted()
    pieces = staged.cut.pieces
    taken = [piece.inputs[place] for piece in pieces for place in piece.donated]
    assert [piece.donated for piece in pieces[:2]] == [(), ()], "the cache is still read behind them"
    assert max(collections.Counter(taken).values()) == 1


def test_work_between_sending_and_receiving_is_a_piece_of_its_own(staged):
    pieces = staged.cut.pieces
    assert [piece.exchange and piece.exchange.sent is not None for piece in pieces] == [
        True, False, True, False, None,
    ]  # fmt: skip
    assert pieces[1].outputs and not pieces[3].outputs, "nothing is computed behind the second sending"


def test_without_a_donated_argument_nothing_is_taken_over():
    given = stream()
    found = cut(traced, (WEIGHTS, given, CONTROL))
    assert all(piece.donated == () for piece in found.pieces)
    assert isinstance(found.pieces[0].exchange, Exchange)


def test_constants_among_the_results_are_arrays():
    found = cut(lambda x: (x + 1, 3), (jnp.ones(2),))
    _, three = Staged(found, tuple(jax.jit(piece.function) for piece in found.pieces), Recorder())(
        jnp.ones(2)
    )
    assert isinstance(three, jax.Array) and int(three) == 3
