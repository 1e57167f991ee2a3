"""The pinned step, called so that all it writes lies where the step before wrote it.

Knows: that the result of a step takes the memory of an earlier one, and a copy of it for the host. Does not know: what
a step does.

XLA keeps the addresses of arrays in the captured graph. Where one of them differs from the call before it rewrites the
nodes of the graph, which takes the host milliseconds, and the GPU waits for the new nodes. A stream is donated and
stays where it is; a result that the caller keeps would be somewhere else in every step.
"""

from collections.abc import Callable
from typing import Any

import jax

from v4flash.speculative.stream import Control, StepResult, Stream


class SteadyStep:
    """(params, stream, control) -> (stream, the packed result); the stream is donated.

    Attributes:
      compiled: (params, stream, control, spent) -> (stream, result); stream and spent are donated.
    """

    def __init__(self, compiled: Callable, keep: Callable, blank: Callable[[], StepResult]):
        """Args: keep, of ((), result), makes the array that the caller gets; blank makes a result to begin with."""
        self.compiled, self._keep, self._blank = compiled, keep, blank
        self._spent = [blank()]

    def __call__(self, params: Any, stream: Stream, control: Control) -> tuple[Stream, jax.Array]:
        spent = self._spent.pop() if self._spent else self._blank()
        stream, result = self.compiled(params, stream, control, spent)
        words = self._keep((), result)
        self._spent.append(result)
        return stream, words


def kept(_: tuple, result: StepResult) -> jax.Array:
    """What `SteadyStep` keeps of a result: a function of (params, result), as all programs are; it needs no params."""
    return result.packed()


def step_in_place(step: Callable) -> Callable:
    """A step (params, stream, control) -> (stream, made) that may put what it made in place of what is spent."""

    def run(params: Any, stream: Stream, control: Control, spent: Any) -> tuple[Stream, Any]:
        del spent
        return step(params, stream, control)

    return run
