"""Where the demonstration checkpoint lies.

Knows: the source tree's layout. Does not know: what is in a checkpoint.
"""

from pathlib import Path

import v4flash
from v4flash.errors import CheckpointError


def demo_path() -> Path:
    """The folder of the demonstration checkpoint beside the source tree, wherever the caller runs.

    Raises CheckpointError where the installation does not carry it.
    """
    path = Path(v4flash.__file__).resolve().parents[2] / "demo"
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"no demonstration checkpoint at {path} (no config.json there); pass --ckpt DIR or set V4FLASH_CKPT"
        )
    return path
