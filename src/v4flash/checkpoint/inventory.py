"""Every tensor a configuration says its checkpoint holds: name, number type, shape, bytes.

Knows: how the parameters of the abstract model are stored, and the published tensors that text decoding does
not use. Does not know: files. Nothing here allocates weights: the modules are only traced for their shapes.

Source of the unused tensors' shapes: the published checkpoints (multi-token prediction stage of the V4
preview, vision bias of V4.1 routers, image marker embeddings).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from v4flash.checkpoint import names
from v4flash.checkpoint.safetensors_file import DTYPES
from v4flash.config import ModelConfig
from v4flash.model.backbone import Layer
from v4flash.model.drafter import Model
from v4flash.model.experts import Experts, RoutedExperts
from v4flash.model.hyper_connections import HyperHead
from v4flash.model.numerics import Linear, Norm, Numerics

_PACKED = Numerics(packed=True)
_VISION = re.compile(r"(vision|aligner)\..+")
_IMAGE_MARKERS = ("image_start", "image_end", "image_newline")


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedTensor:
    """One tensor of a published checkpoint; `used` is False for tensors that text decoding never reads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    used: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the model and the published tensors it is made of.

    Attributes:
      path: its place in the module tree.
      storage: 'fp8' (block scales), 'fp4', 'rows' (E4M3 with scales per row), 'scale', 'plain', 'ids'
        (expert table) or 'map' (the Engram token map, which no checkpoint stores as a tensor).
      published: its tensors; one, one per expert for stacked experts, or none for 'map'.
      shape: shape of the array in packed form.
      dtype: number type of the array in packed form.
    """

    path: names.ModulePath
    storage: str
    published: tuple[PublishedTensor, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def stacked(self) -> bool:
        return names.is_stacked(self.path)


@functools.lru_cache(maxsize=8)
def abstract_model(
    config: ModelConfig, numerics: Numerics, routed: RoutedExperts = Experts
) -> tuple[nnx.GraphDef, tuple[tuple[names.ModulePath, nnx.Variable], ...]]:
    """Structure of a model without its weights: the graph, and (path, variable of shape and type) pairs.

    `routed` makes the backbone's routed experts.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Model(config, numerics, routed)))
    return graphdef, tuple(nnx.to_flat_state(state))


@functools.lru_cache(maxsize=8)
def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters of the model in packed form, with the published tensors that fill them."""
    return tuple(_parameter(path, variable, config) for path, variable in abstract_model(config, _PACKED)[1])


@functools.lru_cache(maxsize=8)
def inventory(config: ModelConfig) -> dict[str, PublishedTensor]:
    """{name: PublishedTensor} of the text part of a checkpoint, the unused ones included.

    V4.1's vision tower (`vision.*`, `aligner.*`) is not listed; see `is_ignored`.
    """
    tensors = [tensor for parameter in parameters(config) for tensor in parameter.published]
    tensors += _unused(config)
    return {tensor.name: tensor for tensor in tensors}


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor outside the inventory belongs to a part that text decoding leaves out (vision)."""
    return config.vision_bias and _VISION.fullmatch(name) is not None


def _parameter(path: names.ModulePath, variable: nnx.Variable, config: ModelConfig) -> Parameter:
    value: jax.ShapeDtypeStruct = variable.get_value()
    storage, dtype = _storage(path, value.dtype)
    lead = value.shape[0] if names.is_stacked(path) else 1
    shape = value.shape[1:] if names.is_stacked(path) else value.shape
    published = (
        ()
        if storage == "map"
        else tuple(
            PublishedTensor(name, dtype, shape) for name in names.published_names(path, config.family, lead)
        )
    )
    return Parameter(path, storage, published, value.shape, value.dtype)


def _storage(path: names.ModulePath, dtype: jnp.dtype) -> tuple[str, str]:
    """(storage, published dtype name) of a parameter in packed form."""
    if path[-1] == "token_map":
        return "map", "I32"
    if path[-1] == "tid2eid":
        return "ids", "I64"
    if dtype == jnp.float8_e4m3fn:
        return ("rows" if path[-3:-1] == ("engram", "embed") else "fp8"), "F8_E4M3"
    if dtype == jnp.uint8:
        return ("scale", "F8_E8M0") if path[-1] == "scale" else ("fp4", "I8")
    return "plain", {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float32): "F32"}[jnp.dtype(dtype)]


def _unused(config: ModelConfig) -> Iterator[PublishedTensor]:
    """Published tensors of the text part that decoding does not read."""
    for stage in range(config.preview_mtp_stages):
        yield from _prediction_stage(config, stage)
    if not config.vision_bias:
        return
    for parameter in parameters(config):
        if parameter.path[-2:] == ("gate", "bias"):
            bias = parameter.published[0]
            yield PublishedTensor(f"{bias.name}_vl", bias.dtype, bias.shape, used=False)
    for marker in _IMAGE_MARKERS:
        yield PublishedTensor(marker, "BF16", (config.hidden_size,), used=False)


class _PredictionStage(Layer):
    """Parameters of the preview's next-token-after-next stage, for their shapes only."""

    def __init__(self, config: ModelConfig, stage: int):
        super().__init__(
            config,
            config.draft_layer(stage),
            _PACKED,
            experts=config.n_routed_experts,
            chosen=config.num_experts_per_tok,
        )
        width, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(width, width, "fp8", config, _PACKED)
        self.h_proj = Linear(width, width, "fp8", config, _PACKED)
        self.enorm, self.hnorm, self.norm = (Norm(width, eps, _PACKED) for _ in range(3))
        self.hc_head = HyperHead(config, _PACKED)


def _prediction_stage(config: ModelConfig, stage: int) -> Iterator[PublishedTensor]:
    state = nnx.state(nnx.eval_shape(lambda: _PredictionStage(config, stage)))
    for path, variable in nnx.to_flat_state(state):
        for tensor in _parameter(("drafter", "stages", stage, *path), variable, config).published:
            yield dataclasses.replace(tensor, used=False)
