"""Text to token ids and back, with control tokens kept out of reach of whoever writes the text.

Knows: the `tokenizer.json` of the DeepSeek-V4 family (byte-level BPE plus added tokens) and the names of
its control tokens. Does not know: how a conversation is framed (`chat`), or how text is released while it
streams (`stream`).

Role tags and think tags are added tokens without the mark "special", so no switch of the tokenizers library
keeps typed text from becoming one of them. The library is therefore given the file without its added tokens:
that encoder spells a typed tag out in ordinary pieces. Frame text is first cut at the added tokens, which is
what the library does with them too, and each cut becomes its id.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import tokenizers

from v4flash.errors import CheckpointError, UsageError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

# SYSTEM is missing here because only the V4.1 tokenizer has it.
REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE)


class Tokenizer:
    """The two encoders and the decoder of one `tokenizer.json`; build it with `from_dir`.

    Attributes: `bos_id`, `eos_id`, `user_id`, `assistant_id`, `think_open_id`, `think_close_id` (int),
    `pad_id` and `system_id` (int, or None where the file has no such token), `vocab_size` (int: the largest
    id plus one).
    """

    def __init__(self, parsed: dict, where: str):
        """Build from the parsed JSON; `where` names the file in messages. Raises CheckpointError."""
        self._where = where
        try:
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))
            pieces = {int(token_id): piece for piece, token_id in parsed["model"]["vocab"].items()}
            added = {int(entry["id"]): entry["content"] for entry in parsed["added_tokens"]}
            loose = [
                t["content"] for t in parsed["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]
            ]
        except Exception as error:  # the library raises bare Exception for a file it cannot use
            raise CheckpointError(
                f"{where} is not a tokenizer that can be used: expected byte-level BPE with added tokens,"
                f" found {_one_line(error)}; copy the file again from the checkpoint's source"
            ) from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        if loose:
            raise CheckpointError(
                f"{where} has added tokens that swallow blanks or need word borders ({', '.join(loose)}):"
                " expected plain ones, as DeepSeek-V4 has; use the file that came with the weights"
            )
        clash = next((i for i in added if i in pieces and pieces[i] != added[i]), None)
        if clash is not None:
            raise CheckpointError(
                f"{where} gives token id {clash} two meanings, {pieces[clash]!r} and {added[clash]!r};"
                " copy the file again from the checkpoint's source"
            )
        self._ids = {content: token_id for token_id, content in added.items()}
        missing = [content for content in REQUIRED if content not in self._ids]
        if missing:
            raise CheckpointError(
                f"{where} lacks the control token(s) {', '.join(missing)}: expected the tokenizer of a"
                " DeepSeek-V4 or V4.1 checkpoint; use the file that came with the weights"
            )
        typed = [content for content, i in self._ids.items() if i in self.encode_text(content)]
        if typed:
            raise CheckpointError(
                f"{where} lets ordinary text spell the control token(s) {', '.join(typed)}, so a message"
                " could forge the frame of the conversation; use the file that came with the weights"
            )
        # Longest first, so that of two tokens that begin alike the longer one is found, as in the library.
        self._tags = re.compile(
            "(" + "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) + ")"
        )
        self._bytes = {i: _piece_bytes(piece) for i, piece in (pieces | added).items()}
        self.vocab_size = max(self._bytes) + 1
        self.bos_id, self.eos_id = self._ids[BOS], self._ids[EOS]
        self.user_id, self.assistant_id = self._ids[USER], self._ids[ASSISTANT]
        self.think_open_id, self.think_close_id = self._ids[THINK_OPEN], self._ids[THINK_CLOSE]
        self.pad_id, self.system_id = self._ids.get(PAD), self._ids.get(SYSTEM)

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Load `tokenizer.json` from a checkpoint directory. Raises CheckpointError if it cannot be used."""
        file = Path(path) / "tokenizer.json"
        if not Path(path).is_dir():
            raise CheckpointError(
                f"no checkpoint directory at {path}; expected one that holds tokenizer.json"
            )
        try:
            raw = file.read_bytes()
        except OSError as error:
            reason = "there is none" if isinstance(error, FileNotFoundError) else error.strerror
            raise CheckpointError(
                f"cannot read {file}: {reason}; copy tokenizer.json from the checkpoint's source"
            ) from None
        if raw.startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{file} is a Git LFS pointer of {len(raw)} bytes, not the tokenizer; fetch the file itself"
            )
        try:
            parsed = json.loads(raw)
        except ValueError as error:
            raise CheckpointError(
                f"{file} is damaged: expected JSON, found {_one_line(error)} in {len(raw):,} bytes;"
                " copy the file again"
            ) from None
        if not isinstance(parsed, dict):
            raise CheckpointError(f"{file} is damaged: expected a JSON object, found {type(parsed).__name__}")
        return cls(parsed, str(file))

    def encode_text(self, text: str) -> list[int]:
        """Ids of text written by a person or kept as data; no id of the result is an added token.

        Raises UsageError for text that is not Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid UTF-8: character {error.start} is the lone surrogate"
                f" U+{ord(text[error.start]):04X}; save the input as UTF-8"
            ) from None
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_frame(self, text: str) -> list[int]:
        """Ids of trusted text in which control tokens are meant: every tag in it becomes its one id.

        Raises UsageError for text that is not Unicode.
        """
        ids: list[int] = []
        for index, part in enumerate(self._tags.split(text)):
            # A split on one group gives text and tags in turn.
            ids += [self._ids[part]] if index % 2 else self.encode_text(part)
        return ids

    def control_id(self, content: str) -> int:
        """The id of one control token, by its content. Raises CheckpointError for one the file lacks."""
        if content not in self._ids:
            raise CheckpointError(
                f"{self._where} has no control token {content}, which this chat encoding writes; use the"
                " tokenizer that came with the weights, or another --encoding"
            )
        return self._ids[content]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; they need not be whole characters. Raises CheckpointError."""
        try:
            return self._bytes[int(token_id)]
        except KeyError:
            raise CheckpointError(
                f"token id {token_id} is not in {self._where}, which ends at {self.vocab_size - 1}; the model"
                " and the tokenizer do not belong together"
            ) from None

    def decode(self, ids: Iterable[int], skip: Collection[int] = ()) -> str:
        """The text of `ids`, control tokens included but for those in `skip`.

        Bytes that do not form a character become U+FFFD, as in the tokenizers library.
        """
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", errors="replace")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode("utf-8")


def _one_line(error: Exception) -> str:
    words: Sequence[str] = str(error).split()
    return " ".join(words) or type(error).__name__
