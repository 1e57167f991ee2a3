"""What a generation did, in numbers: counts, times, acceptance by position.

Knows: how the figures follow from the steps read. Does not know: how they are printed.
Only emitted tokens count: drafts that were never verified, or that the text ended before, are not in any rate.
"""

import dataclasses
import statistics
from typing import Any

SCHEMA = 1


@dataclasses.dataclass
class Statistics:
    """Figures of one generation. Times are seconds unless a name says otherwise.

    Attributes:
      prompt_tokens: tokens run before the first new one (those already in the session excluded).
      prefill_seconds: from the start until the first token was on the host.
      decode_seconds: from then until the last token was on the host.
      generated: tokens emitted, the first one (which prefill draws) included.
      steps: speculative steps that emitted something.
      accepted, drafted: per draft position, how often a draft there was accepted and verified.
      copied, copied_accepted: the same counts of drafts copied from the text, all positions together.
      step_seconds: arrival times between consecutive steps.
      finish: 'eos', 'stop', 'length', 'context', 'repeated' or 'interrupted'.
    """

    k: int
    seed: int
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    generated: int = 0
    steps: int = 0
    accepted: list[int] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    copied: int = 0
    copied_accepted: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    finish: str = ""

    def record(self, emitted: int, accepted: int, drafted: int, copied: bool = False) -> None:
        """Adds one step; `copied` says that its drafts were not the drafter's.

        Where more drafts were accepted than tokens emitted, the text ended with the last one emitted.
        """
        self.steps += 1
        self.generated += emitted
        if accepted >= emitted:
            accepted = drafted = emitted
        if copied:
            self.copied += drafted
            self.copied_accepted += accepted
            return
        while len(self.drafted) < drafted:
            self.drafted.append(0)
            self.accepted.append(0)
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted

    def cut(self, used: int, emitted: int, accepted: int, drafted: int, copied: bool = False) -> None:
        """Takes back what the last step, recorded with these numbers, emitted behind its first `used` tokens."""
        if used == emitted:
            return
        if accepted >= emitted:
            accepted = drafted = emitted
        self.generated -= emitted - used
        if copied:
            self.copied -= drafted - used
            self.copied_accepted -= accepted - used
            return
        for position in range(used, drafted):
            self.drafted[position] -= 1
            self.accepted[position] -= position < accepted
        while self.drafted and not self.drafted[-1]:
            self.drafted.pop()
            self.accepted.pop()

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted per step, the token drawn by prefill excluded; None without steps."""
        return (self.generated - 1) / self.steps if self.steps else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token."""
        return (self.generated - 1) / self.decode_seconds if self.steps and self.decode_seconds > 0 else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def acceptance(self) -> float | None:
        """Accepted over verified drafts; None where nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verified drafts accepted at each position (prefix survival)."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def step_milliseconds(self) -> float | None:
        """Median time between steps."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """All figures, the derived ones included, as JSON-ready values."""
        derived = ("tokens_per_step", "decode_rate", "prefill_rate", "acceptance", "acceptance_by_position")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields.pop("step_seconds")
        return {"schema": SCHEMA, **fields, **{name: getattr(self, name) for name in derived},
                "step_milliseconds": self.step_milliseconds}  # fmt: skip
