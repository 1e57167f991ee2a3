"""A certificate beside the weights: what it says, of what it was made, and whether a run may call itself verified.

Knows: the file's form, a fingerprint of weight files, and which runs a certificate covers. Does not know: how
anything is compared (certificate.py), or printing.

A certificate holds one part for each program it was made with. A run is covered by the part of the same weights,
device kind, backend, number type, mode and rows, if that part compared the run's draft length with plain decoding.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.errors import UsageError, V4FlashError

SCHEMA = 1
NAME = "certificate.json"
IDENTICAL, TIE, BUG = "identical", "tie", "bug"
VERIFIED, BUT_FOR_TIES, UNVERIFIED, PLAIN = (
    "verified",
    "verified but for ties",
    "unverified",
    "plain decoding",
)
# What every run says about itself besides its draft length, by the words that a person reads.
FACTS = {
    "device": "device",
    "backend": "backend",
    "dtype": "number type",
    "mode": "mode",
    "rows": "row count",
}
_SAMPLES, _SAMPLE_BYTES = 32, 1 << 14
_NOT_WEIGHTS = (".json", ".md", ".txt", ".partial")
_REQUIRED = frozenset({"verdict", "draft_lengths", *FACTS})


@dataclasses.dataclass(frozen=True)
class Standing:
    """What may be said of a run's speed.

    Attributes:
      status: VERIFIED, BUT_FOR_TIES, UNVERIFIED, or PLAIN (nothing was drafted: there is nothing to verify).
      reason: why a run is unverified, in a few words; empty otherwise.
      digest: sha256 of the certificate that was looked at; None without one.
    """

    status: str
    reason: str = ""
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.status} ({self.reason})" if self.reason else self.status


def fingerprint(path: Path) -> str:
    """sha256 over names, sizes and samples of the weight files of a checkpoint folder.

    Of each file 32 pieces of 16 KiB at even distances are read, so that hundreds of gigabytes take no time: another
    checkpoint, another training state, or a file cut short is noticed; a few bytes changed on purpose are not.
    """
    total = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        if file.suffix in _NOT_WEIGHTS or any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        size = file.stat().st_size
        total.update(f"{file.relative_to(path).as_posix()} {size}\n".encode())
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                total.update(opened.read(_SAMPLE_BYTES))
                if size <= _SAMPLE_BYTES:
                    break
    return total.hexdigest()


def document(weights: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The certificate of a checkpoint with this fingerprint; `parts` as from `certificate.certify`."""
    verdicts = {part["verdict"] for part in parts}
    worst = next(verdict for verdict in (BUG, TIE, IDENTICAL) if verdict in verdicts)
    return {"schema": SCHEMA, "weights": weights, "verdict": worst, "parts": parts}


def write(path: Path, certificate: dict[str, Any]) -> None:
    """Writes a certificate as a whole or not at all. Raises V4FlashError when the disk refuses."""
    try:
        write_atomically(path, [json.dumps(certificate, indent=1).encode() + b"\n"])
    except OSError as error:
        raise V4FlashError(f"writing {path} failed ({error.strerror}); check disk and rights") from None


def read(path: Path) -> dict[str, Any]:
    """A certificate that `write` wrote. Raises UsageError where the file cannot be read or is of another form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); make one with `v4flash certify`") from None
    except ValueError as error:
        raise UsageError(
            f"{path} is not valid JSON ({error}); make it again with `v4flash certify`"
        ) from None
    sound = (
        isinstance(found, dict)
        and found.get("schema") == SCHEMA
        and isinstance(found.get("parts"), list)
        and all(isinstance(part, dict) and part.keys() >= _REQUIRED for part in found["parts"])
    )
    if not sound or not isinstance(found.get("weights"), str):
        raise UsageError(f"{path} is no certificate of schema {SCHEMA}; make it again with `v4flash certify`")
    return found


def standing(
    checkpoint: Path, draft_length: int | str, facts: dict[str, Any], file: Path | None = None
) -> Standing:
    """What may be said of a run.

    Args:
      checkpoint: folder of its weights; NAME in it is looked at unless another `file` is given.
      draft_length: k, or 'auto' where a step chooses or copies.
      facts: the run's value for every key of FACTS.

    Raises UsageError where a file that exists cannot be understood.
    """
    if draft_length == 0:
        return Standing(PLAIN)
    path = file or checkpoint / NAME
    if file is None and not path.is_file():
        return Standing(UNVERIFIED, "no certificate; `v4flash certify --save` makes one")
    certificate = read(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def unverified(reason: str) -> Standing:
        return Standing(UNVERIFIED, reason, digest)

    if certificate["weights"] != fingerprint(checkpoint):
        return unverified("the certificate is of other weights")
    parts = certificate["parts"]
    for name, words in FACTS.items():
        seen = sorted({str(part[name]) for part in parts})
        parts = [part for part in parts if part[name] == facts[name]]
        if not parts:
            return unverified(
                f"the certificate is of {words} {' and '.join(seen)}, this run of {facts[name]}"
            )
    parts = [part for part in parts if draft_length in part["draft_lengths"]]
    if not parts:
        return unverified(f"the certificate does not cover k {draft_length}")
    if parts[-1]["verdict"] == BUG:
        return unverified("the certificate found a bug")
    return Standing(BUT_FOR_TIES if parts[-1]["verdict"] == TIE else VERIFIED, "", digest)
