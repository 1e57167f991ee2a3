"""Where the weights of a configuration would lie on one or two memories, and what a step would cost there.

Knows: bytes of every part, how many hot experts a first device holds beside the rest, and how many cold ones a step is
expected to meet. Does not know: any device that is there, or how experts are moved; nothing is loaded or measured.

The first device keeps everything but the cold experts; n-gram tables, of which a step reads a few hundred rows, go to
the host's memory where there is one. Experts are hot in the order of a modelled popularity (`correlated_experts`), so
that the share of cold ones is a model until routes of real text are counted.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax

from pallas_kernels.bench_case import tree_bytes
from v4flash.config import ModelConfig
from v4flash.engine.programs import Shapes, new_state
from v4flash.errors import CapacityError, UsageError
from v4flash.profile import floor as floors
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.profile.floor import CORRELATED, MEASURED, MODELLED, PUBLISHED, correlated_experts
from v4flash.profile.targets import MEASURED_BANDWIDTH

SCHEMA = "v4flash.plan/1"
GIB = 1 << 30
RESERVED = 2 * GIB  # of each memory: program, temporaries, driver (modelled)
HOST_LINK = (
    42e9  # bytes/s of experts fetched from pinned host memory, the lower of two measurements on an H200
)
EXCHANGE = 25e-6  # seconds a layer in which two GPUs of one program add their results, measured on two H200
ROWS, CHUNK = 8, 128
TABLES, EXPERTS, STATE = "n-gram tables", "experts", "state"
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)(h?)")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a GPU's memory, or of the host's."""

    size: float
    host: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What lies where, and what a step costs.

    Attributes:
      k, context: drafts per step, positions kept.
      parts: bytes on the first device by part, experts apart.
      tables: bytes of n-gram tables and whether they lie on the second memory.
      expert: bytes of one routed expert.
      experts, layers: routed experts a layer, and layers.
      hot: experts a layer on the first device.
      distinct, cold: different experts a layer that a step chooses, and how many of them are cold (modelled).
      least_bytes: that a step reads, wherever they lie.
    """

    k: int
    context: int
    parts: dict[str, int]
    tables: tuple[int, bool]
    expert: int
    experts: int
    layers: int
    hot: int
    distinct: float
    cold: float
    least_bytes: float

    @property
    def first_bytes(self) -> int:
        """Bytes used on the first device."""
        return sum(self.parts.values()) + self.hot * self.layers * self.expert

    @property
    def second_bytes(self) -> int:
        """Bytes used behind it."""
        tables, away = self.tables
        return (self.experts - self.hot) * self.layers * self.expert + (tables if away else 0)

    @property
    def cold_bytes(self) -> float:
        """Bytes of cold experts that a step meets."""
        return self.cold * self.layers * self.expert


def parse_memories(text: str) -> tuple[Memory, ...]:
    """'139,128h' as a GPU of 139 GiB and 128 GiB of the host's memory. Raises UsageError for anything else."""
    found = [_MEMORY.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found) or not 1 <= len(found) <= 2 or found[0][2]:
        raise UsageError(
            f"devices are {text!r}, expected one or two memories in GiB, a GPU's first, h behind a host's: 139,128h"
        )
    memories = tuple(Memory(float(match[1]) * GIB, bool(match[2])) for match in found)
    if min(memory.size for memory in memories) <= 0:
        raise UsageError(f"devices are {text!r}, expected sizes above 0")
    return memories


def plan(config: ModelConfig, memories: tuple[Memory, ...], context: int, k: int) -> Plan:
    """The plan with as many hot experts as fit.

    Raises CapacityError that says what is short by how much, UsageError for a context or k that the model has not.
    """
    limit = config.max_position_embeddings
    if not config.sliding_window <= context <= limit:
        raise UsageError(f"context is {context}, expected {config.sliding_window} to {limit}")
    if not 0 <= k < ROWS:
        raise UsageError(f"k is {k}, expected 0 to {ROWS - 1}")
    placed = _placed(config, memories, context)
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    distinct = correlated_experts(experts, chosen, k + 1)
    cold = distinct - correlated_experts(experts, chosen, k + 1, popular=placed["hot"])
    least = floors.floor(config, k, context, CORRELATED)
    return Plan(k, context, distinct=distinct, cold=cold, least_bytes=least.bytes, **placed)


def _placed(config: ModelConfig, memories: tuple[Memory, ...], context: int) -> dict[str, Any]:
    """The fields of a Plan that say what lies where. Raises CapacityError where something finds no place."""
    parts, routed, tables = _weights(config)
    parts = dict(parts)
    away = bool(tables) and len(memories) == 2 and memories[1].host
    if tables and not away:
        parts[TABLES] = tables
    parts[STATE] = _state(config, context)
    experts, layers, chosen = config.n_routed_experts, config.num_hidden_layers, config.num_experts_per_tok
    expert, beside = routed // (experts * layers), sum(parts.values())
    hot = min(experts, int((memories[0].size - RESERVED - beside) // (layers * expert)))
    if hot < chosen:
        short = beside + chosen * layers * expert + RESERVED - memories[0].size
        raise CapacityError(
            f"the first device is {_gib(short)} GiB short: {_gib(beside)} GiB beside the experts, "
            f"{_gib(chosen * layers * expert)} for {chosen} experts a layer, {_gib(RESERVED)} kept free, and it has "
            f"{_gib(memories[0].size)}{_hint(parts, memories, short)}"
        )
    needed = (experts - hot) * layers * expert + (tables if away else 0)
    room = memories[1].size - RESERVED if len(memories) == 2 else 0.0
    if needed > room:
        beyond = "the second memory has" if len(memories) == 2 else "there is no second memory:"
        raise CapacityError(
            f"{_gib(needed - room)} GiB find no place: {hot} of {experts} experts a layer fit the first device, "
            f"the rest {'and the n-gram tables ' if away else ''}take {_gib(needed)} GiB, {beyond} {_gib(room)} to "
            f"give; a second memory of {_gib(needed + RESERVED)} GiB would do"
        )
    return dict(parts=parts, tables=(tables, away), expert=expert, experts=experts, layers=layers, hot=hot)


def largest_context(config: ModelConfig, memories: tuple[Memory, ...]) -> int:
    """The longest context, in steps of 1,024, that these memories have a plan for; some plan must exist."""
    low, high = 0, config.max_position_embeddings // 1024
    while low < high:
        middle = (low + high + 1) // 2
        try:
            _placed(config, memories, middle * 1024)
            low = middle
        except CapacityError:
            high = middle - 1
    return low * 1024


def document(
    name: str, config: ModelConfig, memories: tuple[Memory, ...], context: int, k: int
) -> dict[str, Any]:
    """The plan as JSON, every figure with the label of its weakest part."""
    found = plan(config, memories, context, k)
    bandwidth = MEASURED_BANDWIDTH["h200"]
    times = [_time("every expert on one device", found.least_bytes / bandwidth)]
    if found.hot < found.experts:
        near = (found.least_bytes - found.cold_bytes) / bandwidth
        if memories[1].host:
            times.append(_time("cold experts fetched one after another", near + found.cold_bytes / HOST_LINK))
        else:
            far = max(near, found.cold_bytes / bandwidth)
            times.append(_time("cold experts computed on the second device", far + found.layers * EXCHANGE))
    return {
        "schema": SCHEMA,
        "config": name,
        "k": k,
        "context": context,
        "largest_context": largest_context(config, memories),
        "memories": [{"bytes": round(memory.size), "host": memory.host} for memory in memories],
        "parts": [
            {"name": part, "bytes": size, "label": MODELLED if part == STATE else PUBLISHED}
            for part, size in sorted(found.parts.items(), key=lambda item: -item[1])
        ],
        "n_gram_tables": {"bytes": found.tables[0], "on_second": found.tables[1], "label": PUBLISHED},
        "expert": {"bytes": found.expert, "label": PUBLISHED},
        "experts": found.experts,
        "hot_experts": found.hot,
        "first_bytes": found.first_bytes,
        "second_bytes": found.second_bytes,
        "reserved": {"bytes": RESERVED, "label": MODELLED},
        "distinct_experts": {"value": round(found.distinct, 2), "label": MODELLED},
        "cold_experts": {"value": round(found.cold, 3), "bytes": round(found.cold_bytes), "label": MODELLED},
        "step_bytes": {"value": round(found.least_bytes), "label": MODELLED},
        "rates": {
            "memory": {"bytes_per_second": bandwidth, "label": MEASURED},
            "host_link": {"bytes_per_second": HOST_LINK, "label": MEASURED},
            "exchange": {"seconds_per_layer": EXCHANGE, "label": MEASURED},
        },
        "floors": times,
    }


def _time(name: str, seconds: float) -> dict[str, Any]:
    return {"name": name, "milliseconds": round(1e3 * seconds, 3), "label": MODELLED}


@functools.cache
def _weights(config: ModelConfig) -> tuple[dict[str, int], int, int]:
    """Bytes by part but routed experts and n-gram tables, then of these two."""
    parts: collections.Counter[str] = collections.Counter()
    for parameter in floors.parameters(config):
        table = parameter.path[-3:-1] == ("engram", "embed")
        parts[TABLES if table else floors.part_of(parameter)] += floors.stored_bytes(parameter)
    routed, tables = parts.pop(EXPERTS), parts.pop(TABLES, 0)
    return dict(parts), routed, tables


def _state(config: ModelConfig, context: int) -> int:
    return tree_bytes(jax.eval_shape(lambda: new_state(config, REAL_NUMERICS, Shapes(ROWS, CHUNK, context))))


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


def _hint(parts: dict[str, int], memories: tuple[Memory, ...], short: float) -> str:
    """What would help where the first device does not hold the rest, if anything but a larger one does."""
    if TABLES in parts and not any(memory.host for memory in memories):
        return f"; a host's memory would take the {_gib(parts[TABLES])} GiB of n-gram tables (--devices 139,256h)"
    if parts[STATE] > short:
        return f"; {_gib(parts[STATE])} GiB of it are state, which a smaller --ctx shrinks"
    return ""
