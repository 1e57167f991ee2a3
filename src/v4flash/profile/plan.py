"""Where the weights of a configuration would lie on the memories of a machine, and what a step would cost there.

Knows: bytes of every part, how many hot experts a first device holds beside the rest, and how many cold ones a step is
expected to meet. Does not know: any device that is there, or how experts are moved; nothing is loaded or measured.

The first device keeps everything but the cold experts, and slots for some of them where these lie in a host's memory;
n-gram tables, of which a step reads a few hundred rows, go to the host's memory where there is one behind it. Experts
are hot in the order of their counts over real text where such statistics are given, judged on texts that did not decide
the order, and else by a modelled popularity.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax

from pallas_kernels.bench_case import tree_bytes
from v4flash.config import ModelConfig
from v4flash.engine.programs import Shapes, new_state
from v4flash.errors import CapacityError, UsageError
from v4flash.placement.cache import SPARE
from v4flash.placement.statistics import RoutingStatistics
from v4flash.profile import floor as floors
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.profile.floor import (
    CORRELATED,
    MEASURED,
    MODELLED,
    PUBLISHED,
    Routing,
    correlated_experts,
    correlated_share,
    modelled_routing,
)
from v4flash.profile.machines import GIB, Figure, Machine, Memory

SCHEMA = "v4flash.plan/2"
RESERVED = 2 * GIB  # of each memory: program, temporaries, driver (modelled)
ROWS, CHUNK = 8, 128
TABLES, EXPERTS, STATE, SLOTS = "n-gram tables", "experts", "state", "slots for cold experts"


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the rows of a step choose experts.

    Attributes:
      distinct, cold: different experts a layer, and how many of them are cold.
      share: of the routes, those to cold experts.
      label, source: what these figures are worth.
    """

    distinct: float
    cold: float
    share: float
    label: str
    source: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What lies where, and what a step costs.

    Attributes:
      k, context: drafts per step, positions kept.
      parts: bytes on the first device by part, hot experts apart.
      tables: bytes of n-gram tables, and on which memory they lie if they are not among `parts`.
      expert: bytes of one routed expert.
      experts, layers: routed experts a layer, and layers.
      hot: experts a layer on the first device.
      choice: experts that a step chooses.
      least_bytes: that a step reads, wherever they lie.
    """

    k: int
    context: int
    parts: dict[str, int]
    tables: tuple[int, int]
    expert: int
    experts: int
    layers: int
    hot: int
    choice: Choice
    least_bytes: float

    @property
    def first_bytes(self) -> int:
        """Bytes used on the first device."""
        return sum(self.parts.values()) + self.hot * self.layers * self.expert

    def bytes_behind(self, memory: int) -> int:
        """Bytes used on the second (1) or third (2) memory."""
        tables, place = self.tables
        cold = (self.experts - self.hot) * self.layers * self.expert if memory == 1 else 0
        return cold + (tables if place == memory else 0)

    @property
    def cold_bytes(self) -> float:
        """Bytes of cold experts that a step meets."""
        return self.choice.cold * self.layers * self.expert


def plan(
    config: ModelConfig, machine: Machine, context: int, k: int, counted: RoutingStatistics | None = None
) -> Plan:
    """The plan with as many hot experts as fit; `counted`, statistics of this configuration's routes.

    Raises CapacityError that says what is short by how much, UsageError for a context or k that the model has not, or
    for statistics of texts shorter than a step.
    """
    limit = config.max_position_embeddings
    if not config.sliding_window <= context <= limit:
        raise UsageError(f"context is {context}, expected {config.sliding_window} to {limit}")
    if not 0 <= k < ROWS:
        raise UsageError(f"k is {k}, expected 0 to {ROWS - 1}")
    placed = _placed(config, machine.memories, context)
    choice = _counted(counted, k, placed["hot"]) if counted else _modelled(config, k, placed["hot"])
    drafted = modelled_routing(config, k, CORRELATED).draft
    least = floors.floor(config, k, context, Routing(choice.distinct, drafted, choice.label, choice.source))
    return Plan(k, context, choice=choice, least_bytes=least.bytes, **placed)


def _modelled(config: ModelConfig, k: int, hot: int) -> Choice:
    sizes = config.n_routed_experts, config.num_experts_per_tok, k + 1
    distinct = correlated_experts(*sizes)
    cold = distinct - correlated_experts(*sizes, popular=hot)
    share = 1 - correlated_share(*sizes, popular=hot)
    return Choice(distinct, cold, share, MODELLED, "a popularity and repetition as public counts have them")


def _counted(counted: RoutingStatistics, k: int, hot: int) -> Choice:
    judged, cold = counted.judged, ~counted.hot(hot)
    if not judged.groups[k]:
        raise UsageError(f"the statistics are of texts shorter than {k + 1} rows; profile longer ones")
    said = "out of sample" if counted.judge else "in sample, for a single text was counted"
    return Choice(
        judged.distinct(k + 1),
        judged.distinct(k + 1, cold),
        judged.share(cold),
        MEASURED,
        f"{judged.rows:,} rows of text, {said}",
    )


def _placed(config: ModelConfig, memories: tuple[Memory, ...], context: int) -> dict[str, Any]:
    """The fields of a Plan that say what lies where. Raises CapacityError where something finds no place."""
    parts, routed, tables = _weights(config)
    parts = dict(parts)
    behind = [place for place, memory in enumerate(memories) if memory.host and place]
    place = behind[0] if tables and behind else 0
    if tables and not place:
        parts[TABLES] = tables
    parts[STATE] = _state(config, context)
    experts, layers, chosen = config.n_routed_experts, config.num_hidden_layers, config.num_experts_per_tok
    expert, beside = routed // (experts * layers), sum(parts.values())
    hot, spare = min(experts, int((memories[0].size - RESERVED - beside) // (layers * expert))), 0
    if hot < experts and all(memory.host for memory in memories[1:]):
        spare = min(SPARE, experts - chosen)
        hot -= spare
        parts[SLOTS] = spare * layers * expert
    if hot < chosen:
        least = (chosen + spare) * layers * expert
        short, slots = beside + least + RESERVED - memories[0].size, f" and {spare} slots" if spare else ""
        raise CapacityError(
            f"the first device is {_gib(short)} GiB short: {_gib(beside)} GiB beside the experts, "
            f"{_gib(least)} for {chosen} experts{slots} a layer, {_gib(RESERVED)} kept free, and it has "
            f"{_gib(memories[0].size)}{_hint(parts, short)}"
        )
    needed = (experts - hot) * layers * expert + (tables if place == 1 else 0)
    room = memories[1].size - RESERVED if len(memories) > 1 else 0.0
    if needed > room:
        beyond = "the second memory has" if len(memories) > 1 else "there is no second memory:"
        held = experts - math.ceil((needed - room) / (layers * expert))
        both = hot + max(0, int((room - beside) // (layers * expert)))
        paired = (
            f" ({both} with --experts peer, where it holds the rest too)"
            if room and not memories[1].host
            else ""
        )
        raise CapacityError(
            f"{_gib(needed - room)} GiB find no place: {hot} of {experts} experts a layer fit the first device, "
            f"the rest {'and the n-gram tables ' if place == 1 else ''}take {_gib(needed)} GiB, {beyond} {_gib(room)} "
            f"to give, so {max(held, 0)} experts a layer have a place{paired}; a second memory of "
            f"{_gib(needed + RESERVED)} GiB would do"
        )
    if place == 2 and tables > memories[2].size - RESERVED:
        raise CapacityError(
            f"{_gib(tables + RESERVED - memories[2].size)} GiB find no place: the n-gram tables take {_gib(tables)} "
            f"GiB, the host's memory has {_gib(memories[2].size - RESERVED)} to give"
        )
    return dict(parts=parts, tables=(tables, place), expert=expert, experts=experts, layers=layers, hot=hot)


def largest_context(config: ModelConfig, machine: Machine) -> int:
    """The longest context, in steps of 1,024, that this machine has a plan for; some plan must exist."""
    low, high = 0, config.max_position_embeddings // 1024
    while low < high:
        middle = (low + high + 1) // 2
        try:
            _placed(config, machine.memories, middle * 1024)
            low = middle
        except CapacityError:
            high = middle - 1
    return low * 1024


def document(
    name: str,
    config: ModelConfig,
    machine: Machine,
    context: int,
    k: int,
    counted: RoutingStatistics | None = None,
) -> dict[str, Any]:
    """The plan as JSON, every figure with the label of its weakest part."""
    found = plan(config, machine, context, k, counted)
    choice, chosen = found.choice, (k + 1) * config.num_experts_per_tok * found.layers
    return {
        "schema": SCHEMA,
        "config": name,
        "machine": machine.about,
        "k": k,
        "context": context,
        "largest_context": largest_context(config, machine),
        "memories": [
            {"name": memory.name, "host": memory.host, **_shown(memory.bytes, "bytes")}
            for memory in machine.memories
        ],
        "parts": [
            {"name": part, "bytes": size, "label": MODELLED if part == STATE else PUBLISHED}
            for part, size in sorted(found.parts.items(), key=lambda item: -item[1])
        ],
        "n_gram_tables": {"bytes": found.tables[0], "memory": found.tables[1], "label": PUBLISHED},
        "expert": {"bytes": found.expert, "label": PUBLISHED},
        "experts": found.experts,
        "hot_experts": found.hot,
        "first_bytes": found.first_bytes,
        "second_bytes": found.bytes_behind(1),
        "third_bytes": found.bytes_behind(2),
        "reserved": {"bytes": RESERVED, "label": MODELLED},
        "routing": {"label": choice.label, "source": choice.source},
        "distinct_experts": {"value": round(choice.distinct, 2), "label": choice.label},
        "cold_experts": {
            "value": round(choice.cold, 3),
            "bytes": round(found.cold_bytes),
            "label": choice.label,
        },
        "cold_routes": {
            "value": round(choice.share * chosen, 1),
            "share": round(choice.share, 5),
            "label": choice.label,
        },
        "step_bytes": {"value": round(found.least_bytes), "label": MODELLED},
        "rates": _rates(machine),
        "floors": _floors(found, machine),
    }


def _rates(machine: Machine) -> dict[str, Any]:
    """The rates that the floors are made of."""
    first, *behind = machine.memories
    rates = {"memory": _shown(first.bandwidth, "bytes_per_second")}
    if behind and behind[0].host:
        rates["host_link"] = _shown(machine.fetch, "bytes_per_second")
    elif behind:
        rates["second_memory"] = _shown(behind[0].bandwidth, "bytes_per_second")
        rates["exchange"] = _shown(machine.exchange, "seconds_per_layer")
    return rates


def _floors(found: Plan, machine: Machine) -> list[dict[str, Any]]:
    """Times of a step without the link between the memories, and with it."""
    first, *behind = machine.memories
    bandwidth = first.bandwidth.value
    times = [_time("every expert on one device", found.least_bytes / bandwidth)]
    if found.hot == found.experts:
        return times
    near = (found.least_bytes - found.cold_bytes) / bandwidth
    if behind[0].host:
        fetched = near + found.cold_bytes / machine.fetch.value
        return [*times, _time("cold experts fetched one after another", fetched)]
    far = max(near, found.cold_bytes / behind[0].bandwidth.value) + found.layers * machine.exchange.value
    return [*times, _time("cold experts computed on the second device", far)]


def _shown(figure: Figure, name: str) -> dict[str, Any]:
    return {name: figure.value, "label": figure.label, "source": figure.source}


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


def _hint(parts: dict[str, int], short: float) -> str:
    """What would help where the first device does not hold the rest, if anything but a larger one does."""
    if TABLES in parts:
        wanted = -(-(parts[TABLES] + RESERVED) // GIB)
        return (
            f"; a host's memory would take the {_gib(parts[TABLES])} GiB of n-gram tables (add {wanted}h or more to "
            "--devices)"
        )
    if parts[STATE] > short:
        return f"; {_gib(parts[STATE])} GiB of it are state, which a smaller --ctx shrinks"
    return ""
