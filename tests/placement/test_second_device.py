"""A second device answers through its thread; one that fails or falls silent is one sentence."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from v4flash.errors import V4FlashError
from v4flash.placement.second_device import SecondDevice

PATIENCE = 0.3
COMPUTATIONS = 100
# Far more than patience, far less than a person waits: a machine may be busy.
SOON = 20.0


def second(compute, patience: float = PATIENCE) -> SecondDevice:
    """One that stands beside itself: there is one device here."""
    device = jax.devices()[0]
    return SecondDevice(device, device, compute, patience)


def refusal(found: SecondDevice, call) -> str:
    started = time.perf_counter()
    with pytest.raises(V4FlashError) as raised:
        call()
    assert time.perf_counter() - started < SOON
    assert "start again" in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


def test_computations_are_done_in_order_and_answered_by_their_own_ticket():
    found = second(lambda place, values: values[0] * 10 + place, patience=SOON)
    tickets = [found.send(place, [jnp.float32(place)]) for place in range(COMPUTATIONS)]
    assert [float(found.receive(ticket)) for ticket in reversed(tickets)] == [
        11.0 * place for place in reversed(range(COMPUTATIONS))
    ]
    assert found.waiting.read({"a": jnp.int32(3)}) == {"a": 3}
    found.close()


def test_a_device_that_fails_says_so_at_once_and_ever_after():
    def broken(place, values):
        raise RuntimeError("device was unplugged\nlong story")

    found = second(broken, patience=SOON)
    ticket = found.send(0, [jnp.ones(2)])
    said = refusal(found, lambda: found.receive(ticket))
    assert "failed (device was unplugged)" in said
    assert refusal(found, lambda: found.waiting.read(jnp.ones(2))) == said
    assert refusal(found, lambda: found.receive(found.send(1, [jnp.ones(2)]))) == said


def test_a_device_that_falls_silent_is_not_waited_for():
    release = threading.Event()

    def stuck(place, values):
        release.wait(SOON)
        return values[0]

    found = second(stuck)
    ticket = found.send(0, [jnp.ones(2)])
    said = refusal(found, lambda: found.receive(ticket))
    assert f"gave no answer for {PATIENCE:g} s" in said
    assert refusal(found, lambda: found.waiting.read(jnp.ones(2))) == said
    release.set()


def test_a_result_that_never_comes_is_not_waited_for():
    """The thread has queued the work and named its result, but the device never finishes."""
    release = threading.Event()

    def wait(x):
        release.wait(SOON)
        return x

    program = jax.jit(lambda x: jax.pure_callback(wait, x, x))
    found = second(lambda place, values: program(*values))
    ticket = found.send(0, [jnp.ones(2)])
    try:
        assert "gave no answer" in refusal(found, lambda: found.waiting.read(found.receive(ticket) + 1))
    finally:
        release.set()


def test_a_result_that_failed_on_the_device_is_one_sentence():
    def fail(x):
        raise ValueError("bad memory")

    program = jax.jit(lambda x: jax.pure_callback(fail, x, x))
    found = second(lambda place, values: program(*values), patience=SOON)
    ticket = found.send(0, [jnp.ones(2)])
    assert "failed (" in refusal(found, lambda: found.waiting.read(found.receive(ticket)))


def test_compiling_that_never_ends_is_one_sentence_and_what_it_raises_is_raised():
    found = second(None).waiting
    assert found.compiled(lambda x: x + 1, 2, patience=SOON) == 3
    with pytest.raises(ValueError, match="these shapes"):
        found.compiled(exec, "raise ValueError('not these shapes')")
    release = threading.Event()
    said = refusal(second(None), lambda: found.compiled(release.wait, SOON, patience=PATIENCE))
    assert f"compiled nothing for {PATIENCE:g} s" in said
    release.set()
