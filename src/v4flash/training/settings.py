"""Sizes and budgets of a training run.

Knows: the defaults for one H200 and those of a smoke run. Does not know: what they are used for.
"""

import dataclasses

PROMPT_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and budgets of a run; minutes hold where the matching number of steps is None.

    Attributes:
      deadline: seconds since the epoch by which everything must be written; minutes are then shares of the time that
        is left when a stage starts.
    """

    minutes_target: float = 2.5
    minutes_joint: float = 8.0
    minutes_samples: float = 2.0
    minutes_draft: float = 6.5
    deadline: int | None = None
    steps_target: int | None = None
    steps_joint: int | None = None
    rounds_samples: int = 30
    steps_draft: int | None = None
    lengths: tuple[int, int, int] = (512, 512, 1024)
    tokens_per_step: int = 32768
    tokens_per_microbatch: int = 16384
    joint_tokens: int = 16384
    joint_blocks: int = 2048
    rate_target: float = 2.5e-3
    rate_joint: float = 1.8e-3
    rate_draft: float = 1.2e-3
    balance_rate: float = 3e-3
    sample_streams: int = 1024
    sample_tokens: int = 448
    draft_sequences: int = 20
    anchors: int = 96
    evaluation_sequences: int = 64
    log_seconds: float = 10.0
    evaluate_seconds: float = 70.0
    save_seconds: float = 120.0
    dtype: str = "bfloat16"
    seed: int = 20261129

    @property
    def sample_length(self) -> int:
        return PROMPT_LENGTH + self.sample_tokens


SMOKE = Settings(
    steps_target=6,
    steps_joint=6,
    rounds_samples=1,
    steps_draft=4,
    lengths=(32, 64, 128),
    tokens_per_step=256,
    tokens_per_microbatch=128,
    joint_tokens=128,
    joint_blocks=8,
    sample_streams=4,
    sample_tokens=16,
    draft_sequences=4,
    anchors=4,
    evaluation_sequences=2,
    log_seconds=0.0,
    evaluate_seconds=0.0,
    dtype="float32",
)
