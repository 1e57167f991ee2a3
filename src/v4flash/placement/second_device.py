"""A device that computes for another one, and the thread that owns it; and waiting that ends.

Knows: how work reaches the device and comes back as arrays of the first one, and what is said when nothing comes. Does
not know: what is computed, or what the first device does meanwhile.

The two devices need nothing in common: values go over by `jax.device_put`, and back the same way. Where both belong to
one client all of this is queued on the devices and the thread is at once free again. Where they do not, a transfer
takes as long as it takes, and takes the thread instead of the caller, who goes on with the first device's work.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from v4flash.errors import V4FlashError

PATIENCE = (
    60.0  # seconds; callers wait for two passes at most, which take far less on any device worth asking
)
COMPILING = 1800.0  # seconds; a compiler tries its choices on the device, which may be gone by then


class Worker:
    """A persistent thread that calls what it is given, in order; it ends with the process, or with `close`."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Has the thread call function(*arguments); returns at once."""
        future: Future = Future()
        self._calls.put((function, arguments, future))
        return future

    def close(self) -> None:
        """Ends the thread once it has done what it was given."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, arguments, future = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del call, function, arguments, future  # or the arrays would live until the next call


class Waiting:
    """Waits for what a device makes, but not for ever: a device that is gone never says so by itself.

    Args: what, names the device in a sentence; patience, seconds after which nothing is expected any more, by default
    PATIENCE.
    """

    def __init__(self, what: str, patience: float | None = None):
        self._what, self._patience = what, PATIENCE if patience is None else patience
        self._reader = Worker("reader of results")
        self._lost: V4FlashError | None = None

    def result(self, future: Future) -> Any:
        """The result of a Worker's call. Raises V4FlashError where it failed or took too long; from then on always."""
        if self._lost is None:
            try:
                return future.result(self._patience)
            except TimeoutError:
                self._lost = self._error(f"gave no answer for {self._patience:g} s")
            except Exception as error:
                self._lost = self._error(f"failed ({(str(error).strip().splitlines() or [repr(error)])[0]})")
        raise self._lost

    def read(self, tree: Any) -> Any:
        """Values on the host, as `jax.device_get` brings them; raises as `result` does."""
        if self._lost is not None:
            raise self._lost
        return self.result(self._reader.submit(jax.device_get, tree))

    def compiled(self, compile: Callable, *arguments: Any, patience: float = COMPILING) -> Any:
        """compile(*arguments), in a thread of its own; what it raises is raised here.

        Raises V4FlashError where it takes longer than `patience` seconds.
        """
        worker = Worker("compiler")
        future = worker.submit(compile, *arguments)
        worker.close()
        done, _ = concurrent.futures.wait([future], patience)
        if not done:
            raise self._error(f"compiled nothing for {patience:g} s")
        return future.result()

    def close(self) -> None:
        """Ends the thread that reads."""
        self._reader.close()

    def _error(self, what: str) -> V4FlashError:
        return V4FlashError(
            f"{self._what} {what}; start again, or decode without it (--experts resident or host)"
        )


class SecondDevice:
    """What a first device asks for its share of the work.

    Args:
      device: the second device; a thread of its own does whatever concerns it.
      home: the first device, where results go.
      compute: (number of the computation, arrays on `device`) -> array on `device`.
      patience: as of `Waiting`.
    """

    def __init__(
        self,
        device: jax.Device,
        home: jax.Device,
        compute: Callable[[int, tuple[jax.Array, ...]], jax.Array],
        patience: float | None = None,
    ):
        self._device, self._home, self._compute = device, home, compute
        self._owner = Worker(f"owner of {device}")
        self.waiting = Waiting(f"the second device, {device},", patience)

    def send(self, place: int, values: Sequence[jax.Array]) -> Future:
        """Asks for computation number `place` of values on the first device; returns at once."""
        return self._owner.submit(self._answer, place, tuple(values))

    def receive(self, future: Future) -> jax.Array:
        """The result of `send` on the first device, where it may still be on its way; raises as `Waiting.result`."""
        return self.waiting.result(future)

    def close(self) -> None:
        """Ends both threads once they have done what they were given."""
        self._owner.close()
        self.waiting.close()

    def _answer(self, place: int, values: tuple[jax.Array, ...]) -> jax.Array:
        return jax.device_put(self._compute(place, jax.device_put(values, self._device)), self._home)
