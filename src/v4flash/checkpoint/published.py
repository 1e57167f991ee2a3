"""A published checkpoint folder checked against its configuration and read parameter by parameter.

Knows: which tensors the folder must hold, may hold and must not hold, and which values cannot be right. Does
not know: whether weights are decoded, or where they go.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from v4flash.checkpoint.inventory import Parameter, inventory, is_ignored
from v4flash.checkpoint.shards import CheckpointFiles, listed
from v4flash.config import ModelConfig
from v4flash.errors import CheckpointError

TOKEN_MAP_NAME = "engram_token_map.json"
TOKENIZER_NAME = "tokenizer.json"
_NAN_SCALE = 255


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a folder holds against what its configuration asks for, from headers alone.

    Attributes:
      needed: how many tensors decoding reads.
      missing: names of needed tensors that no shard holds.
      unexpected: names the configuration does not explain.
      wrong: one phrase for each needed tensor of another shape or type.
    """

    needed: int
    missing: list[str]
    unexpected: list[str]
    wrong: list[str]


def compare(files: CheckpointFiles, config: ModelConfig, wanted: ModelConfig) -> Comparison:
    """Compares headers with the inventory; `wanted` is `config`, or the same without its drafter."""
    known = inventory(config)
    needed = {name for name, tensor in inventory(wanted).items() if tensor.used}
    wrong = []
    for name in sorted(needed & files.tensors.keys()):
        found, expected = files.tensors[name], known[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            wrong.append(
                f"{name}: expected {expected.dtype} {list(expected.shape)}, found {found.dtype} "
                f"{list(found.shape)} in {files.shard_of(name)}"
            )
    return Comparison(
        needed=len(needed),
        missing=sorted(needed - files.tensors.keys()),
        unexpected=sorted(
            name for name in files.tensors if name not in known and not is_ignored(name, config)
        ),
        wrong=wrong,
    )


def check_tensors(files: CheckpointFiles, config: ModelConfig, wanted: ModelConfig) -> None:
    """Raises CheckpointError where the files do not hold exactly what the configuration needs."""
    result, where = compare(files, config, wanted), files.directory
    missing, unexpected, wrong = result.missing, result.unexpected, result.wrong
    if missing and all(name.startswith("mtp.") for name in missing):
        raise CheckpointError(
            f"{where} lacks {len(missing):,} drafter tensors: {listed(missing)}; copy the missing shards, or "
            "decode without the drafter (drafter=False, --no-draft)"
        )
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing):,} of {result.needed:,} tensors that config.json asks for: "
            f"{listed(missing)}; check that config.json belongs to these weights"
        )
    if unexpected:
        raise CheckpointError(
            f"{where} holds {len(unexpected):,} tensors that config.json does not explain: "
            f"{listed(unexpected)}; check that config.json belongs to these weights"
        )
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"{where} has {len(wrong):,} tensors of another shape or type: {shown}; check that config.json "
            "belongs to these weights"
        )


def read_parameter(files: CheckpointFiles, config: ModelConfig, parameter: Parameter) -> np.ndarray:
    """One parameter in packed form, freshly allocated on the host."""
    if parameter.storage == "map":
        return token_map(files.directory, config)
    if parameter.stacked:
        value = np.empty(parameter.shape, parameter.dtype)
        for expert, tensor in enumerate(parameter.published):
            value[expert] = _checked(files, tensor.name, parameter).view(parameter.dtype)
        return value
    name = parameter.published[0].name
    value = _checked(files, name, parameter)
    if parameter.storage == "ids":
        experts = config.n_routed_experts
        if value.size and not 0 <= value.min() <= value.max() < experts:
            raise CheckpointError(
                f"{files.directory}: tensor {name} holds expert ids {value.min()} to {value.max()}, "
                f"expected 0 to {experts - 1}; copy {files.shard_of(name)} again"
            )
        return value.astype(np.int32)
    return np.array(value.view(parameter.dtype))


def _checked(files: CheckpointFiles, name: str, parameter: Parameter) -> np.ndarray:
    value = files.tensor(name)
    if parameter.storage == "scale" and value.size and value.max() == _NAN_SCALE:
        raise CheckpointError(
            f"{files.directory}: tensor {name} holds the scale byte 255 (not a number) "
            f"{np.count_nonzero(value == _NAN_SCALE):,} times; copy {files.shard_of(name)} again"
        )
    return value


def token_map(directory: Path, config: ModelConfig) -> np.ndarray:
    """Engram ids int32 [V] from the folder's engram_token_map.json, or else from its tokenizer.json."""
    explicit, tokenizer = directory / TOKEN_MAP_NAME, directory / TOKENIZER_NAME
    engram = config.engram
    if explicit.exists():
        source = explicit
        try:
            ids = json.loads(explicit.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{explicit} is not valid JSON ({error}); copy this file again") from None
    elif tokenizer.exists():
        source, ids = tokenizer, _derived_map(tokenizer, config)
    else:
        raise CheckpointError(
            f"{directory} has neither {TOKENIZER_NAME} nor {TOKEN_MAP_NAME}, and this model's n-gram memory "
            f"needs one of them; copy the checkpoint's {TOKENIZER_NAME} there"
        )
    if not isinstance(ids, list) or len(ids) != config.vocab_size or any(type(i) is not int for i in ids):
        raise CheckpointError(f"{source} must give one Engram id for each of {config.vocab_size:,} token ids")
    if min(ids) != 0 or max(ids) != engram.compressed_vocab_size - 1:
        raise CheckpointError(
            f"{source} gives Engram ids {min(ids)} to {max(ids):,}, expected 0 to "
            f"{engram.compressed_vocab_size - 1:,} (engram_compressed_vocab_size in config.json)"
        )
    return np.asarray(ids, np.int32)


def _derived_map(path: Path, config: ModelConfig) -> list[int]:
    from tokenizers import Tokenizer

    from v4flash.checkpoint.engram_map import engram_token_map

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for unreadable files
        raise CheckpointError(f"{path} is not a readable tokenizer ({error}); copy this file again") from None
    return engram_token_map(tokenizer, config.vocab_size, config.engram.pad_token_id)
