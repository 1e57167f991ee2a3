"""The Engram token map: the rule on hand-made vocabularies, and against the `tokenizers` normalisers."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from v4flash.checkpoint.engram_map import engram_key, engram_token_map
from v4flash.errors import CheckpointError

DEMO = Path(__file__).parents[2] / "demo"


def word_tokenizer(words):
    """One token a word; decoding one id gives the word back unchanged."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def reference_normalizer():
    """The published rule written with the library's own normalisers."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The", "the"),
        (" the", "the"),
        ("THE\t", "the"),
        ("Élan", "elan"),
        ("E\u0301lan", "elan"),
        ("ﬁne", "fine"),
        ("Ｆｕｌｌ", "full"),
        (" ", " "),
        ("\t\t", " "),
        ("\r\n", " "),
        ("a \n b", "a b"),
        ("\u0301", "\u0301"),
        ("ΟΔΟΣ", "οδοσ"),
        ("ा", "ा"),
    ],
)
def test_key(text, key):
    assert engram_key(text) == key


def test_equal_keys_share_an_id_numbered_by_first_appearance():
    words = ["<bos>", "<eos>", "<pad>", "cat", "dog", " Cat", "CÂT", "bird", "\n", " ", "Dog "]
    assert engram_token_map(word_tokenizer(words)) == [0, 1, 2, 3, 4, 3, 3, 5, 6, 6, 4]


def test_parts_of_characters_keep_their_raw_name():
    """Byte tokens that decode to U+FFFD stay apart although they all decode to the same text."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "A": 1, "b": 2, "ð": 3, "Ł": 4}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert engram_token_map(tokenizer) == [0, 0, 1, 2, 3]


def test_padded_ids_take_the_id_of_the_padding_token():
    tokenizer = word_tokenizer(["<bos>", "<BOS>", "<pad>", "a"])
    assert engram_token_map(tokenizer, vocab_size=7) == [0, 0, 1, 2, 1, 1, 1]
    assert engram_token_map(tokenizer, vocab_size=5, pad_token_id=3) == [0, 0, 1, 2, 2]


def test_sizes_that_do_not_fit_are_refused():
    tokenizer = word_tokenizer(["<bos>", "<eos>", "<pad>", "a"])
    with pytest.raises(CheckpointError, match="4 entries .* vocab_size 3"):
        engram_token_map(tokenizer, vocab_size=3)
    with pytest.raises(CheckpointError, match="engram_pad_token_id 4 lies outside"):
        engram_token_map(tokenizer, pad_token_id=4)


def test_a_gap_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
    with pytest.raises(CheckpointError, match="none with id 2"):
        engram_token_map(tokenizer)


def test_demonstration_vocabulary_agrees_with_the_library_normalisers():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    normalise = reference_normalizer().normalize_str
    numbers, expected = {}, []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalise(text) or text
        expected.append(numbers.setdefault(key, len(numbers)))
    found = engram_token_map(tokenizer, vocab_size=4160)
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) == {found[2]} == {2}
    assert len(set(found)) < len(json.loads((DEMO / "token_ids.json").read_text()))
