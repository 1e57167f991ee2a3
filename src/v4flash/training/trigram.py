"""The simplest drafter worth beating: the most frequent token behind the last two.

Knows: counts over token streams, backing off from pairs to single tokens to the most frequent token of all,
and how such a drafter would have fared along a given text. Does not know: models, files.
"""

from collections.abc import Sequence

import numpy as np


class Trigram:
    """Greedy next-token tables; among equally frequent tokens the lowest id wins."""

    def __init__(self, streams: Sequence[np.ndarray], vocabulary: int):
        """Counts `streams` (whole numbers [N] each, ids below `vocabulary`, at least one token in all)."""
        self._vocabulary = vocabulary
        streams = [np.asarray(stream, np.int64) for stream in streams]
        pairs = [stream[:-2] * vocabulary + stream[1:-1] for stream in streams]
        self._pairs = _best_followers(pairs, [stream[2:] for stream in streams], vocabulary)
        singles = [stream[:-1] for stream in streams]
        self._singles = _best_followers(singles, [stream[1:] for stream in streams], vocabulary)
        totals = np.bincount(np.concatenate(streams), minlength=vocabulary)
        self._commonest = int(np.argmax(totals))

    def next(self, before: int, last: int) -> int:
        """The token expected behind `before`, `last`."""
        tables = (self._pairs, before * self._vocabulary + last), (self._singles, last)
        for (contexts, followers), context in tables:
            place = int(np.searchsorted(contexts, context))
            if place < len(contexts) and contexts[place] == context:
                return int(followers[place])
        return self._commonest

    def draft(self, before: int, last: int, count: int) -> list[int]:
        """`count` tokens, each behind those drafted before it."""
        drafts: list[int] = []
        for _ in range(count):
            before, last = last, self.next(before, last)
            drafts.append(last)
        return drafts


def _best_followers(
    contexts: list[np.ndarray], followers: list[np.ndarray], vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted contexts [C], and the most frequent follower of each [C]."""
    codes = np.concatenate(contexts) * vocabulary + np.concatenate(followers)
    codes, counts = np.unique(codes, return_counts=True)
    context, follower = codes // vocabulary, codes % vocabulary
    order = np.lexsort((follower, -counts, context))
    context, follower = context[order], follower[order]
    first = np.flatnonzero(np.diff(context, prepend=-1))
    return context[first], follower[first]


def replay(trigram: Trigram, prompt: Sequence[int], ids: Sequence[int], k: int, until: int) -> list[int]:
    """Tokens of each step that the trigram would have taken along `ids`, which were generated behind `prompt`.

    The first id is given, as prefill draws it. A step drafts `k` tokens, keeps those equal to the text and
    gets the next token of the text on top. Steps start before index `until`, and may look past it; at the
    end of the text a step gets what is left.
    """
    text, offset = [*prompt, *ids], len(prompt)
    emitted, at = [], 1
    while at < until:
        position = offset + at
        drafts = trigram.draft(text[position - 2], text[position - 1], k)
        following = text[position : position + k]
        agree = [draft == token for draft, token in zip(drafts, following, strict=False)]
        accepted = agree.index(False) if False in agree else len(agree)
        emitted.append(min(accepted + 1, len(text) - position))
        at += emitted[-1]
    return emitted
