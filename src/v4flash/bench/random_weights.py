"""Weights of any configuration without a checkpoint: random numbers made on the device, in a program's own layout.

Knows: which values each kind of array may hold, so that nothing overflows and no number is NaN, and how popular the
experts must be for rows to choose as many different ones as they do in real text. Does not know: programs.

Time does not depend on the values, with one exception: how many different experts a pass chooses. Popularity is a
bias of the router's choice, as real checkpoints have one, so the choice itself stays the router's work.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import bench_case
from pallas_kernels.experts.packing import PackedExperts
from pallas_kernels.experts.tiers import TieredExperts
from pallas_kernels.tiles import PackedMatrix
from v4flash.checkpoint.names import ModulePath
from v4flash.config import ModelConfig
from v4flash.errors import UsageError
from v4flash.model.engram import table_primes
from v4flash.model.fused import two_memories
from v4flash.model.fused.arena import Arena
from v4flash.model.fused.packing import PackedEngram, PackedLayer, PackedModel
from v4flash.model.fused.peer import HeldExperts
from v4flash.profile.floor import correlated_experts

_NEVER = -1e30  # bias of an expert that is not there
_SAMPLES, _HALVINGS = 200, 12
_TABLE_ROWS = 20_000  # of each hash
_ZERO = ("base", "attn_sink", "bias")  # vectors that add; all others multiply
_FP8_SCALES = (115, 120)
_FP4_SCALES = (116, 124)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Which experts are there, and how they are chosen.

    Attributes:
      resident: experts with weights; the router chooses among these only.
      bias: float32 [E], added to the scores that choose.
    """

    resident: int
    bias: np.ndarray


def popular_experts(config: ModelConfig, resident: int, rows: int, seed: int = 0) -> Experts:
    """Popularity with which `rows` rows choose as many different experts as the correlated model says.

    Scores are those of a random gate, sqrt(softplus(normal)). Fewer resident experts leave that number as it is.
    """
    random = np.random.default_rng(seed)
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    popularity = random.normal(size=resident)
    scores = np.sqrt(np.logaddexp(0, random.normal(size=(_SAMPLES, rows, resident))))
    wanted = correlated_experts(experts, chosen, rows)

    def distinct(spread: float) -> float:
        picked = np.argpartition(-(scores + spread * popularity), chosen - 1, axis=-1)[..., :chosen]
        seen = np.zeros((_SAMPLES, resident), bool)
        np.put_along_axis(seen, picked.reshape(_SAMPLES, -1), True, axis=1)
        return seen.sum() / _SAMPLES

    low, high = 0.0, 8.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle) > wanted else (low, middle)
    bias = np.full(experts, _NEVER, np.float32)
    bias[:resident] = high * popularity
    return Experts(resident, bias)


def with_resident(params: Any, config: ModelConfig, resident: int) -> Any:
    """The abstract weights with `resident` routed experts a layer instead of all."""

    def cut(path, leaf):
        names = _names(path)
        routed = "experts" in names and "shared_experts" not in names
        if routed and leaf.shape[0] in _expert_counts(config):
            return jax.ShapeDtypeStruct((min(resident, leaf.shape[0]), *leaf.shape[1:]), leaf.dtype)
        return leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def with_small_memory(config: ModelConfig) -> ModelConfig:
    """The configuration with n-gram tables of few rows, as many of which are read; else itself.

    The published tables take 200 GB and belong into a host's memory; a step reads a few hundred of their rows.
    """
    if config.engram is None or config.engram.vocab_size <= _TABLE_ROWS:
        return config
    engram = dataclasses.replace(config.engram, vocab_size=_TABLE_ROWS)
    rows = tuple(sum(map(sum, table_primes(engram)[layer])) for layer in engram.layer_ids)
    return dataclasses.replace(config, engram=dataclasses.replace(engram, num_embeddings=rows))


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The model cut behind its first `count` layers; a drafter reads the last of them.

    Raises UsageError where it has not as many, or fewer than the drafter reads.
    """
    tapped = len(config.draft.target_layer_ids) if config.draft else 1
    if not tapped <= count <= config.num_hidden_layers:
        raise UsageError(f"{count} layers, expected {tapped} to {config.num_hidden_layers}")
    draft, engram = config.draft, config.engram
    if draft is not None:
        draft = dataclasses.replace(draft, target_layer_ids=tuple(range(count - tapped, count)))
    if engram is not None:
        kept = [number for number, layer in enumerate(engram.layer_ids) if layer < count]
        engram = dataclasses.replace(
            engram,
            layer_ids=tuple(engram.layer_ids[number] for number in kept),
            num_embeddings=tuple(engram.num_embeddings[number] for number in kept),
        )
    return dataclasses.replace(
        config, num_hidden_layers=count, layers=config.layers[:count], draft=draft, engram=engram
    )


def fill(params: Any, config: ModelConfig, experts: Experts, mesh: Mesh | None = None, seed: int = 0) -> Any:
    """Arrays on the default device for abstract weights, packed (PackedModel) or as published (nnx.State).

    Cold experts are put into host memory; the table of places is left as it is, abstract. With `mesh`, packed weights
    of both its devices: held experts divided, all else whole on both.
    """
    numbers = iter(range(seed * 1_000_003, 2**31))
    if isinstance(params, PackedModel):
        return _packed_model(params, config, experts, numbers, mesh)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _published(_names(path), leaf, config, experts, next(numbers)), params
    )


def one_by_one(
    variables: Iterable[tuple[ModulePath, nnx.Variable]],
    config: ModelConfig,
    experts: Experts,
    wanted: Callable[[ModulePath], Any] = lambda path: True,
) -> Iterator[tuple[ModulePath, nnx.Variable]]:
    """`fill` of the wanted ones among a model's abstract variables, each made when the one before was put away."""
    for number, (path, variable) in enumerate(variables):
        if wanted(path):
            made = fill(nnx.from_flat_state([(path, variable)]), config, experts, seed=number)
            yield from nnx.to_flat_state(made)


def _packed_model(
    params: PackedModel, config: ModelConfig, experts: Experts, numbers, mesh: Mesh | None
) -> PackedModel:
    everywhere = mesh and NamedSharding(mesh, PartitionSpec())

    def placed(tree):
        """On both devices before the next array is made: one device does not hold what it makes for two."""
        return tree if mesh is None else jax.block_until_ready(jax.device_put(tree, everywhere))

    def plain(leaf, name=""):
        return None if leaf is None else placed(_values((name,), leaf, config, experts, next(numbers)))

    def layer(pack: PackedLayer) -> PackedLayer:
        return dataclasses.replace(
            pack,
            words=placed(_words(pack.words, config.weight_block_size, next(numbers))),
            plain=placed(_arena(pack.plain, config, experts, next(numbers))),
            floats=placed(_arena(pack.floats, config, experts, next(numbers))),
            experts=_held(pack.experts, next(numbers), mesh)
            if isinstance(pack.experts, HeldExperts)
            else placed(_routed(pack.experts, numbers)),
            table=plain(pack.table, "table"),
        )

    def memory(packed: PackedEngram) -> PackedEngram:
        return placed(
            PackedEngram(
                _published(("table",), packed.table, config, experts, next(numbers)),
                packed.scale
                if packed.scale is None
                else _published(("scale",), packed.scale, config, experts, next(numbers)),
                _words(packed.words, config.weight_block_size, next(numbers)),
                _arena(packed.weights, config, experts, next(numbers)),
            )
        )

    return dataclasses.replace(
        params,
        embed=plain(params.embed),
        head=plain(params.head),
        floats=placed(_arena(params.floats, config, experts, next(numbers))),
        token_map=plain(params.token_map, "token_map"),
        engrams={index: memory(packed) for index, packed in params.engrams.items()},
        layers=tuple(layer(pack) for pack in params.layers),
        stages=tuple(layer(pack) for pack in params.stages),
        tap_words=params.tap_words
        and placed(_words(params.tap_words, config.weight_block_size, next(numbers))),
        draft_floats=params.draft_floats
        and placed(_arena(params.draft_floats, config, experts, next(numbers))),
        markov_embed=plain(params.markov_embed),
        markov_head=plain(params.markov_head),
    )


def _routed(experts: PackedExperts | TieredExperts, numbers) -> PackedExperts | TieredExperts:
    """Random experts; cold ones are made on the device and moved from there."""

    def made(like: PackedExperts, count: int) -> PackedExperts:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), like)
        return PackedExperts(*(bench_case.random_fp4(next(numbers), matrix) for matrix in shapes))

    if isinstance(experts, PackedExperts):
        return made(experts, two_memories.stacked(experts))
    cold = two_memories.moved_to_host(made(experts.hot, experts.cold.shape[0]))
    return TieredExperts(made(experts.hot, two_memories.stacked(experts.hot)), cold)


def _held(held: HeldExperts, number: int, mesh: Mesh) -> HeldExperts:
    """Experts of both devices, each made where it belongs, taken in turn: popular ones are on both."""
    divided = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    made = [
        jax.jit(functools.partial(bench_case.random_fp4, 2 * number + part, matrix), out_shardings=divided)()
        for part, matrix in enumerate(held.held)
    ]
    expert = np.arange(held.places.shape[1])
    slots = held.held.down.words.shape[0] // 2
    places = np.stack([expert % 2, np.minimum(expert // 2, slots - 1)]).astype(np.int32)
    return HeldExperts(PackedExperts(*made), jax.device_put(places, NamedSharding(mesh, PartitionSpec())))


def _words(arena: Arena, block: int, number: int) -> Arena:
    """An arena of packed FP8 matrices: NAME.words beside NAME.scales."""
    shapes = {name: shape for name, _, shape in arena.layout}
    arrays = {}
    for place, name in enumerate(name.removesuffix(".words") for name in shapes if name.endswith(".words")):
        matrix = PackedMatrix(
            *(jax.ShapeDtypeStruct(shapes[f"{name}.{part}"], jnp.int32) for part in ("words", "scales"))
        )
        made = bench_case.random_fp8(number * 16 + place, matrix, block)
        arrays |= {f"{name}.words": made.words, f"{name}.scales": made.scales}
    return _packed({name: arrays[name] for name in shapes}, arena)


def _arena(arena: Arena, config: ModelConfig, experts: Experts, number: int) -> Arena:
    """An arena of floating-point arrays."""
    arrays = {
        name: _values(tuple(name.split(".")), jax.ShapeDtypeStruct(shape, arena.data.dtype), config, experts,
                      number * 32 + place)
        for place, (name, _, shape) in enumerate(arena.layout)
    }  # fmt: skip
    return _packed(arrays, arena)


def _packed(arrays: dict[str, jax.Array], like: Arena) -> Arena:
    made = Arena.pack(arrays, like.data.dtype)
    assert made.layout == like.layout, (made.layout, like.layout)
    return made


def _published(names: tuple[str, ...], leaf, config: ModelConfig, experts: Experts, number: int) -> jax.Array:
    """One array of the published layout: payloads and scale bytes, else as `_values`."""
    if leaf.dtype == jnp.float8_e4m3fn:
        return _payload(bench_case.key(number), leaf.shape)
    if leaf.dtype == jnp.uint8:
        fp4 = "experts" in names and "shared_experts" not in names
        low, high = _FP4_SCALES if fp4 else _FP8_SCALES
        limits = (low, high) if _is_scale(names) else (0, 256)
        return _integers(bench_case.key(number), leaf.shape, jnp.uint8, *limits)
    return _values(names, leaf, config, experts, number)


def _values(names: tuple[str, ...], leaf, config: ModelConfig, experts: Experts, number: int) -> jax.Array:
    """Floating-point and integer arrays by their names and shapes."""
    last = names[-1]
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        if last in ("table", "tid2eid"):
            return _different(bench_case.key(number), leaf.shape, leaf.dtype, experts.resident)
        # Hash multipliers leave 64 bits room for ids of the compressed vocabulary, no more.
        ids = config.engram.compressed_vocab_size if last == "token_map" else config.vocab_size
        return _integers(bench_case.key(number), leaf.shape, leaf.dtype, 0, ids)
    if names[-2:] == ("gate", "bias"):
        bias = experts.bias
        if leaf.shape != bias.shape:  # a drafter's router over fewer experts, none of them popular
            bias = np.where(np.arange(leaf.shape[0]) < experts.resident, 0.0, _NEVER)
        return jnp.asarray(bias, leaf.dtype)
    if len(leaf.shape) >= 2:
        return _normal(bench_case.key(number), leaf.shape, leaf.dtype)
    return (
        jnp.zeros(leaf.shape, leaf.dtype)
        if last in ("base", "attn_sink", "bias")
        else jnp.ones(leaf.shape, leaf.dtype)
    )


def _is_scale(names: tuple[str, ...]) -> bool:
    return names[-1].endswith("scale")


def _names(path) -> tuple[str, ...]:
    """The words of a tree path, without the `value` that a module's variables end in."""
    words = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
    return tuple(word for word in words if word not in ("value", "raw_value"))


def _expert_counts(config: ModelConfig) -> set[int]:
    return {config.n_routed_experts} | ({config.draft.n_routed_experts} if config.draft else set())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _integers(key: jax.Array, shape: tuple[int, ...], dtype, low: int, high: int) -> jax.Array:
    if jnp.dtype(dtype) == jnp.uint8 and (low, high) == (0, 256):
        return jax.random.bits(key, shape, jnp.uint8)
    return jax.random.randint(key, shape, low, high, jnp.int32).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _different(key: jax.Array, shape: tuple[int, ...], dtype, below: int) -> jax.Array:
    """Rows [V, K] of K different numbers below `below`: a random start and a random stride."""
    first, second = jax.random.split(key)
    start = jax.random.randint(first, (shape[0], 1), 0, below)
    stride = jax.random.randint(second, (shape[0], 1), 1, max(2, below // shape[1]))
    return ((start + stride * jnp.arange(shape[1])) % below).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _payload(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Finite E4M3 payloads: no byte of seven ones."""
    finite = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xFE)
    return jax.lax.bitcast_convert_type(finite, jnp.float8_e4m3fn)
