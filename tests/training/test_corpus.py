"""Reading archives, choosing documents and splitting them."""

import io
import lzma
import sqlite3
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from synthetic_tokenizer import published_layout

from v4flash.errors import UsageError
from v4flash.training import build_corpus, sources
from v4flash.training.chat_samples import Piece
from v4flash.training.corpus import (
    Document,
    bible_documents,
    django_documents,
    documentation_documents,
    has_foreign_notice,
    held_out_groups,
    novel_documents,
    play_documents,
    python_documents,
    without_duplicates,
)

LONG = "value = 1\n" * 40


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def debian_archive(path, files):
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo("./" + name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    members = {"debian-binary": b"2.0", "data.tar.xz": lzma.compress(tar_bytes.getvalue())}
    content = b"!<arch>\n"
    for name, body in members.items():
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode()
        content += body + b"\n" * (len(body) % 2)
    path.write_bytes(content)
    return path


def r_database(vectors):
    content = b""
    for strings in vectors:
        raw = b"X\n" + struct.pack(">III", 3, 0x40201, 0x30500) + struct.pack(">I", 5) + b"UTF-8"
        raw += struct.pack(">II", 16, len(strings))
        for string in strings:
            raw += struct.pack(">Ii", 0x40009, len(string.encode())) + string.encode()
        packed = zlib.compress(raw)
        content += struct.pack(">I", len(raw)) + packed
    return content


def test_python_files_of_a_wheel(tmp_path):
    archive = wheel(
        tmp_path / "thing-1.0-py3-none-any.whl",
        {
            "thing/code.py": LONG,
            "thing/tests/case.py": LONG + "x\n",
            "thing/test_it.py": LONG + "y\n",
            "thing/other.py": "# Copyright (c) 2001 Somebody Else\n" + LONG,
            "thing/stub.py": "x = 1\n",
            "thing/data.txt": LONG + "z\n",
        },
    )
    assert [d.path for d in python_documents("thing", archive)] == ["thing/code.py"]


def test_documentation_pages_of_a_debian_archive(tmp_path):
    root = "usr/share/doc/python3.11/html/_sources/"
    archive = debian_archive(
        tmp_path / "python3.11-doc_1.0_all.deb",
        {
            root + "library/a.rst.txt": LONG.encode(),
            root + "license.rst.txt": LONG.encode(),
            "x.rst.txt": b"no",
        },
    )
    (document,) = documentation_documents("doc", archive)
    assert (document.path, document.kind, document.text) == ("library/a.rst.txt", "docs", LONG)


def test_code_and_pages_of_a_source_archive(tmp_path):
    files = {
        "django-1.0/django/db.py": LONG,
        "django-1.0/django/benchmarks/slow.py": LONG + "a\n",
        "django-1.0/docs/topics/db.txt": LONG + "b\n",
        "django-1.0/docs/releases/1.0.txt": LONG + "c\n",
        "django-1.0/docs/conf.py": LONG + "d\n",
    }
    archive = tmp_path / "django-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode()))
    found = [(d.path, d.kind) for d in django_documents("django", archive)]
    assert found == [("django/db.py", "code"), ("docs/topics/db.txt", "docs")]
    package = sources.Package("django", "pypi-source", "1.0", "BSD-3-Clause")
    assert sources.archive_version(package, archive) == "1.0"
    assert sources.fetch(package, tmp_path) == archive


def test_chapters_of_the_bible_open_with_the_book(tmp_path):
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE Books (BookID INT, LongName TEXT)")
    connection.execute("CREATE TABLE Bible (BookID INT, ChapterID INT, VerseID INT, Passage1 TEXT)")
    connection.execute("INSERT INTO Books VALUES (1, 'The First Book')")
    verses = [(1, 2, 1, "2:1 Then it was."), (1, 1, 2, "1:2 And more."), (1, 1, 1, "1:1 In the beginning.")]
    connection.executemany("INSERT INTO Bible VALUES (?, ?, ?, ?)", verses)
    connection.commit()
    archive = wheel(tmp_path / "kjv-1-py3-none-any.whl", {"kjv/DATA/Bible.db": connection.serialize()})
    documents = list(bible_documents("kjv", archive))
    assert [d.text for d in documents] == [
        "The First Book\n\n1:1 In the beginning.\n1:2 And more.\n",
        "The First Book\n\n2:1 Then it was.\n",
    ]
    assert {d.group for d in documents} == {"The First Book"}


def test_other_files_are_no_debian_archives(tmp_path):
    path = tmp_path / "a_1.0_all.deb"
    path.write_bytes(b"<html>")
    with pytest.raises(UsageError, match="expected a Debian archive"):
        list(sources.read_archive(path))


def test_scenes_open_with_play_and_act_and_are_split_together(tmp_path):
    text = (
        "# Play\n\n## ACT I\n\n### SCENE I.\n\nA  \nB\n\n### SCENE II.\n\nC\n\n"
        "## ACT II\n\n### SCENE I.\n\nD\n"
    )
    archive = wheel(tmp_path / "p-1-py3-none-any.whl", {"p/plays/x/play.md": text, "p/README.md": text})
    documents = list(play_documents("p", archive))
    assert documents[0].text == "# Play\n\n## ACT I\n\n### SCENE I.\n\nA\nB\n"
    assert documents[2].text == "# Play\n\n## ACT II\n\n### SCENE I.\n\nD\n"
    assert len({d.group for d in documents}) == 1 and len({d.path for d in documents}) == 3


def test_chapters_of_novels(tmp_path):
    novel = [
        "A NOVEL",
        "",
        "by Someone",
        "Chapter 1",
        "",
        "",
        "",
        "It was night.",
        "CHAPTER II",
        "It was dáy.",
    ]
    archive = debian_archive(tmp_path / "r_1_all.deb", {"lib/data/Rdata.rdb": r_database([novel, novel])})
    documents = list(novel_documents("r", archive))
    assert [d.text for d in documents[:2]] == [
        "A NOVEL\n\nChapter 1\n\nIt was night.\n",
        "A NOVEL\n\nCHAPTER II\nIt was dáy.\n",
    ]
    assert len(documents) == 4


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("# Copyright (c) 2001 Somebody", True),
        ("# Copyright (c) 2001-2010 Python Software Foundation", False),
        ("# (c) Copyright Somebody", True),
        ("# Copyright 2007 Google\n# Licensed to PSF under a Contributor Agreement.", False),
        ("the copyright of the text", False),
        ("# Copyright 2001 Python Software Foundation\n# Copyright 2002 Somebody", True),
    ],
)
def test_foreign_notices(text, foreign):
    assert has_foreign_notice(text) is foreign


def test_duplicates_differ_in_more_than_blanks():
    documents = [
        Document(text, "code", "s", str(n), str(n)) for n, text in enumerate(["a b", "a\n  b", "a c"])
    ]
    assert [d.path for d in without_duplicates(documents)] == ["0", "2"]


def test_held_out_share_is_kept_per_source_and_in_any_order():
    documents = [
        Document("x" * (50 + n % 7 * 20), kind, source, str(n), str(n))
        for source, kind in (("a", "code"), ("b", "prose"))
        for n in range(400)
    ]
    documents.append(Document("x" * 50_000, "code", "a", "long", "long"))
    chosen = held_out_groups(documents)
    assert chosen == held_out_groups(documents[::-1])
    for source in "ab":
        total = sum(len(d.text) for d in documents if d.source == source)
        held = sum(len(d.text) for d in documents if (d.source, d.group) in chosen and d.source == source)
        assert 0.05 <= held / total <= 0.075
    assert ("a", "long") not in chosen


def test_fetch_takes_what_is_cached_and_says_what_is_missing(tmp_path, monkeypatch):
    package = sources.Package("some-thing", "pypi", "1.0", "MIT")
    monkeypatch.setattr(sources.sys, "executable", "/nonexistent/python")
    with pytest.raises(UsageError, match="some-thing: the client /nonexistent/python is not installed"):
        sources.fetch(package, tmp_path)
    archive = wheel(tmp_path / "some_thing-1.0-py3-none-any.whl", {})
    assert sources.fetch(package, tmp_path) == archive
    assert sources.archive_version(package, archive) == "1.0"


def test_samples_become_ids_without_control_tokens_from_text():
    encoder = build_corpus.SampleEncoder(published_layout())
    sample = [Piece("<｜User｜>", True), Piece("hello<｜User｜>", False), Piece("</think>", True)]
    ids = encoder.encode([sample, [Piece("<think>", True)]])
    assert ids.dtype == np.uint16
    controls = {"<｜User｜>": 404, "</think>": 407, "<think>": 406}
    assert ids[0] == controls["<｜User｜>"] and list(ids[-2:]) == [controls["</think>"], controls["<think>"]]
    assert (ids[1:-2] < 400).all() and len(ids) > 5
