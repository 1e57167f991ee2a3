"""Strict loading: every tensor of a checkpoint is used exactly once, is known to be unused, or is an error.

Knows: how published tensors become the model's arrays, packed or decoded, and which values cannot be right.
Does not know: devices beyond JAX's default one, or what the model computes.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.checkpoint.inventory import Parameter, abstract_model, inventory, is_ignored, parameters
from v4flash.checkpoint.shards import CheckpointFiles, listed
from v4flash.config import ModelConfig
from v4flash.errors import CheckpointError
from v4flash.model.engram import TABLE_GROUP
from v4flash.model.numerics import Numerics

TOKEN_MAP_NAME = "engram_token_map.json"
TOKENIZER_NAME = "tokenizer.json"
_NAN_SCALE = 255

Read = Callable[[Parameter], np.ndarray | jax.Array]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
      config: its architecture; `draft` is None where the drafter was left out.
      numerics: the number types it was loaded for.
      graphdef: structure of `v4flash.model.drafter.Model`.
      params: its weights as an nnx.State of jax arrays.
      path: where it came from.
    """

    config: ModelConfig
    numerics: Numerics
    graphdef: nnx.GraphDef
    params: nnx.State
    path: Path

    @property
    def model(self):
        """The model as an nnx module."""
        return nnx.merge(self.graphdef, self.params)


def load(path: str | Path, numerics: Numerics | None = None, *, drafter: bool = True) -> LoadedModel:
    """Loads a published checkpoint folder onto JAX's default device.

    Args:
      path: folder with config.json, safetensors shards and (V4.1) tokenizer.json or engram_token_map.json.
      numerics: number types; the default keeps the stored payloads and computes in float32.
      drafter: False leaves the DSpark drafter out.

    Raises CheckpointError for damage, and for tensors that are missing, unexpected, of another shape or type,
    or that hold values no checkpoint can hold (scale byte 255, an expert id out of range).
    """
    path = Path(path)
    numerics = numerics or Numerics()
    files = CheckpointFiles.open(path)
    config = ModelConfig.from_file(files.directory)
    wanted = with_drafter(config, drafter)
    check_tensors(files, config, wanted)
    return assemble(wanted, numerics, functools.partial(read_parameter, files, wanted), files.directory)


def with_drafter(config: ModelConfig, drafter: bool) -> ModelConfig:
    """The configuration with or without its drafter."""
    return config if drafter else dataclasses.replace(config, draft=None)


def assemble(config: ModelConfig, numerics: Numerics, read: Read, path: Path) -> LoadedModel:
    """Builds the model's arrays one parameter at a time from `read`, which returns packed ones.

    At no time is more than one parameter held twice, so the host's peak is the loaded tree and its largest
    parameter.
    """
    packed = {parameter.path: parameter for parameter in parameters(config)}
    graphdef, variables = abstract_model(config, numerics)
    loaded = []
    for place, variable in variables:
        parameter = packed[place]
        value = read(parameter)
        if not numerics.packed:
            quantised = parameter.storage in ("fp8", "fp4", "rows")
            scale = read(packed[(*place[:-1], "scale")]) if quantised else None
            value = _decoded(parameter, value, scale, config, variable.get_value().dtype)
        loaded.append((place, variable.replace(jax.device_put(value))))
    return LoadedModel(config, numerics, graphdef, nnx.from_flat_state(loaded), path)


def check_tensors(files: CheckpointFiles, config: ModelConfig, wanted: ModelConfig) -> None:
    """Compares what the files hold with what the configuration needs, from headers alone.

    `config` is the checkpoint's own configuration, `wanted` the same or without its drafter.
    """
    known = inventory(config)
    needed = {name for name, tensor in inventory(wanted).items() if tensor.used}
    missing = needed - files.tensors.keys()
    if missing and all(name.startswith("mtp.") for name in missing):
        raise CheckpointError(
            f"{files.directory} lacks {len(missing):,} drafter tensors: {listed(missing)}; copy the missing "
            "shards, or decode without the drafter (drafter=False, --no-draft)"
        )
    if missing:
        raise CheckpointError(
            f"{files.directory} lacks {len(missing):,} of {len(needed):,} tensors that config.json asks for: "
            f"{listed(missing)}; check that config.json belongs to these weights"
        )
    unexpected = [name for name in files.tensors if name not in known and not is_ignored(name, config)]
    if unexpected:
        raise CheckpointError(
            f"{files.directory} holds {len(unexpected):,} tensors that config.json does not explain: "
            f"{listed(unexpected)}; check that config.json belongs to these weights"
        )
    wrong = []
    for name in sorted(needed):
        found, expected = files.tensors[name], known[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            wrong.append(
                f"{name}: expected {expected.dtype} {list(expected.shape)}, found {found.dtype} "
                f"{list(found.shape)} in {files.shard_of(name)}"
            )
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"{files.directory} has {len(wrong):,} tensors of another shape or type: {shown}"
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
                f"{files.directory}: tensor {name} holds expert ids {value.min()} to {value.max()}, expected 0 "
                f"to {experts - 1}; copy {files.shard_of(name)} again"
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


def _decoded(
    parameter: Parameter, value, scale, config: ModelConfig, dtype: jnp.dtype
) -> jax.Array | np.ndarray:
    """The parameter as a model with decoded weights keeps it."""
    if parameter.storage == "plain":
        return value.astype(dtype)
    if parameter.storage in ("ids", "map"):
        return value
    return _decode(parameter.storage, config.weight_block_size, jnp.dtype(dtype), value, scale)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(storage: str, block: int, dtype: jnp.dtype, value: jax.Array, scale: jax.Array) -> jax.Array:
    if storage == "fp4":
        return formats.decode_fp4(value, scale).astype(dtype)
    if storage == "rows":
        return decode_rows(value, scale).astype(dtype)
    return formats.decode_fp8(value, scale, block).astype(dtype)


def decode_rows(payload: jax.Array, scale: jax.Array) -> jax.Array:
    """E4M3 table [rows, width] with one scale byte per row and 32 columns, to float32."""
    return payload.astype(jnp.float32) * jnp.repeat(formats.e8m0_to_float(scale), TABLE_GROUP, axis=-1)


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
