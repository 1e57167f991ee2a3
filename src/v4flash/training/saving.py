"""What a training run keeps in its folder: resumable states, the log, and published checkpoints.

    losses.json        every logged record, by stage
    state-STAGE/       weights, moments, step and seconds spent of an unfinished stage
    target/            published checkpoint at the end of target training, with a drafter that has not learnt
    samples.npy        the target's own text, uint16 [N, T]
    model/             the finished checkpoint

Knows: this layout. Does not know: what the figures mean.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.checkpoint.export import save_published
from v4flash.checkpoint.loading import load
from v4flash.checkpoint.orbax_store import load_training_state, save_training_state
from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.training.optimise import TrainingState
from v4flash.training.stored_weights import Skeleton, Weights

SHARDS = 3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_encoding.json")


class RunFolder:
    """One training run on disk."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._log = path / "losses.json"
        self.records: dict[str, list[dict]] = json.loads(self._log.read_text()) if self._log.exists() else {}

    def record(self, stage: str, entry: Mapping) -> None:
        """Adds one record to the log of a stage and writes the log."""
        self.records.setdefault(stage, []).append(dict(entry))
        write_atomically(self._log, [json.dumps(self.records, indent=1).encode()])

    def save_state(self, stage: str, state: TrainingState, seconds: float) -> None:
        """Stores an unfinished stage; an older state of it is replaced when the new one is complete."""
        tree = {"state": state, "seconds": jnp.float32(seconds)}
        save_training_state(self.path / f"state-{stage}", tree)

    def load_state(self, stage: str, fresh: TrainingState) -> tuple[TrainingState, float]:
        """The stored state of a stage and the seconds it had spent; `fresh` and 0 where there is none.

        Records made after the stored step are dropped: they will be made again.
        """
        folder = self.path / f"state-{stage}"
        if not folder.is_dir():
            self.records.pop(stage, None)
            return fresh, 0.0
        tree = load_training_state(folder, {"state": fresh, "seconds": jnp.float32(0)})
        state = tree["state"]
        kept = [entry for entry in self.records.get(stage, []) if entry["step"] <= int(state.step)]
        self.records[stage] = kept
        return state, float(tree["seconds"])

    def drop_state(self, stage: str) -> None:
        """Removes the resumable state of a finished stage."""
        shutil.rmtree(self.path / f"state-{stage}", ignore_errors=True)


def save_checkpoint(
    folder: Path, skeleton: Skeleton, weights: Weights, config_json: Mapping, extra_files: Mapping[str, bytes]
) -> int:
    """Writes master weights as a published checkpoint of SHARDS shards; returns the tensor bytes."""
    flat = [(path, variable.replace(weights[name])) for name, (path, variable) in skeleton.variables.items()]
    size = sum(_stored_size(skeleton, name, value) for name, value in weights.items())
    return save_published(
        folder,
        config_json,
        nnx.from_flat_state(flat),
        max_shard_bytes=int(size / (SHARDS - 0.6)),
        extra_files=extra_files,
        overwrite=True,
    )


def _stored_size(skeleton: Skeleton, name: str, value: jax.Array) -> float:
    kind = skeleton.storage[name]
    if kind in ("fp8", "fp4", "rows"):
        return value.size * {"fp8": 1.0, "fp4": 0.53, "rows": 1.03}[kind]
    return value.size * (8 if kind == "ids" else skeleton.published_dtypes[name].itemsize)


def load_weights(folder: Path, skeleton: Skeleton) -> Weights:
    """Master weights of a published checkpoint, float32 with the values it stores."""
    wide = Skeleton.create(skeleton.config, jnp.float32)
    params = load(folder, wide.numerics).params
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(params)}


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Contents of the tokenizer's files in a folder, for copying beside a checkpoint."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
