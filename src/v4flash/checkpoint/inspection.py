"""What a checkpoint is, without loading it: family, sizes, drafter, and what is missing.

Knows: configurations, headers and manifests. Does not know: values of weights.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from v4flash.checkpoint import names, orbax_store, published
from v4flash.checkpoint.inventory import inventory, is_ignored, parameters
from v4flash.checkpoint.shards import CheckpointFiles, listed
from v4flash.config import ModelConfig

SCHEMA_VERSION = 1
COMPONENTS = (
    "embedding_and_head",
    "attention",
    "compressors_and_indexers",
    "routed_experts",
    "shared_experts",
    "router",
    "hyper_connections",
    "engram",
    "drafter",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The facts about one checkpoint or configuration.

    Attributes:
      path: what was inspected.
      source: 'config' (no weights seen), 'published' (safetensors) or 'orbax' (converted).
      family: deepseek_v4 or deepseek_v41.
      dimensions: the configuration's main numbers.
      components: bytes of each part of the model, in the order of COMPONENTS.
      tensors: how many tensors there are (arrays, in a converted folder).
      data_bytes: their bytes, headers not counted.
      drafter: stages, block_size, trained_k (drafts it was trained for), markov_rank; None without a drafter.
      missing, unexpected, mismatched: what loading would refuse; empty for a mere configuration.
      shards: name, tensors and data_bytes of each file.
    """

    path: str
    source: str
    family: str
    dimensions: dict[str, Any]
    components: dict[str, int]
    tensors: int
    data_bytes: int
    drafter: dict[str, Any] | None
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    shards: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with its schema version."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}

    def as_text(self) -> str:
        """The same facts for a terminal."""
        size = self.dimensions
        lines = [
            f"{self.path}",
            f"  {self.family}, {size['layers']} layers of width {size['hidden_size']:,}, "
            f"{size['experts']} experts ({size['experts_per_token']} a token), "
            f"vocabulary {size['vocab_size']:,}",
            f"  {self.tensors:,} tensors, {self.data_bytes:,} bytes ({self.data_bytes / 1e9:.2f} GB)"
            + ("" if self.source != "config" else ", from the configuration alone"),
            f"  drafter: {self._drafter_text()}",
        ]
        lines += [
            f"  {name.replace('_', ' '):<26}{count:>20,}" for name, count in self.components.items() if count
        ]
        lines += [
            f"  {shard['name']:<40}{shard['tensors']:>8,} tensors{shard['data_bytes']:>18,} bytes"
            for shard in self.shards
        ]
        for label in ("missing", "unexpected", "mismatched"):
            if found := getattr(self, label):
                lines.append(f"  {label}: {len(found):,} ({listed(found)})")
        return "\n".join(lines)

    def _drafter_text(self) -> str:
        if self.drafter is None:
            return "none"
        return (
            f"{self.drafter['stages']} stages, block of {self.drafter['block_size']}, trained for "
            f"k={self.drafter['trained_k']}, Markov rank {self.drafter['markov_rank']}"
        )


def inspect(path: str | Path) -> Inspection:
    """Looks at a checkpoint folder (published or converted), one .safetensors file, or a configuration file.

    Only headers are read. Raises CheckpointError for damage, missing shards and unknown configurations.
    Tensors that are merely absent, unexpected or of another shape are listed in the result.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        config = ModelConfig.from_file(path)
        sizes = [(tensor.name, tensor.nbytes) for tensor in inventory(config).values()]
        return _inspection(path, "config", config, sizes)
    if orbax_store.is_store(path):
        store = orbax_store.Store.open(path)
        return _inspection(path, "orbax", store.config, _stored_sizes(store.config))
    files = CheckpointFiles.open(path)
    config = ModelConfig.from_file(files.directory)
    result = published.compare(files, config, config)
    return _inspection(
        path,
        "published",
        config,
        [(info.name, info.nbytes) for info in files.tensors.values()],
        missing=result.missing,
        unexpected=result.unexpected,
        mismatched=result.wrong,
        shards=[
            {
                "name": name,
                "tensors": len(shard.tensors),
                "data_bytes": sum(info.nbytes for info in shard.tensors.values()),
            }
            for name, shard in files.shards.items()
        ],
    )


def _stored_sizes(config: ModelConfig) -> list[tuple[str, int]]:
    """(a published name, bytes) of each array of a converted folder."""
    return [
        (
            parameter.published[0].name if parameter.published else parameter.path[-1],
            math.prod(parameter.shape) * np.dtype(parameter.dtype).itemsize,
        )
        for parameter in parameters(config)
    ]


def component_of(name: str, config: ModelConfig) -> str:
    """The part of the model, one of COMPONENTS, that a published tensor belongs to."""
    if name.startswith("mtp."):
        return "drafter" if config.draft else "other"
    if is_ignored(name, config):
        return "other"
    parts = set(names.parameter_of(name, config.family)[0])
    if "engram" in parts or "token_map" in parts:
        return "engram"
    if parts & {"embed", "head"}:
        return "embedding_and_head"
    if parts & {"compressor", "indexer"}:
        return "compressors_and_indexers"
    for part, component in (
        ("attn", "attention"),
        ("shared_experts", "shared_experts"),
        ("experts", "routed_experts"),
        ("gate", "router"),
    ):
        if part in parts:
            return component
    return "hyper_connections" if parts & {"hc_attn", "hc_ffn", "hc_head"} else "other"


def _inspection(
    path: Path, source: str, config: ModelConfig, sizes: Iterable[tuple[str, int]], **found: list
) -> Inspection:
    totals: Counter[str] = Counter()
    for name, nbytes in sizes:
        totals[component_of(name, config)] += nbytes
    return Inspection(
        path=str(path),
        source=source,
        family=config.family,
        dimensions=_dimensions(config),
        components={name: totals[name] for name in COMPONENTS},
        tensors=len(sizes),
        data_bytes=totals.total(),
        drafter=_drafter(config),
        **{"missing": [], "unexpected": [], "mismatched": [], "shards": [], **found},
    )


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_width": config.moe_intermediate_size,
        "expert_dtype": config.expert_dtype,
        "weight_block": config.weight_block_size,
        "vocab_size": config.vocab_size,
        "sliding_window": config.sliding_window,
        "index_topk": config.index_topk,
        "max_positions": config.max_position_embeddings,
    }


def _drafter(config: ModelConfig) -> dict[str, Any] | None:
    draft = config.draft
    if draft is None:
        return None
    return {
        "stages": draft.stages,
        "block_size": draft.block_size,
        "trained_k": draft.block_size,
        "markov_rank": draft.markov_rank,
        "experts": draft.n_routed_experts,
        "target_layers": list(draft.target_layer_ids),
    }
