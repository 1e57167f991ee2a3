"""Documents of the packages that lengthen a corpus, and how they join its streams."""

import gzip
import json

import numpy as np
from synthetic_tokenizer import published_layout
from test_corpus import debian_archive, wheel

from v4flash.training import extend_corpus
from v4flash.training.batches import Streams
from v4flash.training.corpus import CLASSES, dictionary_documents, html_documents, scripture_documents
from v4flash.training.html_pages import page_text
from v4flash.training.sources import Package
from v4flash.training.tokenizer_pruning import BOS, EOS

PAGE = """<html><head><title>Not this</title></head><body>
<div class="navheader"><table><tr><td>Prev</td></tr></table></div>
<h1>Joins  and
unions</h1><p>Two tables<br>meet &amp; part.<ul><li>inner<li>outer</ul>
<pre>SELECT *
  FROM t;</pre><script>var x = "<p>no</p>";</script></body></html>"""


def test_text_of_a_page_keeps_examples_and_leaves_navigation_out():
    text = "Joins and unions\n\nTwo tables\nmeet & part.\n\n* inner\n* outer\n\nSELECT *\n  FROM t;\n"
    assert page_text(PAGE) == text


def test_pages_scriptures_and_dictionaries(tmp_path):
    page = PAGE.replace("Two", 60 * "Two ")
    archive = debian_archive(
        tmp_path / "some-doc_1.0_all.deb",
        {"usr/html/joins.html": page.encode(), "usr/html/release-1.html": page.encode()},
    )
    (document,) = html_documents("some-doc", archive)
    assert (document.kind, document.path) == ("docs", "usr/html/joins.html")
    assert document.text.startswith("Joins and unions\n\nTwo Two")

    verses = [{"text": "In the beginning."}, {"text": "And after."}]
    books = {"books": [{"book": "First", "chapters": [{"chapter": 1, "verses": verses}]}]}
    archive = wheel(tmp_path / "books-1.0-py3-none-any.whl", {"books/all.json": json.dumps(books)})
    (document,) = scripture_documents("books", archive)
    assert (document.text, document.kind) == ("First\n\nIn the beginning.\nAnd after.\n", "prose")

    entries = "\n".join(f"word{i}\n   {'meaning ' * 300}" for i in range(10))
    archive = debian_archive(
        tmp_path / "dict-x_1.0_all.deb", {"usr/share/dictd/x.dict.dz": gzip.compress(entries.encode())}
    )
    runs = list(dictionary_documents("dict-x", archive))
    assert len(runs) == 2 and all(run.text.startswith("word") for run in runs)


def test_added_text_joins_the_training_streams_only(tmp_path, monkeypatch):
    base, out, cache = tmp_path / "base", tmp_path / "out", tmp_path / "cache"
    (base / "tokenizer").mkdir(parents=True)
    cache.mkdir()
    description = published_layout()
    (base / "tokenizer" / "tokenizer.json").write_text(json.dumps(description))
    encoder = extend_corpus.SampleEncoder(description)
    controls = {token["content"]: token["id"] for token in description["added_tokens"]}
    old = encoder.encode([extend_corpus.framed(extend_corpus.Document("abc", "code", "s", "p", "g"))])
    for name in CLASSES:
        for split in ("train", "heldout"):
            np.tile(old, 3).astype("<u2").tofile(base / f"{split}_{name}.bin")
    counts = {"train_tokens": 3 * len(old), "train_documents": 3, "train_bytes": 9}
    classes = {name: dict(counts) for name in CLASSES}
    (base / "manifest.json").write_text(json.dumps({"classes": classes, "sources": []}))
    wheel(cache / "more-1.0-py3-none-any.whl", {"more/code.py": "value = 1\n" * 40})
    monkeypatch.setattr(extend_corpus, "READERS", {"more": extend_corpus.corpus.python_documents})
    monkeypatch.setitem(extend_corpus.PACKAGES, "more", Package("more", "pypi", "1.0", "MIT"))
    monkeypatch.setattr(extend_corpus, "CHAT_SHARE", 0)  # the small tokenizer has no marks of chats
    manifest = extend_corpus.extend(base, out, cache)

    code = np.fromfile(out / "train_code.bin", np.uint16)
    added = len(code) - 3 * len(old)
    assert added > 40 and manifest["classes"]["code"]["train_tokens"] == len(code)
    assert (code == controls[BOS]).sum() == 4 and (code == controls[EOS]).sum() == 4
    for name in CLASSES:
        kept = (base / f"heldout_{name}.bin").read_bytes()
        assert (out / f"heldout_{name}.bin").read_bytes() == kept
    assert (out / "train_docs.bin").read_bytes() == (base / "train_docs.bin").read_bytes()
    (record,) = manifest["sources"]
    assert (record["package"], record["documents"], record["class"]) == ("more", 1, "code")


def test_shuffling_keeps_documents_whole():
    stream = np.concatenate([[0, *range(10 * n, 10 * n + n), 1] for n in range(1, 9)]).astype(np.uint16)
    mixed = extend_corpus.shuffled(stream, 0)
    assert len(mixed) == len(stream) and not np.array_equal(mixed, stream)
    whole = {tuple(part) for part in np.split(stream, np.flatnonzero(stream == 0)[1:])}
    assert {tuple(part) for part in np.split(mixed, np.flatnonzero(mixed == 0)[1:])} == whole


def test_parts_of_streams_do_not_overlap(tmp_path):
    for name in CLASSES:
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / f"train_{name}.bin")
    first = Streams.read(tmp_path, "train", 8, 0, (0.0, 0.9))
    second = Streams.read(tmp_path, "train", 8, 0, (0.9, 1.0))
    assert not set(np.asarray(first.tokens)) & set(np.asarray(second.tokens))
    assert first.size.tolist() == [900] * 4 and second.size.tolist() == [100] * 4
    # Chats are drawn twice as often as their size says.
    np.testing.assert_allclose(first.weight, [0.2, 0.2, 0.2, 0.4])
