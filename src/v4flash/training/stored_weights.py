"""Float master weights and the values they take once stored in a published checkpoint.

Knows: which parameter is stored how (block FP8, FP4, FP8 rows, bf16, float32), how to round a master weight
accordingly, and how a flat mapping of weights becomes a model. Does not know: losses, optimisers, files.

Training computes with the rounded values and gives their gradient to the master weights unchanged
(straight-through), so that writing a checkpoint changes no logit.
"""

import dataclasses
import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from pallas_kernels import formats
from v4flash.checkpoint.inventory import parameters
from v4flash.config import ModelConfig
from v4flash.model.drafter import Model
from v4flash.model.engram import TABLE_GROUP
from v4flash.model.numerics import Numerics

Weights = dict[str, jax.Array]
_CONSTANTS = ("tid2eid", "token_map")
_RULE_DRIVEN = "gate.bias"


def is_trained(name: str) -> bool:
    """Whether gradients move a parameter: all but constant tables and the routers' selection biases."""
    return not name.endswith((*_CONSTANTS, _RULE_DRIVEN))


def is_router_bias(name: str) -> bool:
    """Whether a parameter is a selection bias, which follows expert loads instead of a gradient."""
    return name.endswith(_RULE_DRIVEN)


def of_room(weights: Weights, room: str) -> Weights:
    """The parameters of one room of the model, 'backbone' or 'drafter'."""
    return {name: value for name, value in weights.items() if name.startswith(f"{room}.")}


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A model's structure without its weights, for one computation type.

    Attributes:
      config, numerics: what it was built for; rounding of activations is always on.
      graphdef, variables: structure and {name: abstract variable}; names are dotted module paths.
      storage: {name: 'fp8' | 'fp4' | 'rows' | 'plain' | 'ids' | 'map'}.
    """

    config: ModelConfig
    numerics: Numerics
    graphdef: nnx.GraphDef
    variables: dict[str, tuple[tuple, nnx.Variable]]
    storage: dict[str, str]
    published_dtypes: dict[str, jnp.dtype]

    @classmethod
    def create(cls, config: ModelConfig, dtype: jnp.dtype) -> "Skeleton":
        """The structure of `config` computing in `dtype` (bfloat16 or float32)."""
        numerics = Numerics(dtype=dtype, quantise=True, packed=False)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Model(config, numerics)))
        variables = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(state)}
        published = {".".join(map(str, p.path)): p for p in parameters(config)}
        return cls(
            config,
            numerics,
            graphdef,
            variables,
            {name: published[name].storage for name in variables},
            {name: published[name].dtype for name in variables},
        )

    def without_rounding(self) -> "Skeleton":
        """The same structure with the rounding of activations, caches and index vectors left out."""
        numerics = dataclasses.replace(self.numerics, quantise=False)
        graphdef = nnx.split(nnx.eval_shape(lambda: Model(self.config, numerics)))[0]
        return dataclasses.replace(self, numerics=numerics, graphdef=graphdef)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self.variables[name][1].get_value().shape

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of the master weights: float32, int32 for tables of ids."""
        integer = {name: kind in ("ids", "map") for name, kind in self.storage.items()}
        return {
            name: jax.ShapeDtypeStruct(self.shape(name), jnp.int32 if integer[name] else jnp.float32)
            for name in self.variables
        }

    def stored(self, weights: Weights) -> Weights:
        """Master weights (any subset) with the values that their published form decodes to.

        FP8 and FP4 weights come in the computation's type, which holds them exactly in float32 and bfloat16;
        the others stay float32, so that gradients of gathered rows add up in float32.
        """
        return {name: self._stored(name, value) for name, value in weights.items()}

    def _stored(self, name: str, value: jax.Array) -> jax.Array:
        kind = self.storage[name]
        if kind == "fp8":
            return formats.fp8_weight_round_trip(value, self.config.weight_block_size).astype(
                self.numerics.dtype
            )
        if kind == "fp4":
            return formats.fp4_weight_round_trip(value).astype(self.numerics.dtype)
        if kind == "rows":
            return formats.fp8_weight_round_trip(value[:, None], TABLE_GROUP)[:, 0]
        if kind == "plain":
            return value.astype(self.published_dtypes[name]).astype(jnp.float32)
        return value

    def model(self, stored: Weights) -> Model:
        """A model over stored weights; the module code casts them where the published code does."""
        flat = [(path, variable.replace(stored[name])) for name, (path, variable) in self.variables.items()]
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat))


@functools.cache
def with_open_selection(config: ModelConfig, entries: int) -> ModelConfig:
    """`config` with an indexer that keeps every one of up to `entries` visible entries."""
    return dataclasses.replace(
        config,
        index_topk=max(entries, config.index_topk),
        candidate_topk_blocks=max(entries, config.candidate_topk_blocks),
    )
