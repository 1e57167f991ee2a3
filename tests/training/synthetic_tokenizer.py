"""A small tokenizer.json in the published layout, for tests: bytes, a few merges, some control tokens."""

from tokenizers.pre_tokenizers import ByteLevel

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ hello"]
CONTROLS = [
    ("<｜place▁holder▁no▁0｜>", True),
    ("<｜place▁holder▁no▁1｜>", True),
    ("<｜place▁holder▁no▁799｜>", True),
    ("<｜fim▁hole｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<think>", False),
    ("</think>", False),
    ("<｜place▁holder▁no▁800｜>", True),
    ("<｜end_of_query｜>", True),
    ("<｜image｜>", True),
]


def published_layout() -> dict:
    """The parsed tokenizer.json; merge r makes id 259 + r and the control tokens start at 400."""
    specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    entries = [*specials, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    added = [(number, name, True) for number, name in enumerate(specials)]
    added += [(400 + number, name, special) for number, (name, special) in enumerate(CONTROLS)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **plain, "special": special} for i, name, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r" ?\p{L}+|\s+|[^\s\p{L}]+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {entry: number for number, entry in enumerate(entries)},
            "merges": MERGES,
        },
    }
