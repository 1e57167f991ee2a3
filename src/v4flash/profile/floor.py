"""The bytes a step cannot avoid reading, and the time they take.

Knows: which parameters and cache rows a step needs, from the configuration alone, and models of how many
different experts its rows choose. Does not know: any program; a real step reads more.

Each needed weight, scale and cache entry counts once, with one exception: the head is read by the drafter and
again behind the target, and no second-level cache keeps a gigabyte in between. Every figure says where it comes
from: `published` (configuration or data sheet), `measured` (on a device), `given` (by the caller) or `modelled`.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.inventory import Parameter, parameters
from v4flash.config import LayerConfig, ModelConfig
from v4flash.profile.targets import MEASURED, Target

PUBLISHED, GIVEN, MODELLED = "published", "given", "modelled"
UNIFORM, CORRELATED = "uniform", "correlated"
# Popularity exponent of experts and the chance that a row repeats an expert of the row before; they put the
# distinct experts of six V4-Flash rows at 25, between public measurements of 22 and 30.
POPULARITY, REPEATED = 0.70, 0.25
_SAMPLES, _SEED = 2000, 0
_GROUPS = {
    "engram": "engram", "indexer": "indexer", "compressor": "compressor", "attn": "attention",
    "gate": "router", "shared_experts": "shared expert", "hc_attn": "hyper-connections",
    "hc_ffn": "hyper-connections", "hc_head": "hyper-connections", "head": "head", "embed": "embedding",
    "token_map": "engram",
}  # fmt: skip
# What the drafter runs even where nothing is drafted: context rows of the committed tokens.
_COMMITTED = {"main_proj", "main_norm", "wkv", "kv_norm"}


@dataclasses.dataclass(frozen=True)
class Routing:
    """Different experts that the rows of a pass choose per layer: the target's pass, and the drafter's block.

    `label` says where the numbers come from, `model` how they were modelled.
    """

    target: float
    draft: float
    label: str
    model: str


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes read per step by one part of the model, and the label of the weakest figure in it."""

    name: str
    bytes: float
    label: str


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least that one step reads.

    Attributes:
      k, context: drafts per step, committed positions.
      routing: the experts assumed.
      parts: by part of the model.
    """

    k: int
    context: int
    routing: Routing
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    def milliseconds(self, bandwidth: float) -> float:
        """Time of the bytes at `bandwidth` bytes/s; modelled, whatever the bandwidth is."""
        return 1e3 * self.bytes / bandwidth

    def to_json(self, target: Target) -> dict[str, Any]:
        """The figures with their labels, and the times on a target."""
        rates = {PUBLISHED: target.bandwidth, MEASURED: target.measured_bandwidth}
        return {
            "k": self.k,
            "context": self.context,
            "routing": dataclasses.asdict(self.routing),
            "bytes": round(self.bytes),
            "parts": [dataclasses.asdict(part) | {"bytes": round(part.bytes)} for part in self.parts],
            "times": [
                {"bandwidth": rate, "bandwidth_label": label, "milliseconds": self.milliseconds(rate)}
                for label, rate in rates.items()
                if rate
            ],
        }


def floor(config: ModelConfig, k: int, context: int, routing: Routing | str = UNIFORM) -> Floor:
    """The least bytes of one step with `k` drafts behind `context` committed positions.

    `routing` is a model of the experts' choice ('uniform', 'correlated') or given numbers.
    """
    if isinstance(routing, str):
        routing = modelled_routing(config, k, routing)
    read: collections.Counter[str] = collections.Counter()
    for parameter in parameters(config):
        read[part_of(parameter)] += _read(parameter, config, k, routing)
    caches = _cache_bytes(config, k + 1, context)
    labels = {"experts": routing.label, "drafter experts": routing.label, "cache": MODELLED}
    read["cache"] = caches
    parts = [Part(name, size, labels.get(name, PUBLISHED)) for name, size in read.items() if size]
    return Floor(k, context, routing, tuple(sorted(parts, key=lambda part: -part.bytes)))


def modelled_routing(config: ModelConfig, k: int, model: str) -> Routing:
    """Distinct experts by a model of their choice."""
    count = {UNIFORM: uniform_experts, CORRELATED: correlated_experts}[model]
    draft = config.draft
    drafted = count(draft.n_routed_experts, draft.num_experts_per_tok, k) if draft and k else 0.0
    target = count(config.n_routed_experts, config.num_experts_per_tok, k + 1)
    return Routing(target, drafted, MODELLED, model)


def uniform_experts(experts: int, chosen: int, rows: int) -> float:
    """Expected distinct experts when every row draws its `chosen` ones evenly: E (1 - (1 - K/E)^T)."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def correlated_experts(experts: int, chosen: int, rows: int, popular: int | None = None) -> float:
    """Expected distinct experts when some are popular and rows resemble the row before, by seeded sampling.

    `popular` counts only those among that many most popular ones.
    """
    seen = np.zeros((_SAMPLES, experts), bool)
    for row in _correlated_rows(experts, chosen, rows):
        np.put_along_axis(seen, row, True, axis=1)
    return float(seen[:, :popular].sum() / _SAMPLES)


def correlated_share(experts: int, chosen: int, rows: int, popular: int) -> float:
    """Share of the same rows' routes that go to the `popular` most popular experts."""
    return float(np.mean([row < popular for row in _correlated_rows(experts, chosen, rows)]))


def _correlated_rows(experts: int, chosen: int, rows: int) -> Iterator[np.ndarray]:
    """Row after row, the experts it chose in every sample, the most popular one being 0: int [samples, K]."""
    random = np.random.default_rng(_SEED)
    popularity = -POPULARITY * np.log(np.arange(1, experts + 1))
    before = None
    for _ in range(rows):
        scores = popularity + random.gumbel(size=(_SAMPLES, experts))
        if before is not None:
            kept = np.take_along_axis(scores, before, axis=1)
            kept[random.random(kept.shape) < REPEATED] = np.inf
            np.put_along_axis(scores, before, kept, axis=1)
        before = np.argpartition(-scores, chosen - 1, axis=1)[:, :chosen]
        yield before


def stored_bytes(parameter: Parameter) -> int:
    """Bytes of a parameter in its published type."""
    return math.prod(parameter.shape) * jnp.dtype(parameter.dtype).itemsize


def part_of(parameter: Parameter) -> str:
    """The part of the model a parameter is counted under."""
    path = parameter.path
    if "experts" in path:
        return "drafter experts" if path[0] == "drafter" else "experts"
    if path[0] == "drafter":
        return "drafter"
    # The indexer may own a compressor, both stand inside attention, and the memory has an embedding.
    named = (group for part, group in _GROUPS.items() if part in path)
    return next(named, "norms")


def _read(parameter: Parameter, config: ModelConfig, k: int, routing: Routing) -> float:
    """Bytes of one parameter that a step reads."""
    path, size, rows = parameter.path, stored_bytes(parameter), k + 1
    drafts = path[0] == "drafter"
    if drafts and not k and not _COMMITTED & set(path):
        return 0
    per_row = size / parameter.shape[0]
    if "experts" in path:
        return per_row * (routing.draft if drafts else routing.target)
    if path == ("backbone", "head"):
        return size * (2 if k and config.draft else 1)
    if path == ("backbone", "embed"):
        return per_row * (rows + (1 if k else 0))
    if path[-1] == "token_map":
        return per_row * rows * config.engram.max_ngram_size
    if path[-1] == "tid2eid":
        return per_row * rows
    if path[-3:-1] == ("engram", "embed"):
        return per_row * rows * config.engram.columns
    if path[-2:] == ("markov_head", "embed"):
        return per_row * k
    return size


def _cache_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """Bytes of cached rows that a pass reads, bfloat16, when all its rows choose the same entries."""
    width = config.head_dim * jnp.dtype(jnp.bfloat16).itemsize
    window = min(config.sliding_window, context)
    total = width * window * len(config.layers)
    total += sum(_entries(config, layer, context) * width for layer in config.layers if layer.ratio)
    keys = sum(_keys(config, layer, context) for layer in config.layers if layer.owns_indexer)
    total += keys * config.index_head_dim * jnp.dtype(jnp.bfloat16).itemsize
    if config.draft and rows > 1:
        total += width * window * config.draft.stages
    return total


def _entries(config: ModelConfig, layer: LayerConfig, context: int) -> int:
    """Compressed entries that a layer attends to."""
    visible = context // layer.ratio
    return visible if layer.index_source is None else min(visible, config.index_topk)


def _keys(config: ModelConfig, layer: LayerConfig, context: int) -> int:
    """Index keys that a layer scores."""
    visible = context // layer.ratio
    if layer.candidate == "member":
        return min(visible, config.candidate_topk_blocks * config.candidate_block_size)
    return visible
