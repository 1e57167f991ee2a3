"""The machines that a plan is made for: their memories, how fast those are read, and what stands between them.

Knows: the machine files in configs/devices and sizes given by hand. Does not know: any device that is there, or what a
plan makes of it.

A machine file lists one to three memories: the first device's, the second's, a host's behind two GPUs. Every figure has
a value, a label (measured, modelled, published or given) and a source. A figure stands in one place: a memory may be
that `of` another machine.
"""

import dataclasses
import json
import re
from typing import Any

from v4flash.errors import UsageError
from v4flash.profile import targets
from v4flash.profile.floor import GIVEN, MEASURED, MODELLED, PUBLISHED

SCHEMA = "v4flash.machine/1"
GIB = 1 << 30
LABELS = (MEASURED, MODELLED, PUBLISHED, GIVEN)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(h?)")
# Where the rates of memories come from whose sizes alone were given.
_USUAL, _USUAL_PAIR = "h200", "h200-x2"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number with what it is worth: one of LABELS, and where it comes from."""

    value: float
    label: str
    source: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """A GPU's memory, or a host's: bytes, and bytes/s at which its own processor reads it, where that is known."""

    name: str
    host: bool
    bytes: Figure
    bandwidth: Figure | None = None

    @property
    def size(self) -> float:
        return self.bytes.value


@dataclasses.dataclass(frozen=True)
class Machine:
    """Memories in the order in which a plan fills them.

    Attributes:
      about: what it is, in words.
      memories: the first device's, the second's if there is one, a host's behind two GPUs.
      fetch: bytes/s of experts fetched from the host's memory.
      exchange: seconds a layer in which two devices add their results.
    """

    about: str
    memories: tuple[Memory, ...]
    fetch: Figure | None = None
    exchange: Figure | None = None


def names() -> list[str]:
    """The machines that have a file."""
    return sorted(file.stem for file in targets.folder().glob("*.json"))


def machine(given: str) -> Machine:
    """The machine that a person means: the name of a file in configs/devices, or sizes like '139,128h'.

    Sizes are GiB, a GPU's first, h behind a host's; their rates are those measured on H200s. Raises UsageError for
    anything else, or for a file that lacks something.
    """
    if given in names():
        return _read(given)
    found = [_SIZE.fullmatch(part.strip()) for part in given.split(",")]
    hosts = [bool(match and match[2]) for match in found]
    if not all(found) or hosts not in ([False], [False, True], [False, False], [False, False, True]):
        raise UsageError(
            f"devices are {given!r}, expected memories in GiB, one or two GPUs' first, h behind a host's (139,128h), "
            f"or one of {', '.join(names())}"
        )
    if min(float(match[1]) for match in found) <= 0:
        raise UsageError(f"devices are {given!r}, expected sizes above 0")
    usual, pair = _read(_USUAL), _read(_USUAL_PAIR)
    memories = tuple(
        Memory(
            "host" if host else "GPU",
            host,
            Figure(float(match[1]) * GIB, GIVEN, "--devices"),
            None if host else usual.memories[0].bandwidth,
        )
        for match, host in zip(found, hosts, strict=True)
    )
    return Machine(f"memories of {given} GiB, read as an H200's", memories, usual.fetch, pair.exchange)


def _read(name: str) -> Machine:
    """The machine in a file. Raises UsageError that names the file and what is wrong with it."""
    file = targets.folder() / f"{name}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, expected {SCHEMA}")
        rates = {part: _figure(found[part]) for part in ("fetch", "exchange") if part in found}
        made = Machine(found["about"], tuple(map(_memory, found["memories"])), **rates)
        _check(made)
    except KeyError as error:
        raise UsageError(f"{file} lacks {error}; compare it with the other machine files") from None
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"{file} is no machine file ({error})") from None
    return made


def _memory(found: dict[str, Any]) -> Memory:
    if "of" in found:
        return _read(found["of"]).memories[found["memory"]]
    bandwidth = _figure(found["bandwidth"]) if "bandwidth" in found else None
    return Memory(found["name"], found.get("host", False), _figure(found["bytes"]), bandwidth)


def _figure(found: dict[str, Any]) -> Figure:
    made = Figure(float(found["value"]), found["label"], found["source"])
    if made.label not in LABELS or made.value <= 0 or not made.source:
        raise ValueError(
            f"figure {found}, expected a value above 0, one of {', '.join(LABELS)}, and a source"
        )
    return made


def _check(made: Machine) -> None:
    """Raises ValueError where a plan would miss something."""
    first, *behind = made.memories
    if len(behind) > 2 or (len(behind) == 2 and (behind[0].host or not behind[1].host)):
        raise ValueError("memories are not one or two devices' and then a host's")
    if first.bandwidth is None:
        raise ValueError("the first memory has no bandwidth")
    if behind and behind[0].host and made.fetch is None:
        raise ValueError("nothing says how fast experts are fetched from the host")
    if behind and not behind[0].host and None in (behind[0].bandwidth, made.exchange):
        raise ValueError("the second device lacks its bandwidth or the time of an exchange")
