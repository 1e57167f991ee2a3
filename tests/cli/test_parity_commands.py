"""`v4flash logits` and `draft` from the outside: files in, files out, and what is refused."""

import json

import numpy as np
import pytest

from v4flash.checkpoint.safetensors_file import SafetensorsFile, write_safetensors

VOCABULARY, WIDTH, LAYERS, STREAMS, BLOCK = 272, 64, 2, 2, 3  # of the random checkpoint in conftest.py
SMALL = ("--chunk", 8)
LISTS = [[5, 9, 200, 7, 31, 32, 33, 34, 35, 36, 37], [0, 4]]
# Chunks of another length, or rows of another pass, sum in another order.
ROUNDING = 1e-4


@pytest.fixture
def ids(tmp_path):
    def write(content):
        file = tmp_path / "ids.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


def arrays(file):
    stored = SafetensorsFile(file)
    return {name: np.array(stored.tensor(name)) for name in stored.tensors}


def test_logits_of_several_lists_and_of_one(call, checkpoint, ids, tmp_path):
    many, one = tmp_path / "many.safetensors", tmp_path / "one.safetensors"
    outcome = call("logits", "--ckpt", checkpoint, "--ids", ids(LISTS), "--out", many, "--streams", *SMALL)
    assert outcome.code == 0 and outcome.out == "", outcome.err
    found = arrays(many)
    assert {name: value.shape for name, value in found.items()} == {
        "logits.0": (11, VOCABULARY),
        "logits.1": (2, VOCABULARY),
        "streams.0": (LAYERS, 11, STREAMS, WIDTH),
        "streams.1": (LAYERS, 2, STREAMS, WIDTH),
    }
    assert all(value.dtype == np.float32 for value in found.values())
    assert SafetensorsFile(many).metadata["mode"] == "exact", "the default is what the checkpoint asks for"
    assert call(
        "logits", "--ckpt", checkpoint, "--ids", ids(LISTS[0]), "--out", one, "--streams", *SMALL
    ).code == 0  # fmt: skip
    alone = arrays(one)
    assert alone.keys() == {"logits", "streams"}
    np.testing.assert_array_equal(alone["logits"], found["logits.0"])


def test_logits_without_drafter_or_tokenizer(call, plain_checkpoint, ids, tmp_path):
    out = tmp_path / "out.safetensors"
    outcome = call(
        "logits", "--ckpt", plain_checkpoint, "--ids", ids([1, 2]), "--out", out, "--mode", "exact", *SMALL
    )
    assert outcome.code == 0, outcome.err
    assert arrays(out)["logits"].shape == (2, VOCABULARY)
    refused = call("draft", "--ckpt", plain_checkpoint, "--ids", ids([1, 2]), "--out", tmp_path / "d")
    assert refused.code == 2 and "no drafter" in refused.err


def test_draft_and_the_same_from_its_own_taps(call, checkpoint, ids, tmp_path):
    out, again, file = tmp_path / "a.safetensors", tmp_path / "b.safetensors", ids(LISTS)
    outcome = call("draft", "--ckpt", checkpoint, "--ids", file, "--out", out, *SMALL)
    assert outcome.code == 0 and outcome.out == "", outcome.err
    found = arrays(out)
    for index, (rows, anchor) in enumerate(((10, 37), (1, 4))):
        shapes = {
            "anchor": (1,), "taps": (rows, WIDTH), "base_logits": (BLOCK, VOCABULARY),
            "logits": (BLOCK, VOCABULARY), "draft_ids": (BLOCK,), "confidence": (BLOCK,),
            "confidence_logit": (BLOCK,),
        }  # fmt: skip
        assert {name: found[f"{name}.{index}"].shape for name in shapes} == shapes
        assert found[f"anchor.{index}"].tolist() == [anchor]
        np.testing.assert_array_equal(found[f"draft_ids.{index}"], found[f"logits.{index}"].argmax(axis=-1))
        logit = found[f"confidence_logit.{index}"].astype(np.float64)
        np.testing.assert_allclose(found[f"confidence.{index}"], 1 / (1 + np.exp(-logit)), rtol=1e-6)
        assert np.abs(found[f"logits.{index}"] - found[f"base_logits.{index}"]).max() > ROUNDING
    outcome = call("draft", "--ckpt", checkpoint, "--ids", file, "--out", again, "--taps", out, *SMALL)
    assert outcome.code == 0, outcome.err
    for name, value in arrays(again).items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


def test_taps_must_reach_from_the_window_to_the_anchor(call, checkpoint, ids, tmp_path):
    taps, out = tmp_path / "taps.safetensors", tmp_path / "out.safetensors"
    command = ("draft", "--ckpt", checkpoint, "--ids", ids(LISTS[0]), "--out", out, "--taps", taps, *SMALL)

    def with_taps(shape, **more):
        first = {name: ("I32", np.asarray([value], np.int32)) for name, value in more.items()}
        write_safetensors(taps, {"taps": ("F32", np.ones(shape, np.float32)), **first})
        return call(*command)

    for shape, more in (
        ((7, WIDTH), {}),  # the window of eight is not covered
        ((8, WIDTH + 1), {}),
        ((11, WIDTH), {}),  # more rows than the context has
        ((8, WIDTH), {"taps_first_pos": 1}),  # ends before the context does
    ):
        outcome = with_taps(shape, **more)
        assert outcome.code == 2 and "taps" in outcome.err and not out.exists()
    assert with_taps((9, WIDTH), taps_first_pos=2).code == 0
    assert arrays(out)["taps"].shape == (8, WIDTH)
    write_safetensors(taps, {"other": ("F32", np.ones((1,), np.float32))})
    outcome = call(*command, "--overwrite")
    assert outcome.code == 2 and "holds no taps" in outcome.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ({"ids": [1]}, "JSON dict"),
        ([], "empty list"),
        ([[1], []], "list 1 has 0 ids"),
        ([1, "2"], '"2"'),
        ([1, True], "true"),
        ([1, 2.0], "2.0"),
        ([[1], 2], "list 1 is 2"),
        ([1, [2]], "[2]"),
        ([3, VOCABULARY], f"id {VOCABULARY} at place 1"),
        ([-1], "id -1 at place 0"),
    ],
)
def test_ids_of_another_shape_are_refused(call, checkpoint, ids, tmp_path, content, words):
    out = tmp_path / "out.safetensors"
    outcome = call("logits", "--ckpt", checkpoint, "--ids", ids(content), "--out", out)
    assert outcome.code == 2 and not out.exists()
    assert words in outcome.err.splitlines()[-1] and "compiling" not in outcome.err


def test_ids_beyond_the_checkpoints_limit(call, checkpoint, ids, tmp_path):
    outcome = call("logits", "--ckpt", checkpoint, "--ids", ids([3] * 513), "--out", tmp_path / "out")
    assert outcome.code == 4 and "513" in outcome.err and "512" in outcome.err


def test_draft_needs_a_context(call, checkpoint, ids, tmp_path):
    outcome = call("draft", "--ckpt", checkpoint, "--ids", ids([3]), "--out", tmp_path / "out")
    assert outcome.code == 2 and "anchor" in outcome.err
    outcome = call("draft", "--ckpt", checkpoint, "--ids", ids([3, 4]), "--out", tmp_path / "out", "--k", 10)
    assert outcome.code == 2 and "1 to 9" in outcome.err


def test_output_is_replaced_only_when_asked(call, checkpoint, ids, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    command = ("logits", "--ckpt", checkpoint, "--ids", ids(LISTS[0]), "--out", out, "--streams", *SMALL)
    outcome = call(*command)
    assert outcome.code == 2 and "--overwrite" in outcome.err and out.read_bytes() == b"precious"
    assert call(*command, "--overwrite").code == 0
    assert "logits" in arrays(out)
    outcome = call(*command[:-3], "--out", tmp_path / "absent" / "x")
    assert outcome.code == 2 and "no folder" in outcome.err


def test_a_checkpoint_must_be_given(call, ids, tmp_path):
    outcome = call("logits", "--ids", ids([1]), "--out", tmp_path / "out")
    assert outcome.code == 2 and "V4FLASH_CKPT" in outcome.err
