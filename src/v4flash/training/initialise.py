"""Random starting weights of a model, by parameter name.

Knows: a scale for every kind of parameter, and how a drafter starts from its target. Does not know: training.

Hyper-connections start close to one residual stream copied `hc_mult` times: every sublayer reads the mean of
the streams, writes to all of them, and mixes them little.
"""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from v4flash.config import ModelConfig
from v4flash.training.stored_weights import Skeleton, Weights, of_room

EMBEDDING_SCALE = 0.5
SMALL = 0.02
HYPER_SCALE = 0.1
COMB_DIAGONAL = 4.0
_RESIDUAL_OUTPUTS = ("attn.wo_b.weight", "experts.w2.weight")


def initial_weights(skeleton: Skeleton, key: jax.Array, token_map: list[int] | None = None) -> Weights:
    """Master weights of a fresh model, target and drafter.

    Args: key, a jax.random key; token_map, the Engram token map [V], required where the model has one.
    """
    weights = {}
    for name in sorted(skeleton.variables):
        own = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
        weights[name] = _initial(skeleton, name, own, token_map)
    return weights


def _initial(skeleton: Skeleton, name: str, key: jax.Array, token_map: list[int] | None) -> jax.Array:
    config, shape = skeleton.config, skeleton.shape(name)
    if name.endswith("token_map"):
        if token_map is None or len(token_map) != shape[0]:
            raise ValueError(f"token_map must list {shape[0]} ids for a model with n-gram memory")
        return jnp.asarray(token_map, jnp.int32)
    if name.endswith("tid2eid"):
        return jnp.asarray(balanced_expert_table(*shape, config.n_routed_experts))
    if ".hc_" in name or name.startswith("backbone.hc_head"):
        return _initial_hyper(config, name, shape, key)
    if name == "backbone.embed":
        return EMBEDDING_SCALE * jax.random.normal(key, shape)
    if name in ("backbone.head",) or name.endswith(("engram.embed.weight", "markov_head.embed")):
        return SMALL * jax.random.normal(key, shape)
    if name.endswith("_weight") or "norm." in name:
        return jnp.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "ape", "markov_head.head", "confidence.weight")):
        return jnp.zeros(shape)
    scale = shape[-1] ** -0.5
    if name.endswith(_RESIDUAL_OUTPUTS) or name.endswith("shared_experts.w2.weight"):
        scale *= (2 * config.num_hidden_layers) ** -0.5
    return scale * jax.random.normal(key, shape)


def _initial_hyper(config: ModelConfig, name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    streams = config.hc_mult
    if name.endswith(".fn"):
        return shape[-1] ** -0.5 * jax.random.normal(key, shape)
    if name.endswith(".scale"):
        return jnp.full(shape, HYPER_SCALE)
    mean = np.full(streams, -math.log(streams - 1) if streams > 1 else 0.0)
    if shape[0] == streams:
        return jnp.asarray(mean, jnp.float32)
    comb = COMB_DIAGONAL * np.eye(streams).ravel()
    return jnp.asarray(np.concatenate([mean, np.zeros(streams), comb]), jnp.float32)


def balanced_expert_table(tokens: int, chosen: int, experts: int, seed: int = 0) -> np.ndarray:
    """Hash-routing table int32 [tokens, chosen]: distinct experts a token, equal load over the ids."""
    random = np.random.default_rng(seed)
    first = random.permutation(np.arange(tokens) % experts)
    steps = np.stack([1 + random.permutation(experts - 1)[: chosen - 1] for _ in range(tokens)])
    return np.concatenate([first[:, None], (first[:, None] + steps) % experts], axis=1).astype(np.int32)


def drafter_from_target(skeleton: Skeleton, weights: Weights, key: jax.Array) -> Weights:
    """Drafter weights that start from the tapped layers of the target.

    Stage s copies what has the same name in target layer `dspark_target_layer_ids[s]`, of stacked experts
    the first ones; the projection of the taps starts as the last tap plus noise, and the final norm as the
    target's. Everything else keeps the fresh weights that `weights` holds for it.
    """
    config, layers = skeleton.config, skeleton.config.draft.target_layer_ids
    drafter = dict(of_room(weights, "drafter"))
    for name, fresh in drafter.items():
        stage, rest = name.removeprefix("drafter.stages.").split(".", 1)
        if rest == "main_proj.weight":
            width = config.hidden_size
            noise = SMALL * jax.random.normal(key, fresh.shape)
            drafter[name] = noise.at[:, -width:].add(jnp.eye(width))
            continue
        source = f"backbone.{rest}" if rest == "norm.weight" else None
        source = source or f"backbone.layers.{layers[min(int(stage), len(layers) - 1)]}.{rest}"
        if source not in weights or weights[source].shape[1:] != fresh.shape[1:]:
            continue
        if weights[source].shape[0] >= fresh.shape[0]:
            # A copy: training donates the buffers of both rooms.
            drafter[name] = jnp.array(weights[source][: fresh.shape[0]], copy=True)
    return drafter
