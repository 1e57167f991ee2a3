"""The parity commands, run once for each family over all golden prompts, and the golden numbers beside them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from v4flash.checkpoint.safetensors_file import SafetensorsFile
from v4flash.cli import main

PROMPT_LENGTHS = {
    "v4-tiny": (1, 3, 5, 31, 33, 64, 127, 128, 129, 300),
    "v41-tiny": (1, 2, 3, 33, 64, 129, 300),
}


class Arrays(Mapping):
    """The arrays of a safetensors file by name."""

    def __init__(self, path: Path):
        self._file = SafetensorsFile(path)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array(self._file.tensor(name)) if name in self._file.tensors else self._missing(name)

    def _missing(self, name: str):
        raise KeyError(name)

    def __iter__(self):
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)


@pytest.fixture(scope="session")
def lengths() -> Mapping[str, tuple[int, ...]]:
    """Lengths of the golden prompts of each checkpoint."""
    return PROMPT_LENGTHS


@pytest.fixture(scope="session")
def golden(golden_checkpoint) -> Callable[[str, str], Arrays]:
    """`golden("v4-tiny", "golden")`, or "dspark" or "qat": numbers from other implementations."""

    def read(name: str, kind: str) -> Arrays:
        folder = golden_checkpoint(name)
        return Arrays(
            folder / "golden.safetensors"
            if kind == "golden"
            else folder.parent / kind / f"{name}.safetensors"
        )

    return read


@pytest.fixture(scope="session")
def command(golden_checkpoint, tmp_path_factory) -> Callable[..., Arrays]:
    """Runs `v4flash logits|draft` over lists of ids and reads the file it wrote."""
    cache = tmp_path_factory.mktemp("compiled")

    def run(name: str, checkpoint: str, lists: list, *arguments: object) -> Arrays:
        folder = tmp_path_factory.mktemp(name)
        (folder / "ids.json").write_text(json.dumps([[int(token) for token in ids] for ids in lists]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("V4FLASH_CACHE", str(cache))
            code = main(
                [name, "--ckpt", str(golden_checkpoint(checkpoint)), "--ids", str(folder / "ids.json"),
                 "--out", str(folder / "out.safetensors"), "--dtype", "float32", "--quiet", *map(str, arguments)]
            )  # fmt: skip
        assert code == 0
        return Arrays(folder / "out.safetensors")

    return run
