"""Two small tokenizers in the file format of the real one.

`golden_dir` holds a cut of the DeepSeek-V4 tokenizer: all 256 byte pieces and the few merges that the
golden prompts need, every one under its real id (merge number r makes id 259 + r). `trained_dir` holds a
byte-level BPE trained here, with the same control tokens under other ids, as a pruned tokenizer has them.
"""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from v4flash.text import Tokenizer
from v4flash.text.tokenizer import ASSISTANT, BOS, EOS, PAD, SYSTEM, THINK_CLOSE, THINK_OPEN, USER

# The marks as the published file has them: only these three are "special", the tags are not.
SPECIAL = (BOS, EOS, PAD)
GOLDEN_IDS = {USER: 128803, ASSISTANT: 128804, THINK_OPEN: 128821, THINK_CLOSE: 128822, "｜DSML｜": 128825}
FIRST_BYTE_ID, FIRST_MERGE_ID = 3, 259
# (left, right, number of the merge) for "Hi", "Be", " brief" and the first two bytes of many emoji.
MERGES = [
    ("Ġ", "b", 32),
    ("r", "i", 201),
    ("e", "f", 979),
    ("ð", "Ł", 3315),
    ("ri", "ef", 6659),
    ("B", "e", 6894),
    ("Ġb", "rief", 9449),
    ("H", "i", 22907),
    ("ðŁ", "Ļ", 80041),
]
CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox, it said hello world.\n\n  x = 12345",
    "Be brief",
]


def _added(content: str, token_id: int) -> dict:
    special = content in SPECIAL
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": token_id, "content": content, "special": special, **flags}


def golden_json() -> dict:
    """The parsed tokenizer.json of `golden_dir`."""
    vocab = {content: token_id for token_id, content in enumerate(SPECIAL)}
    for offset, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocab[piece] = FIRST_BYTE_ID + offset
    for left, right, number in MERGES:
        vocab[left + right] = FIRST_MERGE_ID + number
    added = {content: vocab[content] for content in SPECIAL} | GOLDEN_IDS
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # A shorter word pattern than the published one; it cuts the golden prompts at the same places.
    split = {
        "type": "Split",
        "pattern": {"Regex": r" ?[^\s\p{P}]+|\p{P}|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(content, token_id) for content, token_id in added.items()],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right, _ in MERGES],
        },
    }


@pytest.fixture(scope="session")
def golden_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    (folder / "tokenizer.json").write_text(json.dumps(golden_json()), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def golden(golden_dir) -> Tokenizer:
    return Tokenizer.from_dir(golden_dir)


@pytest.fixture(scope="session")
def trained_dir(tmp_path_factory):
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS * 5, trainer)
    bpe.add_special_tokens([BOS, EOS, PAD])
    tags = [USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, SYSTEM]
    bpe.add_tokens([tokenizers.AddedToken(tag, normalized=True, special=False) for tag in tags])
    folder = tmp_path_factory.mktemp("trained")
    bpe.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def trained(trained_dir) -> Tokenizer:
    return Tokenizer.from_dir(trained_dir)
