"""Everything about text: tokenizer, chat encodings, reasoning splitter, safe streaming.

Knows: text and token ids. Does not know: models, devices, sampling or printing; it imports nothing of
v4flash but the errors.
"""

from v4flash.text.chat import ChatEncoding, Message, Segment, conversation, encode_segments, segments_text
from v4flash.text.effort import ENCODINGS, EffortLadder, find_ladder
from v4flash.text.reasoning import Piece, ReasoningSplitter, split_reasoning
from v4flash.text.stream import StopMatcher, StreamDecoder
from v4flash.text.tokenizer import Tokenizer

__all__ = [
    "ENCODINGS",
    "ChatEncoding",
    "EffortLadder",
    "Message",
    "Piece",
    "ReasoningSplitter",
    "Segment",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "conversation",
    "encode_segments",
    "find_ladder",
    "segments_text",
    "split_reasoning",
]
