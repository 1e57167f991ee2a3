"""Writing a model as a published-style checkpoint: names, number formats, shards and index.

Knows: how each array is quantised on its way out, and how tensors are spread over shards. Does not know:
where the weights come from (training, or another checkpoint).

What is read back is what the formats can hold: a decoded weight returns as its own round trip through FP8 or
FP4; a packed model returns unchanged.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from v4flash.checkpoint import names
from v4flash.checkpoint.folders import complete_folder
from v4flash.checkpoint.inventory import Parameter, inventory, parameters
from v4flash.checkpoint.published import TOKEN_MAP_NAME
from v4flash.checkpoint.safetensors_file import DTYPES, write_safetensors
from v4flash.checkpoint.shards import INDEX_NAME
from v4flash.config import ModelConfig
from v4flash.model.engram import TABLE_GROUP

DEFAULT_SHARD_BYTES = 4_000_000_000
Tensor = tuple[str, str, np.ndarray]  # published name, published dtype, array


def save_published(
    directory: str | Path,
    config_json: Mapping,
    params: nnx.State,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    extra_files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> int:
    """Writes config.json, shards, the index and `extra_files` (name to content) as one complete folder.

    Args:
      directory: the new checkpoint folder; it appears only when it is complete.
      config_json: the published-style configuration; it must describe `params`.
      params: weights of `v4flash.model.drafter.Model`, packed or decoded (any float type).
      max_shard_bytes: a shard is closed before it would exceed this, unless one tensor alone does.
      extra_files: for example the tokenizer's files. V4.1 models without an engram_token_map.json among them
        get the one in `params`.

    Returns the number of tensor bytes. Raises ValueError where `params` do not have the shapes that the
    configuration asks for, UsageError and CheckpointError as `complete_folder`.
    """
    config = ModelConfig.from_dict(config_json)
    arrays = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    files = dict(extra_files or {})
    if config.engram and TOKEN_MAP_NAME not in files:
        files[TOKEN_MAP_NAME] = json.dumps(np.asarray(arrays[("backbone", "token_map")]).tolist()).encode()
    expected = sum(tensor.nbytes for tensor in inventory(config).values() if tensor.used)
    with complete_folder(directory, expected, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return _write_shards(folder, published_tensors(config, arrays), max_shard_bytes)


def published_tensors(config: ModelConfig, arrays: Mapping[names.ModulePath, jax.Array]) -> Iterator[Tensor]:
    """Every published tensor of {path: array}, quantised where the arrays are decoded, in module order."""
    for parameter in parameters(config):
        if parameter.storage == "map" or (parameter.storage == "scale" and parameter.path not in arrays):
            continue
        for path, value in _packed(parameter, arrays, config):
            yield from _split(parameter, path, value, config)


def _packed(
    parameter: Parameter, arrays: Mapping, config: ModelConfig
) -> Iterator[tuple[names.ModulePath, np.ndarray]]:
    """(path, packed array) of a parameter; a decoded weight also gives its scales."""
    path = parameter.path
    if path not in arrays:
        raise ValueError(f"the weights have no {'.'.join(map(str, path))}, which the configuration asks for")
    value, scale_path = arrays[path], (*path[:-1], "scale")
    if parameter.storage not in ("fp8", "fp4", "rows") or scale_path in arrays:
        yield path, np.asarray(value.astype(parameter.dtype))
        return
    payload, scale = encode(parameter.storage, config.weight_block_size, value)
    yield path, np.asarray(payload)
    yield scale_path, np.asarray(scale)


@functools.partial(jax.jit, static_argnums=(0, 1))
def encode(storage: str, block: int, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(payload, scale bytes) of a float weight [..., N, K] in storage 'fp8', 'fp4' or 'rows' (`Parameter`).

    `block` is the FP8 block, `config.weight_block_size`; N and K need not be multiples of it.
    """
    if storage == "fp4":
        return formats.encode_fp4(weight)
    if storage == "rows":
        payload, scale = formats.encode_fp8(weight[:, None], TABLE_GROUP)
        return payload[:, 0], scale[:, 0]
    rows, columns = weight.shape[-2:]
    margin = [(0, 0)] * (weight.ndim - 2) + [(0, -rows % block), (0, -columns % block)]
    payload, scale = formats.encode_fp8(jnp.pad(weight, margin), block)
    return payload[..., :rows, :columns], scale


def _split(
    parameter: Parameter, path: names.ModulePath, value: np.ndarray, config: ModelConfig
) -> Iterator[Tensor]:
    lead = value.shape[0] if parameter.stacked else 1
    known = inventory(config)
    for expert, name in enumerate(names.published_names(path, config.family, lead)):
        array, tensor = (value[expert] if parameter.stacked else value), known[name]
        if array.shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {list(array.shape)}, the configuration asks for {list(tensor.shape)}"
            )
        wide = array.astype(np.int64) if tensor.dtype == "I64" else array
        yield name, tensor.dtype, wide


def _write_shards(folder: Path, tensors: Iterator[Tensor], max_shard_bytes: int) -> int:
    """Writes shards as they fill; they get their final, numbered names when their count is known."""
    written: list[tuple[Path, list[str]]] = []
    pending: dict[str, tuple[str, np.ndarray]] = {}
    total = 0

    def flush() -> None:
        path = folder / f"shard-{len(written)}"
        write_safetensors(path, pending, {"format": "pt"})
        written.append((path, list(pending)))
        pending.clear()

    for name, dtype, array in tensors:
        size = array.size * DTYPES[dtype].itemsize
        if pending and sum(held.nbytes for _, held in pending.values()) + size > max_shard_bytes:
            flush()
        pending[name] = dtype, array
        total += size
    flush()
    weight_map = {}
    for number, (path, held) in enumerate(written, 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(held, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total
