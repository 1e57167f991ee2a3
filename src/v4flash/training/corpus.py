"""The raw corpus of the demonstration model: which files are documents, of which class, and in which split.

Knows: the selection, the hygiene rules (foreign copyright notices, duplicates) and the split by file.
Does not know: how packages are fetched (sources.py), tokens (tokenizer_pruning.py) or chat frames
(chat_samples.py).

A document is one source file, one documentation page, one scene of a play or one chapter of a novel. The
split unit is wider for plays: all scenes of a held-out play are held out, so that its characters are unseen.
"""

import contextlib
import gzip
import hashlib
import itertools
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from v4flash.training.html_pages import page_text
from v4flash.training.sources import read_archive, read_r_character_vectors

CLASSES = ("code", "docs", "prose", "chat")
HELD_OUT_SHARE = 0.05
_SMALLEST_DOCUMENT = 200  # characters; below this a file is a stub or an empty package marker

_COPYRIGHT = re.compile(r"copyright\s*(?:\(c\)|©|:|\d{4}|by\b)|\(c\)\s*(?:copyright|\d{4})", re.IGNORECASE)
_OWN_HOLDERS = (
    "Python Software Foundation",
    "Django Software Foundation",
    "NetworkX Developers",
    "SymPy Development Team",
    "SQLAlchemy authors",
    "Twisted Matrix Laboratories",
    "NumPy Developers",
    "PyData Development Team",
    "SciPy Developers",
    "scikit-learn developers",
    "Matplotlib Development Team",
    "statsmodels Developers",
    "Astropy Developers",
    "Bokeh Contributors",
    "Anaconda",
    "Ask Solem",
    "Pallets",
    "IPython Development Team",
    "Scrapy developers",
    "PostgreSQL Global Development Group",
)
# Files given to the Python Software Foundation under this agreement carry the Foundation's licence.
_CONTRIBUTED = "Licensed to PSF under a Contributor Agreement"

_CODE_LEFT_OUT = re.compile(
    r"(?:^|/)(?:tests?|benchmarks|idlelib|lib2to3|locale|pydoc_data|__pycache__)/|/test_[^/]*\.py$|_sysconfigdata|sitecustomize"
    # Character tables: long lists of numbers that teach nothing.
    r"|encodings/(?:cp|mac_|iso8859|koi8|kz1048|ptcp|tis_)[^/]*\.py$|html/entities\.py$"
    # Tables of a generated parser.
    r"|/_antlr/"
)
_DOCS_LEFT_OUT = re.compile(
    r"(?:^|/)(?:copyright|license|contents)\.rst|whatsnew/changelog\.rst"
    # Examples of pandas' cookbook come from a site whose licence asks for more.
    r"|user_guide/cookbook\.rst"
)
_PAGES_LEFT_OUT = re.compile(
    r"releaselog/|/(?:release-|bookindex|keyword_index|doc_keyword|copyright|legalnotice)"
)
_DICTIONARY_RUN = 8_000  # characters
_DOCS_ROOT = "html/_sources/"
_CHAPTER = re.compile(r"^\s*(?:chapter|letter)\s+(?:[ivxlc]+|\d+)\.?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """One text of the corpus: ``kind`` is its class, ``group`` the name of the unit that is split as a
    whole.
    """

    text: str
    kind: str
    source: str
    path: str
    group: str


def python_documents(source: str, archive: Path) -> Iterator[Document]:
    """Python source files of a wheel or Debian archive, without tests, tables and foreign notices."""
    for path, content in read_archive(archive):
        path = re.sub(r"^usr/lib/python3[^/]*/", "", path)
        if path.endswith(".py") and not _CODE_LEFT_OUT.search("/" + path):
            yield from _kept(content, "code", source, path)


def django_documents(source: str, archive: Path) -> Iterator[Document]:
    """Code and documentation pages of Django's source archive, its release notes left out."""
    for path, content in read_archive(archive):
        if path.startswith("docs/") and path.endswith(".txt") and not path.startswith("docs/releases/"):
            yield from _kept(content, "docs", source, path)
        elif path.startswith("django/") and path.endswith(".py") and not _CODE_LEFT_OUT.search("/" + path):
            yield from _kept(content, "code", source, path)


def bible_documents(source: str, archive: Path) -> Iterator[Document]:
    """One document a chapter of the King James Bible, opened by the title of its book; books are split whole."""
    (database,) = (content for path, content in read_archive(archive) if path.endswith("/Bible.db"))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(database)
        titles = dict(connection.execute("SELECT BookID, LongName FROM Books"))
        verses = connection.execute(
            "SELECT BookID, ChapterID, Passage1 FROM Bible ORDER BY BookID, ChapterID, VerseID"
        ).fetchall()
    for (book, chapter), lines in itertools.groupby(verses, key=lambda verse: verse[:2]):
        text = "\n".join(passage.strip() for *_, passage in lines)
        title = titles[book]
        yield Document(f"{title}\n\n{text}\n", "prose", source, f"{title}#{chapter}", title)


def documentation_documents(source: str, archive: Path) -> Iterator[Document]:
    """The reStructuredText pages of the Python documentation package."""
    for path, content in read_archive(archive):
        _, root, page = path.partition(_DOCS_ROOT)
        if root and page.endswith(".rst.txt") and not _DOCS_LEFT_OUT.search(page):
            yield from _kept(content, "docs", source, page)


def play_documents(source: str, archive: Path) -> Iterator[Document]:
    """One document a scene, opened by the titles of play and act so that each stands alone."""
    for path, content in read_archive(archive):
        if "/plays/" not in path or not path.endswith(".md"):
            continue
        text = "\n".join(line.rstrip() for line in content.decode("utf-8").split("\n"))
        title, act, scenes = "", "", []
        for block in re.split(r"(?m)^(?=#{1,3} )", text):
            if block.startswith("# "):
                title = block.strip()
            elif block.startswith("## "):
                act = block.strip()
            elif block.startswith("### "):
                scenes.append(f"{title}\n\n{act}\n\n{block.strip()}\n")
        for number, scene in enumerate(scenes, 1):
            yield Document(scene, "prose", source, f"{path}#{number}", path)


def novel_documents(source: str, archive: Path) -> Iterator[Document]:
    """One document a chapter of each novel, opened by the title of the book."""
    for path, content in read_archive(archive):
        if not path.endswith("data/Rdata.rdb"):
            continue
        for lines in read_r_character_vectors(content):
            title, chapters = lines[0].strip(), [[]]
            for line in lines[1:]:
                if _CHAPTER.match(line):
                    chapters.append([])
                chapters[-1].append(line.rstrip())
            for number, chapter in enumerate(chapters[1:], 1):
                body = re.sub(r"\n{3,}", "\n\n", "\n".join(chapter)).strip()
                name = f"{title.title()}#{number}"
                yield Document(f"{title.upper()}\n\n{body}\n", "prose", source, name, name)


def html_documents(source: str, archive: Path) -> Iterator[Document]:
    """The HTML pages of a documentation package."""
    for path, content in read_archive(archive):
        if path.endswith(".html") and not _PAGES_LEFT_OUT.search(path):
            yield from _kept(page_text(content.decode("utf-8", "replace")).encode(), "docs", source, path)


def scripture_documents(source: str, archive: Path) -> Iterator[Document]:
    """One document a chapter of a JSON file of books, opened by the title of its book."""
    (content,) = (content for path, content in read_archive(archive) if path.endswith(".json"))
    for book in json.loads(content)["books"]:
        for chapter in book["chapters"]:
            text = "\n".join(verse["text"].strip() for verse in chapter["verses"])
            name = f"{book['book']}#{chapter['chapter']}"
            yield Document(f"{book['book']}\n\n{text}\n", "prose", source, name, book["book"])


def dictionary_documents(source: str, archive: Path) -> Iterator[Document]:
    """Runs of entries of a dictd dictionary, of about a chapter's length."""
    (packed,) = (content for path, content in read_archive(archive) if path.endswith(".dict.dz"))
    entries = re.split(r"\n(?=\S)", gzip.decompress(packed).decode("utf-8"))
    run, number = [], 0
    for entry in entries:
        run.append(entry)
        if sum(map(len, run)) >= _DICTIONARY_RUN:
            number += 1
            yield Document("\n".join(run).strip() + "\n", "prose", source, f"{source}#{number}", source)
            run = []


def has_foreign_notice(text: str) -> bool:
    """Whether a line claims a copyright for someone other than the package's own, covered, holder."""
    if _CONTRIBUTED in text:
        return False
    claims = (line for line in text.splitlines() if _COPYRIGHT.search(line))
    return any(not any(holder in claim for holder in _OWN_HOLDERS) for claim in claims)


def _kept(content: bytes, kind: str, source: str, path: str) -> Iterator[Document]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return
    if len(text) >= _SMALLEST_DOCUMENT and "\0" not in text and not has_foreign_notice(text):
        yield Document(text, kind, source, path, path)


def without_duplicates(documents: Iterable[Document]) -> list[Document]:
    """Keep the first of all documents that are equal when runs of white space count as one blank."""
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        key = hashlib.sha256(" ".join(document.text.split()).encode()).digest()
        if key not in seen:
            seen.add(key)
            kept.append(document)
    return kept


def held_out_groups(documents: Iterable[Document], share: float = HELD_OUT_SHARE) -> set[tuple[str, str]]:
    """Choose (source, group) pairs that make up about ``share`` of the bytes of every source.

    The order is that of a hash of the name, so the choice does not depend on the order of reading. A group
    that would overshoot the share by more than half of it is passed over (one very long page must not become
    the whole set).
    """
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for document in documents:
        sizes[document.source][document.group] += len(document.text.encode())
    chosen = set()
    for source, groups in sizes.items():
        wanted, held = share * sum(groups.values()), 0
        for group in sorted(groups, key=lambda name: hashlib.sha256(f"{source}/{name}".encode()).digest()):
            if held >= wanted:
                break
            if held + groups[group] <= 1.5 * wanted:
                chosen.add((source, group))
                held += groups[group]
    return chosen
