"""Strict loading: every tensor of a checkpoint is used exactly once, is known to be unused, or is an error.

Knows: how stored parameters become the model's arrays, packed or decoded. Does not know: how a folder is laid
out (`published`, `orbax_store`), devices beyond JAX's default one, or what the model computes.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.checkpoint import orbax_store, published
from v4flash.checkpoint.inventory import Parameter, abstract_model, parameters
from v4flash.checkpoint.names import ModulePath
from v4flash.checkpoint.shards import CheckpointFiles
from v4flash.config import ModelConfig
from v4flash.model.engram import TABLE_GROUP
from v4flash.model.numerics import Numerics

Read = Callable[[Parameter], np.ndarray | jax.Array]
Put = Callable[[ModulePath, np.ndarray | jax.Array], dict[ModulePath, jax.Array]]


def whole(path: ModulePath, value: np.ndarray | jax.Array) -> dict[ModulePath, jax.Array]:
    """A parameter as it is, on JAX's default device."""
    return {path: jax.device_put(value)}


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


def load(
    path: str | Path, numerics: Numerics | None = None, *, drafter: bool = True, put: Put = whole
) -> LoadedModel:
    """Loads a published checkpoint folder, or one made by `orbax_store.convert`, onto JAX's default device.

    Args:
      path: folder with config.json, safetensors shards and (V4.1) tokenizer.json or engram_token_map.json.
      numerics: number types; the default keeps the stored payloads and computes in float32.
      drafter: False leaves the DSpark drafter out.
      put: brings a parameter to where it belongs, as one array or as several with paths of their own; the model's
        `graphdef` then has to be that of a model with such paths.

    Raises CheckpointError for damage, and for tensors that are missing, unexpected, of another shape or type,
    or that hold values no checkpoint can hold (scale byte 255, an expert id out of range).
    """
    path = Path(path)
    numerics = numerics or Numerics()
    if orbax_store.is_store(path):
        store = orbax_store.Store.open(path)
        wanted = with_drafter(store.config, drafter)
        return assemble(wanted, numerics, store.read, path, put)
    files = CheckpointFiles.open(path)
    config = ModelConfig.from_file(files.directory)
    wanted = with_drafter(config, drafter)
    published.check_tensors(files, config, wanted)
    read = functools.partial(published.read_parameter, files, wanted)
    return assemble(wanted, numerics, read, files.directory, put)


def with_drafter(config: ModelConfig, drafter: bool) -> ModelConfig:
    """The configuration with or without its drafter."""
    return config if drafter else dataclasses.replace(config, draft=None)


def assemble(
    config: ModelConfig, numerics: Numerics, read: Read, path: Path, put: Put = whole
) -> LoadedModel:
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
        loaded += [(own, variable.replace(array)) for own, array in put(place, value).items()]
    return LoadedModel(config, numerics, graphdef, nnx.from_flat_state(loaded), path)


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
