"""The compiler's list of launches as a tree, and the order in which a step runs it.

Knows: the indentation of XLA's thunk dump, which kinds are kernels, copies or frames around others, and how
often a loop's body runs. Does not know: HLO beyond the trip counts it is given.

    000: kCommandBuffer               one graph launch
        004: kCustomKernel ...        a kernel inside it
    092: kWhile                       a loop driven by the host
    condition:
        093: kCustomKernel ...        not run where the number of trips is known
      body:
        094: kCustomKernel ...
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

_LAUNCH = re.compile(r"^( *)(\d+): (k\w+)")
_LABEL = re.compile(r"^( *)(condition|body|true_branch|false_branch|branch_\d+):\s*$")
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s*(?:thunk_id: (\d+))?')
COMMAND_BUFFER, WHILE, CONDITIONAL = "kCommandBuffer", "kWhile", "kConditional"
SLICED, APART = "kDynamicSliceFusion", "kAsyncStart"  # frames of launches: operands in slices, a stream apart
_WRAPPERS = {SLICED, APART}
CONDITION = "condition"
_FRAMES = {COMMAND_BUFFER, WHILE, CONDITIONAL, "kSequential", APART, SLICED}
_SILENT = {"kAsyncDone", "kWaitForStreams"}
_COPIES = {"kCopy"}
_MEMSETS = {"kMemzero", "kMemset32BitValue"}
_COLLECTIVES = {"kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll", "kCollectivePermute"}


@dataclasses.dataclass
class Thunk:
    """One entry of the list.

    Attributes:
      kind: XLA's kind, such as kCustomKernel.
      name: the HLO instruction it comes from, or an empty text.
      owner: the frame of a single launch that it stands in (sliced operands, its own stream), if any.
      parts: what it encloses, by label; '' where the list gives none.
    """

    kind: str
    name: str
    owner: "Thunk | None" = dataclasses.field(default=None, repr=False, compare=False)
    parts: dict[str, list["Thunk"]] = dataclasses.field(default_factory=dict)

    @property
    def role(self) -> str:
        """'kernel', 'copy', 'memset', 'collective', 'frame' (encloses others) or 'silent' (launches nothing)."""
        if self.kind in _FRAMES and (self.parts or self.kind != SLICED):
            return "frame"
        groups = {"silent": _SILENT, "copy": _COPIES, "memset": _MEMSETS, "collective": _COLLECTIVES}
        return next((role for role, kinds in groups.items() if self.kind in kinds), "kernel")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, copy, memset or collective in the order of a step.

    Attributes:
      thunk: what is launched.
      times: how often per step.
      inside: names of the loops and conditionals it stands in, outermost first.
    """

    thunk: Thunk
    times: int
    inside: tuple[str, ...]


def parse(text: str, names: str) -> list[Thunk]:
    """The tree of a thunk dump; `names` is the text of the metadata beside it."""
    named = {int(number): name for name, number in _NAMED.findall(names) if number}
    top: list[Thunk] = []
    enclosing: list[tuple[int, Thunk]] = []
    for line in text.splitlines():
        launch, heading = _LAUNCH.match(line), _LABEL.match(line)
        if launch:
            thunk, indent = Thunk(launch[3], named.get(int(launch[2]), "")), len(launch[1])
            _close(enclosing, indent)
            if enclosing:
                parent = enclosing[-1][1]
                thunk.owner = parent if parent.kind in _WRAPPERS else None
                parent.parts.setdefault(next(reversed(parent.parts), ""), []).append(thunk)
            else:
                top.append(thunk)
            enclosing.append((indent, thunk))
        elif heading:
            # The heading of a condition stands at the margin, whatever its loop's indentation.
            if heading[2] != CONDITION:
                _close(enclosing, len(heading[1]))
            enclosing[-1][1].parts[heading[2]] = []
    return top


def _close(enclosing: list[tuple[int, Thunk]], indent: int) -> None:
    """Drops the entries that a line of this indentation does not stand inside."""
    while enclosing and enclosing[-1][0] >= indent:
        enclosing.pop()


def walk(
    thunks: Sequence[Thunk],
    trips: Callable[[str], int | None],
    place: Callable[[str], int] = lambda name: -1,
    *,
    times: int = 1,
    inside: tuple[str, ...] = (),
) -> Iterator[Launch]:
    """The launches of one step in order.

    A loop's launches carry its number of trips (1 where that is unknown); of a conditional's branches the one runs that
    stands at `place` of its name when the fewest kernels come first: the last and longest, if nothing else is said.
    """
    for thunk in thunks:
        if thunk.role != "frame":
            if thunk.role != "silent":
                yield Launch(thunk, times, inside)
            continue
        within = (*inside, thunk.name) if thunk.kind in (WHILE, CONDITIONAL) else inside
        runs = [
            list(walk(part, trips, place, times=times * repeats, inside=within))
            for part, repeats in _repeated(thunk, trips)
        ]
        if thunk.kind == CONDITIONAL:
            yield from sorted(runs, key=kernels)[place(thunk.name)] if runs else []
        else:
            yield from itertools.chain(*runs)


def _repeated(thunk: Thunk, trips: Callable[[str], int | None]) -> Iterator[tuple[list[Thunk], int]]:
    """The parts of a frame that run, and how often; a counted loop does not run its condition."""
    known = trips(thunk.name) if thunk.kind == WHILE else None
    for label, part in thunk.parts.items():
        if label != CONDITION or known is None:
            yield part, 1 if known is None else known


def kernels(launches: Sequence[Launch]) -> int:
    """How many of the launches are kernels, repetitions counted."""
    return sum(launch.times for launch in launches if launch.thunk.role == "kernel")


def every(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    """All entries of the tree, each once."""
    for thunk in thunks:
        yield thunk
        for part in thunk.parts.values():
            yield from every(part)


def graph_cuts(thunks: Sequence[Thunk]) -> int:
    """Places of the program where the host must act between two graphs or launches outside them.

    A program that is one command buffer has none.
    """
    segments = list(_segments(thunks))
    merged = [s for s, before in zip(segments, [None, *segments], strict=False) if s or s != before]
    return max(len(merged) - 1, 0)


def _segments(thunks: Sequence[Thunk]) -> Iterator[bool]:
    """True for a command buffer, False for a launch outside one, in the order of the text."""
    for thunk in thunks:
        if thunk.kind == COMMAND_BUFFER:
            yield True
        elif thunk.role == "frame":
            for part in thunk.parts.values():
                yield from _segments(part)
        elif thunk.role != "silent":
            yield False


def host_launches(thunks: Sequence[Thunk], trips: Callable[[str], int | None]) -> int:
    """What the host launches per step: command buffers, and whatever stands outside them."""
    total = 0
    for thunk in thunks:
        if thunk.kind == COMMAND_BUFFER or thunk.role not in ("frame", "silent"):
            total += 1
        elif thunk.kind == CONDITIONAL:
            total += max((host_launches(part, trips) for part in thunk.parts.values()), default=0)
        elif thunk.role == "frame":
            total += sum(repeats * host_launches(part, trips) for part, repeats in _repeated(thunk, trips))
    return total
