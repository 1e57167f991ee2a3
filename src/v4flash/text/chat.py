"""A conversation as the prompt that a checkpoint was trained on.

Knows: the frame of the V4 and V4.1 encodings for a system message, user messages and answers. Does not
know: tools, images and the task tokens (those messages have no class here), or where effort texts are kept
(`effort`).

A prompt is rendered as segments, so that what a person wrote never meets the control tokens as text: a
control segment becomes its id by name, and everything between two of them is encoded as one stretch without
added tokens. Added tokens cut the text before anything else does, so for text without tags these are the
ids of one pass over the whole prompt. Source of the frames: DeepSeek's encoders for V4 and V4.1.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from v4flash.errors import UsageError
from v4flash.text.effort import V4_1, EffortLadder, find_ladder
from v4flash.text.tokenizer import ASSISTANT, BOS, EOS, SYSTEM, THINK_CLOSE, THINK_OPEN, USER, Tokenizer


@dataclass(frozen=True)
class Message:
    """One turn. An answer's `content` is what followed `</think>`: earlier reasoning is not sent again."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered prompt: a control token, words of the checkpoint, or what somebody wrote."""

    kind: Literal["control", "paragraph", "content"]
    text: str


@dataclass(frozen=True)
class ChatEncoding:
    """One checkpoint's way of writing a conversation. `chosen_by` says what the choice came from."""

    ladder: EffortLadder
    chosen_by: str

    @classmethod
    def for_checkpoint(
        cls, directory: str | Path, model_type: str, override: str | None = None
    ) -> "ChatEncoding":
        """Choose by `override`, the files in `directory`, or `model_type`, in this order.

        Raises the errors of `find_ladder`.
        """
        return cls(*find_ladder(directory, model_type, override))

    @property
    def name(self) -> str:
        """`v4-preview`, `v4-0731` or `v4.1`."""
        return self.ladder.encoding

    def render(self, messages: Sequence[Message], think: str = "off") -> list[Segment]:
        """The prompt for the answer to the last message.

        `messages`: an optional system message, then user and assistant messages in turn, the last from the
        user. `think`: "off", "on", or an effort of the ladder. Raises UsageError for another order of
        messages, and the errors of `EffortLadder.paragraph`.
        """
        system, turns = _split(messages)
        paragraph = "" if think == "off" else self.ladder.paragraph(think)
        segments = [Segment("control", BOS)]
        if self.name == V4_1 and (paragraph or system is not None):
            segments.append(Segment("control", SYSTEM))
        segments.append(Segment("paragraph", paragraph))
        if system is not None:
            segments.append(Segment("content", system.content))
        for index, message in enumerate(turns):
            if message.role == "assistant":
                segments += [Segment("content", message.content), Segment("control", EOS)]
                continue
            # An earlier answer stands without its reasoning, hence behind the closing tag in either mode.
            opens = think != "off" and index == len(turns) - 1
            segments += [
                Segment("control", USER),
                Segment("content", message.content),
                Segment("control", ASSISTANT),
                Segment("control", THINK_OPEN if opens else THINK_CLOSE),
            ]
        return [segment for segment in segments if segment.text]


def conversation(user: str, system: str | None = None) -> list[Message]:
    """The messages of a first turn."""
    first = [] if system is None else [Message("system", system)]
    return [*first, Message("user", user)]


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids of a rendered prompt. Raises CheckpointError for a control token the tokenizer lacks."""
    ids: list[int] = []
    for control, run in itertools.groupby(segments, key=lambda segment: segment.kind == "control"):
        if control:
            ids += [tokenizer.control_id(segment.text) for segment in run]
        else:
            ids += tokenizer.encode_text("".join(segment.text for segment in run))
    return ids


def segments_text(segments: Iterable[Segment]) -> str:
    """The rendered prompt as text, for showing it."""
    return "".join(segment.text for segment in segments)


def _split(messages: Sequence[Message]) -> tuple[Message | None, Sequence[Message]]:
    system = messages[0] if messages and messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    if len(turns) % 2 == 0 or [message.role for message in turns] != expected:
        found = ", ".join(message.role for message in messages) or "no message"
        raise UsageError(
            "a conversation is an optional system message, then user and assistant messages in turn, the last"
            f" from the user; found: {found}"
        )
    return system, turns
