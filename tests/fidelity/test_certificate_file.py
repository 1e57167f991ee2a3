"""Which runs a certificate covers, and how weights are recognised."""

import json

import pytest

from v4flash.errors import UsageError
from v4flash.fidelity.certificate_file import (
    BUG,
    BUT_FOR_TIES,
    IDENTICAL,
    NAME,
    PLAIN,
    TIE,
    UNVERIFIED,
    VERIFIED,
    document,
    fingerprint,
    read,
    standing,
    write,
)

FACTS = {"device": "cpu", "backend": "xla", "dtype": "float32", "mode": "exact", "rows": 8}
LENGTHS = [1, 5, "auto"]


@pytest.fixture
def weights(tmp_path):
    """A folder with two weight files, one longer than all samples together."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "b.safetensors").write_bytes(b"small")
    (folder / "config.json").write_text("{}")
    return folder


def certified(folder, verdict=IDENTICAL, **changes):
    part = {"verdict": verdict, "draft_lengths": LENGTHS, **FACTS, **changes}
    write(folder / NAME, document(fingerprint(folder), [part]))
    return folder


@pytest.mark.parametrize(("verdict", "status"), [(IDENTICAL, VERIFIED), (TIE, BUT_FOR_TIES)])
def test_a_covered_run_is_verified(weights, verdict, status):
    certified(weights, verdict)
    for k in LENGTHS:
        found = standing(weights, k, FACTS)
        assert found.status == status == str(found) and len(found.digest) == 64


def test_no_drafts_leave_nothing_to_verify(weights):
    assert standing(weights, 0, FACTS).status == PLAIN


def test_no_certificate_means_unverified(weights):
    found = standing(weights, 5, FACTS)
    assert found.status == UNVERIFIED and found.digest is None and "v4flash certify" in str(found)


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("device", "gpu", "of device cpu, this run of gpu"),
        ("backend", "fused", "of backend xla, this run of fused"),
        ("dtype", "bfloat16", "of number type float32, this run of bfloat16"),
        ("mode", "qat", "of mode exact, this run of qat"),
        ("rows", 16, "of row count 8, this run of 16"),
    ],
)
def test_another_program_is_unverified(weights, fact, value, words):
    found = standing(certified(weights), 5, FACTS | {fact: value})
    assert found.status == UNVERIFIED and words in str(found)


def test_other_draft_lengths_and_bugs_are_unverified(weights):
    assert "k 7" in standing(certified(weights), 7, FACTS).reason
    assert "bug" in standing(certified(weights, BUG), 5, FACTS).reason


def test_other_weights_are_unverified(weights):
    certified(weights)
    (weights / "b.safetensors").write_bytes(b"smalL")
    assert "other weights" in standing(weights, 5, FACTS).reason


def test_each_program_has_its_own_part(weights):
    parts = [{"verdict": IDENTICAL, "draft_lengths": lengths, **FACTS, "rows": rows} for rows, lengths in
             ((8, [1, 7]), (16, [8, 9]))]  # fmt: skip
    write(weights / NAME, document(fingerprint(weights), parts))
    assert standing(weights, 9, FACTS | {"rows": 16}).status == VERIFIED
    assert standing(weights, 7, FACTS | {"rows": 16}).status == UNVERIFIED


def test_another_file_may_be_named(weights, tmp_path):
    certified(weights)
    (weights / NAME).rename(tmp_path / "mine.json")
    assert standing(weights, 5, FACTS).status == UNVERIFIED
    assert standing(weights, 5, FACTS, tmp_path / "mine.json").status == VERIFIED


def test_the_worst_part_is_the_verdict(weights):
    parts = [{"verdict": verdict} for verdict in (TIE, IDENTICAL, BUG)]
    assert [document("", parts[:count])["verdict"] for count in (1, 2, 3)] == [TIE, TIE, BUG]
    assert document("", parts[1:2])["verdict"] == IDENTICAL


def test_fingerprint_sees_weights_and_nothing_else(weights):
    first = fingerprint(weights)
    (weights / "config.json").write_text('{"a": 1}')
    (weights / ".hidden").write_bytes(b"x")
    certified(weights)
    assert fingerprint(weights) == first
    content = bytearray((weights / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (weights / "a.safetensors").write_bytes(content)
    changed = fingerprint(weights)
    (weights / "a.safetensors").write_bytes(content + b"x")
    assert len({first, changed, fingerprint(weights)}) == 3
    (weights / "b.safetensors").rename(weights / "c.safetensors")
    assert fingerprint(weights) not in (first, changed)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "weights": "", "parts": [{}]}'])
def test_what_is_no_certificate_is_refused(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UsageError, match="v4flash certify"):
        read(tmp_path / NAME)


def test_what_is_written_is_read(weights):
    certified(weights)
    assert read(weights / NAME) == json.loads((weights / NAME).read_text())
    with pytest.raises(UsageError, match="cannot read"):
        read(weights / "absent.json")
