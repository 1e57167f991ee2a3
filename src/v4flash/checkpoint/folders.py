"""Folders that appear under their final name only when they are complete.

Knows: temporary names, free disk space, overwriting only when asked. Does not know: what the folders hold.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from v4flash.errors import CheckpointError, UsageError

_PARTIAL = ".partial"
_SPARE = 1.02  # file systems and headers take a little more than the tensors themselves


@contextlib.contextmanager
def complete_folder(path: str | Path, needed_bytes: int, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill; it is renamed to `path` when the block ends without an error.

    A leftover of an earlier attempt is cleared first. After a failure the unfinished folder stays under its
    temporary name, `path` itself is as it was, and the error says so.

    Raises UsageError when `path` exists and `overwrite` is False, and CheckpointError when the disk has fewer
    than `needed_bytes` free or writing fails.
    """
    path = Path(path)
    refuse_existing(path, overwrite)
    partial = path.with_name(path.name + _PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    check_space(path.parent, needed_bytes)
    partial.mkdir()
    try:
        yield partial
    except OSError as error:
        raise CheckpointError(
            f"writing {path} failed ({error.strerror or error}); the unfinished files are in {partial}; make "
            "room and run the command again"
        ) from error
    _replace(partial, path)


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raises UsageError when `path` exists and may not be replaced."""
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another name, or pass --overwrite to replace it")


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises CheckpointError when the disk of an existing `folder` cannot hold `needed_bytes`."""
    needed, free = int(needed_bytes * _SPARE), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free, {needed:,} are needed; free some space or choose another disk"
        )


def is_unfinished(path: Path) -> bool:
    """Whether a path carries the temporary name of a folder that was never completed."""
    return path.name.endswith(_PARTIAL)


def _replace(partial: Path, path: Path) -> None:
    """Renames `partial` to `path`; an old folder is moved aside first, so that one of them always exists."""
    if not path.exists():
        partial.rename(path)
        return
    aside = path.with_name(f"{path.name}.replaced-{os.getpid()}")
    path.rename(aside)
    partial.rename(path)
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()
