"""What the large launches of a hand-fused step read, beside the time a profile gives them.

Knows: which packed matrices each weight-streaming kernel reads, by the kernel's name. Does not know: how a profile was
taken. Weights and scales count, activations do not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.bench_case import tree_bytes
from v4flash.model.fused.arena import Arena
from v4flash.model.fused.packing import PackedLayer, PackedModel

PRODUCTS = ("fp8_product", "boundary_and_products", "cache_writes_and_queries", "output_projection")


def stream_bytes(
    packed: PackedModel, experts: Sequence[float], drafted: float, drafts: bool
) -> dict[str, float]:
    """Bytes that a step's kernels of each name read; the dense products count together, as 'products'.

    Args: packed, abstract or real; experts, different experts of each layer; drafted, of each drafter stage;
    drafts, whether anything is drafted (else the drafter only commits rows).
    """
    read = dict.fromkeys(("gate_up", "down", "products", "tile_winners"), 0.0)
    stages = list(packed.stages) if drafts else []
    for pack, distinct in zip([*packed.layers, *stages], [*experts, *[drafted] * len(stages)], strict=True):
        for name in ("gate_up", "down"):
            routed = getattr(pack.experts, name)
            read[name] += distinct * sum(tree_bytes(part) / part.shape[0] for part in routed)
            read[name] += _named(pack.words, f"shared.{name}")
        read["products"] += _dense(pack)
    for engram in packed.engrams.values():
        read["products"] += tree_bytes(engram.words.data)
    if packed.tap_words is not None:
        read["products"] += tree_bytes(packed.tap_words.data)
    read["tile_winners"] = tree_bytes(packed.head) * (2 if stages else 1)
    return read


def rates(
    profile: Mapping[str, Any], read: Mapping[str, float], bandwidth: float
) -> dict[str, dict[str, float]]:
    """Each stream's bytes, microseconds, bytes/s, and share of `bandwidth`, in a profile's JSON form."""
    spent = {kernel["name"]: kernel["microseconds"] for kernel in profile["kernels"]}
    spent["products"] = sum(spent.get(name, 0.0) for name in PRODUCTS)
    return {
        name: {
            "bytes": round(size),
            "microseconds": round(spent[name], 1),
            "rate": round(size / spent[name] * 1e6),
            "share": round(size / spent[name] * 1e6 / bandwidth, 4),
        }
        for name, size in read.items()
        if spent.get(name)
    }


def _dense(pack: PackedLayer) -> float:
    """The matrices of attention."""
    exact = next((math.prod(shape) for name, _, shape in pack.plain.layout if name == "exact"), 0)
    words = sum(_named(pack.words, name) for name in ("projections", "queries", "wo_a", "wo_b"))
    return words + exact * pack.plain.data.dtype.itemsize


def _named(arena: Arena, name: str) -> float:
    wanted = {f"{name}.words", f"{name}.scales"}
    found = sum(math.prod(shape) for own, _, shape in arena.layout if own in wanted)
    return float(found * arena.data.dtype.itemsize)
