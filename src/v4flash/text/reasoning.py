"""Split a model's answer into reasoning and content while it streams.

Knows: the think tags, and what the prompt ended with. Does not know: how either part is shown, or tool calls.
"""

from dataclasses import dataclass
from typing import Literal

from v4flash.text.stream import open_prefix
from v4flash.text.tokenizer import THINK_CLOSE, THINK_OPEN

Part = Literal["reasoning", "content"]
TAGS = (THINK_OPEN, THINK_CLOSE)


@dataclass(frozen=True)
class Piece:
    """A stretch of streamed text and the part of the answer that it belongs to."""

    part: Part
    text: str


class ReasoningSplitter:
    """Sort streamed text into reasoning and content, without the tags.

    With `thinking=True` the prompt ended in `<think>`: the answer begins inside the reasoning, and an
    opening tag that the model repeats there is dropped. With `thinking=False` the prompt ended in
    `</think>`: the answer is content, unless the model opens a block itself at the very start. The first
    closing tag ends the reasoning. Tags in the content are dropped and counted in `stray_tags`, so that no
    raw tag reaches a reader unnoticed.

    Attributes: `reasoning` and `content` (str, all text so far), `stray_tags` (int).
    """

    def __init__(self, thinking: bool):
        self._part: Part = "reasoning" if thinking else "content"
        self._at_start = True
        self._held = ""
        self.reasoning = ""
        self.content = ""
        self.stray_tags = 0

    @property
    def unfinished(self) -> bool:
        """True while the reasoning is open: no closing tag has come."""
        return self._part == "reasoning"

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` decides, in order; the beginning of a possible tag is held back."""
        buffer = self._held + text
        pieces: list[Piece] = []
        while (tag := self._next_tag(buffer)) is not None:
            at, name = tag
            self._emit(pieces, buffer[:at])
            self._turn(name)
            buffer = buffer[at + len(name) :]
        keep = max(open_prefix(buffer, name) for name in self._tags_here())
        self._held = buffer[len(buffer) - keep :]
        self._emit(pieces, buffer[: len(buffer) - keep])
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back at the end of the answer: a tag that never came to its end is text."""
        pieces: list[Piece] = []
        rest, self._held = self._held, ""
        self._emit(pieces, rest)
        return pieces

    def _tags_here(self) -> tuple[str, ...]:
        # Inside the reasoning an opening tag means something only as its first characters.
        return TAGS if self._part == "content" or self._at_start else (THINK_CLOSE,)

    def _next_tag(self, buffer: str) -> tuple[int, str] | None:
        found = [(at, name) for name in TAGS if (at := buffer.find(name)) >= 0]
        if self._part == "reasoning" and not (self._at_start and buffer.startswith(THINK_OPEN)):
            found = [(at, name) for at, name in found if name == THINK_CLOSE]
        return min(found, default=None)

    def _turn(self, name: str) -> None:
        if self._part == "reasoning":
            self._part = "content" if name == THINK_CLOSE else "reasoning"
        elif name == THINK_OPEN and self._at_start:
            self._part = "reasoning"
        else:
            self.stray_tags += 1
        self._at_start = False

    def _emit(self, pieces: list[Piece], text: str) -> None:
        if not text:
            return
        self._at_start = False
        if self._part == "reasoning":
            self.reasoning += text
        else:
            self.content += text
        pieces.append(Piece(self._part, text))


def split_reasoning(text: str, thinking: bool) -> tuple[str, str, bool]:
    """A whole answer as (reasoning, content, unfinished); `thinking` as in `ReasoningSplitter`."""
    splitter = ReasoningSplitter(thinking)
    splitter.push(text)
    splitter.flush()
    return splitter.reasoning, splitter.content, splitter.unfinished
