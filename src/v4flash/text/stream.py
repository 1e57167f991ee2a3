"""Text that is safe to show while tokens still arrive, and stop strings.

Knows: that a character may be spread over several tokens, and a stop string over several pieces of text.
Does not know: which tokens end a run, or what the text means.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence

from v4flash.errors import UsageError
from v4flash.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turn ids into text as they come: a character is released when its last byte is there.

    The pieces from `push` and the one from `flush`, joined, equal `tokenizer.decode(all ids, skip)` however
    the ids were cut into blocks.
    """

    def __init__(self, tokenizer: Tokenizer, skip: Collection[int] = ()):
        """`skip`: ids that show no text, for example the end-of-sentence token."""
        self._tokenizer = tokenizer
        self._skip = frozenset(skip)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; empty while a character is still open."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skip)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that never came to its end."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopMatcher:
    """Release text up to the first stop string to be completed, and nothing after it.

    Text that may be the beginning of a stop string is held back until that is decided. The result does not
    depend on how the text was cut into pieces: the stop whose last character comes first wins, and of
    several that end there, the longest. To count tokens exactly, push the text of one token at a time and
    look at `stopped` after each.
    """

    def __init__(self, stops: Sequence[str] = ()):
        """`stops`: the stop strings. Raises UsageError for an empty one."""
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty; give at least one character, or leave --stop out")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string; empty once stopped."""
        if self.stopped is not None:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return buffer[:start]
        keep = max((open_prefix(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The held-back text, when the run ended for another reason."""
        rest, self._held = self._held, ""
        return rest


def open_prefix(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, but not all of it."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0
