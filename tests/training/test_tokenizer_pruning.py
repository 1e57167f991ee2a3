"""Pruning a small synthetic tokenizer, and the demonstration tokenizer that is shipped."""

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_tokenizer import MERGES, published_layout
from tokenizers import Tokenizer

from v4flash.errors import CheckpointError
from v4flash.training.tokenizer_pruning import (
    BOS,
    EOS,
    NOISE,
    PAD,
    SYSTEM,
    class_weighted_counts,
    content_tokenizer,
    kept_merges,
    prune,
    usage_counts,
    write_tokenizer,
)

DEMO = Path(__file__).parents[2] / "demo"
FIRST_MERGE = 259


def pairs(merges):
    return [tuple(merge.split(" ")) for merge in merges]


def pruned(texts, base_size):
    published = published_layout()
    counts = usage_counts(content_tokenizer(published), texts, FIRST_MERGE + len(MERGES))
    return prune(published, counts, base_size)


def test_ancestors_are_kept_with_a_used_token():
    """ "hello" is the only token used, so the three tokens it is built from stay and nothing else does."""
    chosen = kept_merges(pairs(MERGES), {"hello": 5.0}, 4)
    assert [MERGES[number] for number in chosen] == ["h e", "l l", "he ll", "hell o"]


def test_usage_of_a_removed_token_flows_to_its_parts():
    """Ġworld goes first (1 < 2); its use then makes Ġwor (0 + 1) and ld (0 + 1) worth as much as it was."""
    usage = {"hello": 2.0, "Ġworld": 1.0, "ld": 0.5}
    chosen = kept_merges(pairs(MERGES), usage, 5)
    # hello and its ancestors, and ld, which is worth 1.5 where Ġwor is worth 1.
    assert [MERGES[number] for number in chosen] == ["h e", "l l", "he ll", "hell o", "l d"]


def test_a_token_made_of_one_part_twice_counts_it_twice():
    merges = [("a", "a"), ("aa", "aa"), ("b", "b")]
    assert kept_merges(merges, {"aaaa": 2.0, "bb": 3.0}, 1) == [0]


def test_layout_of_the_result():
    description, real_ids = pruned(["hello hello"], FIRST_MERGE + 5)
    names = {token["id"]: token["content"] for token in description["added_tokens"]}
    assert [names[i] for i in range(3)] == [BOS, EOS, PAD]
    vocabulary = description["model"]["vocab"]
    published = published_layout()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(FIRST_MERGE + 5))
    assert all(published[token] == real_ids[new] for token, new in vocabulary.items())
    kept = [merge.replace(" ", "") for merge in description["model"]["merges"]]
    assert [vocabulary[token] for token in kept] == list(range(FIRST_MERGE, FIRST_MERGE + 5))
    assert real_ids[FIRST_MERGE + 5 :] == [400, 402, 403, 404, 405, 406, 407, 409]


def test_system_mark_takes_the_place_of_the_last_placeholder():
    description, real_ids = pruned(["hello"], FIRST_MERGE + 4)
    system = next(token for token in description["added_tokens"] if token["content"] == SYSTEM)
    assert real_ids[system["id"]] == 402
    assert not system["special"]
    contents = [token["content"] for token in description["added_tokens"]]
    assert NOISE in contents and "<｜place▁holder▁no▁1｜>" not in contents and "<｜image｜>" not in contents


@pytest.mark.parametrize("keep", [0, 3, len(MERGES)])
def test_round_trip_for_any_size(keep):
    description, _ = pruned(["hello world"], FIRST_MERGE + keep)
    tokenizer = Tokenizer.from_str(json.dumps(description))
    text = f"{BOS}<｜User｜>hello world 🙂\r\n\tx  y{EOS}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < FIRST_MERGE + keep + 8


def test_content_never_becomes_a_control_token():
    description, _ = pruned(["hello"], FIRST_MERGE + 4)
    ids = content_tokenizer(description).encode("<｜User｜></think>", add_special_tokens=False).ids
    assert all(3 <= token < FIRST_MERGE + 4 for token in ids)


def test_classes_weigh_what_they_should_whatever_their_size():
    counts = {"code": np.array([900, 100]), "prose": np.array([0, 10])}
    mixed = class_weighted_counts(counts, {"code": 0.5, "prose": 0.5})
    np.testing.assert_allclose(mixed, [0.45, 0.55])


def test_counting_crosses_batches():
    tokenizer = content_tokenizer(published_layout())
    counts = usage_counts(tokenizer, ["hello"] * 5, FIRST_MERGE + len(MERGES), batch=2)
    assert counts.sum() == 5 and counts[FIRST_MERGE + MERGES.index("hell o")] == 5


def test_other_layouts_are_refused():
    published = published_layout()
    published["model"]["merges"] = published["model"]["merges"][::-1]
    with pytest.raises(CheckpointError, match="one entry per merge"):
        prune(published, np.zeros(269), FIRST_MERGE + 2)
    with pytest.raises(CheckpointError, match="from 259 to 269, found 300"):
        prune(published_layout(), np.zeros(269), 300)
    published = published_layout()
    published["added_tokens"] = [t for t in published["added_tokens"] if t["content"] != NOISE]
    with pytest.raises(CheckpointError, match="expected the added token"):
        prune(published, np.zeros(269), FIRST_MERGE + 2)


def test_written_folder_opens(tmp_path):
    description, real_ids = pruned(["hello"], FIRST_MERGE + 4)
    write_tokenizer(tmp_path, description, real_ids, context=8192)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(json.loads((tmp_path / "token_ids.json").read_text()))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["pad_token"] == PAD and config["model_max_length"] == 8192


@pytest.mark.parametrize(
    "text",
    [
        f"{BOS}{SYSTEM}Be brief.<｜User｜>Hi<｜Assistant｜><think>x</think>Hello{EOS}",
        "🙂 한국어 毕老师 naïve ﬁ",
        "def f(x):\n        return x\n\n\n    # end\n",
        "one\r\ntwo\r\n\tthree\t\tfour  five",
        "<｜DSML｜ calls>\n</｜DSML｜ calls>",
        "",
    ],
)
def test_demonstration_tokenizer_round_trip(text):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token < 4160 for token in ids)


def test_demonstration_vocabulary_names_the_published_ids():
    """Marks whose published ids are known from the V4.1 tokenizer."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    real_ids = json.loads((DEMO / "token_ids.json").read_text())
    assert tokenizer.get_vocab_size() == len(real_ids) == len(set(real_ids)) <= 4160
    known = {
        BOS: 0,
        EOS: 1,
        PAD: 2,
        NOISE: 128000,
        SYSTEM: 128799,
        "<｜User｜>": 128803,
        "<｜Assistant｜>": 128804,
        "<think>": 128821,
        "</think>": 128822,
        "｜DSML｜": 128825,
    }
    assert {name: real_ids[tokenizer.token_to_id(name)] for name in known} == known
