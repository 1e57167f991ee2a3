"""A conversation's tokens and the device state that belongs to them.

Knows: prefill of what is new, the pinned loop that reads tokens one step late, rewinding, copying. Does not
know: text. Between generations every token but the last is committed to the device state; the last one is
the anchor of the next step.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from v4flash.engine.programs import Programs, new_stream
from v4flash.engine.statistics import Statistics
from v4flash.errors import CapacityError, UsageError, V4FlashError
from v4flash.speculative.stream import LIMIT, REPEATED, RUNNING, STOPPED, Control, StepResult, Stream
from v4flash.state import DecodeState


@dataclasses.dataclass(frozen=True)
class TokenStep:
    """Tokens that became final together.

    Attributes:
      tokens: the emitted ids; those before the last were drafted and accepted, the last is the target's own.
      drafts: the drafted ids that were verified.
      confidence: the drafter's predicted acceptance of each of them.
      accepted: how many drafts were accepted.
      position: absolute position of the first emitted token.
      copied: whether the drafts were copied from the text instead of drafted.
    """

    tokens: list[int]
    drafts: list[int]
    confidence: list[float]
    accepted: int
    position: int
    copied: bool = False


class Session:
    """One stream of tokens. Not thread-safe; copy it to branch.

    Attributes:
      tokens: all token ids so far, prompts and generated ones.
    """

    def __init__(self, programs: Programs, params, empty_state: DecodeState):
        self.tokens: list[int] = []
        self._programs = programs
        self._params = params
        self._state = empty_state
        self._committed = 0
        self._reach = 0  # one past the highest position ever written

    def copy(self) -> "Session":
        """An independent session with the same tokens and state."""
        other = Session(self._programs, self._params, jax.tree.map(jnp.copy, self._state))
        other.tokens = list(self.tokens)
        other._committed, other._reach = self._committed, self._reach
        return other

    @property
    def context(self) -> int:
        """Positions this session can hold."""
        return self._programs.shapes.context

    @property
    def state(self) -> DecodeState:
        """The device state of the committed tokens."""
        return self._state

    def rewind(self, length: int) -> None:
        """Forgets all tokens from position `length` on.

        Costs nothing while at most `max_rows - 1` positions are dropped since the furthest one ever written;
        beyond that the caches' rings have moved on and the remaining tokens are prefilled again when needed.
        """
        if not 0 <= length <= len(self.tokens):
            raise UsageError(f"cannot rewind to {length}: the session holds {len(self.tokens)} tokens")
        del self.tokens[length:]
        kept = min(self._committed, max(length - 1, 0))
        if self._reach - kept > self._programs.shapes.max_rows - 1:
            kept = 0
        self._set_committed(kept)

    def _set_committed(self, count: int) -> None:
        self._committed = count
        if count == 0:
            self._reach = 0
        self._state = self._state.replace(length=jnp.asarray(count, jnp.int32))

    def prefill(self, control: Control) -> tuple[jax.Array, jax.Array]:
        """Commits every token not yet committed; returns the token drawn behind them and its usable flag."""
        pending = self.tokens[self._committed :]
        if not pending:
            raise UsageError("nothing to continue from: the prompt is empty")
        chunk = self._programs.shapes.chunk
        drawn = usable = None
        for start in range(0, len(pending), chunk):
            before = drawn
            part = pending[start : start + chunk]
            tokens = jnp.asarray(part + [0] * (chunk - len(part)), jnp.int32)
            count = jnp.asarray(len(part), jnp.int32)
            self._state, drawn, usable = self._programs.prefill(
                self._params, self._state, tokens, count, control
            )
            if before is not None:  # one late, so that nobody ever waits for more than two chunks
                self._programs.runner.read(before)
        self._committed = len(self.tokens)
        self._reach = max(self._reach, self._committed)
        return drawn, usable

    def generate(
        self, prompt: Sequence[int], control: Control, max_tokens: int, statistics: Statistics
    ) -> Iterator[TokenStep]:
        """Appends `prompt`, then yields steps until a stop id, the limit or the context's end.

        Closing the iterator early leaves the session at the last step yielded, ready for use. Figures are
        written to `statistics` as they become known.
        """
        room = self.context - len(self.tokens) - len(prompt)
        if room < 0:
            raise CapacityError(
                f"prompt has {len(self.tokens) + len(prompt):,} tokens, context is {self.context:,}; "
                "shorten the prompt or raise --ctx"
            )
        self.tokens.extend(int(token) for token in prompt)
        budget = min(max_tokens, room)
        at_limit = "length" if max_tokens <= room else "context"
        statistics.prompt_tokens = len(self.tokens) - self._committed
        if budget == 0:
            statistics.finish = at_limit
            return
        started, before = time.perf_counter(), self._committed
        drawn, usable = self.prefill(control)
        first = int(self._programs.runner.read(drawn))
        first_at = time.perf_counter()
        statistics.prefill_seconds = first_at - started
        if not bool(jax.device_get(usable)):
            self._set_committed(before)
            raise self._broken(self.tokens[before:], self._programs.shapes.chunk)
        stop_ids = set(jax.device_get(control.stop_ids).tolist())
        self.tokens.append(first)
        statistics.generated = 1
        stopped = first in stop_ids
        statistics.finish = "eos" if stopped else at_limit if budget == 1 else "interrupted"
        yield TokenStep([first], [], [], 0, len(self.tokens) - 1)
        if stopped or budget == 1:
            return
        yield from self._steps(control, budget - 1, at_limit, statistics, first_at)

    def _steps(
        self, control: Control, remaining: int, at_limit: str, statistics: Statistics, first_at: float
    ) -> Iterator[TokenStep]:
        """The pinned loop. Step n + 1 is dispatched before step n is read, so the device never waits."""
        runner = self._programs.runner
        stream = new_stream(self._state, self.tokens, remaining, control, self._programs.shapes)
        stream, control = runner.place((stream, control))
        in_flight: list[jax.Array] = []
        finish, last_at = RUNNING, first_at
        broken = None
        try:
            while finish == RUNNING:
                with jax.no_tracing(), jax.transfer_guard("disallow"):
                    while len(in_flight) < 2:
                        stream, words = self._programs.step(self._params, stream, control)
                        in_flight.append(words)
                    words = in_flight.pop(0)
                    result = self._result(words)
                now = time.perf_counter()
                statistics.step_seconds.append(now - last_at)
                last_at = now
                statistics.decode_seconds = now - first_at
                if not bool(result.usable):
                    broken = result
                    in_flight.insert(0, words)
                    break
                step = self._read(result, statistics)
                finish = int(result.finish)
                statistics.finish = {
                    RUNNING: "interrupted", STOPPED: "eos", LIMIT: at_limit, REPEATED: "repeated"
                }[finish]  # fmt: skip
                yield step
        finally:
            self._settle(stream, in_flight)
        if broken is not None:
            drafts = broken.drafts[: int(broken.drafted)].tolist()
            raise self._broken([*self.tokens[self._committed :], *drafts], self._programs.shapes.rows)

    def _result(self, words: jax.Array) -> StepResult:
        """What a step said, once it is there."""
        return StepResult.unpacked(self._programs.runner.read(words))

    def _read(self, result: StepResult, statistics: Statistics) -> TokenStep:
        """Takes one step's result into the session."""
        emitted, drafted, copied = int(result.emitted), int(result.drafted), bool(result.copied)
        accepted = min(int(result.accepted), emitted)
        position = len(self.tokens)
        tokens = result.tokens[:emitted].tolist()
        self.tokens.extend(tokens)
        self._committed += emitted
        self._reach = max(self._reach, self._committed - emitted + drafted + 1)
        statistics.record(emitted, int(result.accepted), drafted, copied)
        drafts, confidence = result.drafts[:drafted].tolist(), result.confidence[:drafted].tolist()
        return TokenStep(tokens, drafts, confidence, accepted, position, copied)

    def _settle(self, stream: Stream, in_flight: list[jax.Array]) -> None:
        """Takes back the device state and drops what steps in flight added beyond the tokens yielded."""
        ahead = sum(int(self._result(words).emitted) for words in in_flight)
        self._state = stream.decode
        device_length = self._committed + ahead
        rows = self._programs.shapes.rows
        self._reach = max(self._reach, device_length + (rows if ahead else 0))
        if ahead:
            self._set_committed(self._committed)

    def _broken(self, tokens: list[int], rows: int) -> V4FlashError:
        """The error for a pass of `rows` rows over `tokens` whose logits were not finite, found by running it again.

        Where that is not possible any more, or shows nothing, the whole text is run again from an empty state.
        """
        diagnosis, fault = self._programs.diagnosis, None
        if len(tokens) <= rows and self._reach - self._committed < self._programs.shapes.max_rows:
            _, fault = diagnosis.of_pass(self._params, self._state, tokens, rows)
        if fault is None:
            empty = jax.tree.map(jnp.zeros_like, self._state)
            fault = diagnosis.of_text(self._params, empty, self.tokens, self._programs.shapes.chunk)
        if fault is None:
            return V4FlashError(
                f"non-finite logits behind token {len(self.tokens)}, but finite ones when the text was run again: "
                "the caches were damaged; start a new session, and report this"
            )
        return V4FlashError(f"non-finite logits at token {fault.position}, {fault}")
