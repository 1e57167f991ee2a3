"""Random experts, inputs and routes for the tests of the expert launches."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.experts import packing
from pallas_kernels.experts.reference import Routes, routes
from pallas_kernels.experts.specs import ExpertSpec

_routes = jax.jit(routes, static_argnums=3)
_fp8_round_trip = jax.jit(formats.fp8_round_trip, static_argnums=1)


def fp4(rng, *shape: int):
    """An FP4 weight [..., N, K] and its scale bytes."""
    *lead, n, k = shape
    weight = rng.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8)
    scale = rng.integers(118, 123, (*lead, n, k // 32), dtype=np.uint8)
    return jnp.asarray(weight), jnp.asarray(scale)


def fp8(rng, n: int, k: int, block: int):
    """An E4M3 weight [N, K] and its scale bytes."""
    weight = np.clip(rng.normal(size=(n, k)) * 60, -448, 448)
    scale = rng.integers(116, 120, (-(-n // block), -(-k // block)), dtype=np.uint8)
    return jnp.asarray(weight, jnp.float8_e4m3fn), jnp.asarray(scale)


def published(spec: ExpertSpec, seed: int) -> tuple[list, list]:
    """w1, w3, w2 of the routed experts and of the shared one, each with its scale bytes."""
    rng = np.random.default_rng(seed)
    channels, width = spec.channels, spec.width
    shapes = ((channels, width), (channels, width), (width, channels))
    routed = [part for shape in shapes for part in fp4(rng, spec.experts, *shape)]
    shared = [part for shape in shapes for part in fp8(rng, *shape, spec.block)]
    return routed, shared


def packed(spec: ExpertSpec, seed: int) -> tuple[packing.PackedExperts, packing.PackedExperts]:
    """The same, packed."""
    routed, shared = published(spec, seed)
    return packing.pack_routed(*routed), packing.pack_shared(*shared, spec.block)


def rounded_rows(spec: ExpertSpec, seed: int):
    """Activations [8, D] as the model hands them over."""
    x = np.random.default_rng(seed).normal(size=(8, spec.width)).astype(np.float32)
    return _fp8_round_trip(jnp.asarray(x), min(spec.block, spec.width)).astype(jnp.float16)


def random_routes(spec: ExpertSpec, seed: int, live: int = 8, entries: int | None = None) -> Routes:
    """Distinct random choices of every row."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(spec.experts)[: spec.chosen] for _ in range(8)]).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    return _routes(jnp.asarray(ids), jnp.asarray(weights), jnp.arange(8) < live, entries or spec.entries)
