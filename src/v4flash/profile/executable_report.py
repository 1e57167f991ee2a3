"""What a compiled step launches, copies and keeps: the figures behind a kernel budget.

Knows: which launches are kernels, the named scopes they come from, and how to tell a copied weight from a
product. Does not know: how the program was compiled (deviceless) or what a good figure is (docs/budgets).

A kernel of a fusion carries the scope of its last operation; one without any counts where the kernel before it
does. Loops count their trips, and of a conditional's branches the one with the most kernels counts.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from pallas_kernels import ptx_text
from pallas_kernels.launch import TARGET as TRITON_CALL
from v4flash.profile import hlo_text, thunk_text, triton_binaries
from v4flash.profile.deviceless import Compiled
from v4flash.profile.hlo_text import Instruction, Module
from v4flash.profile.triton_binaries import Binary

LARGE = 1_000_000  # bytes from which a weight counts
WEIGHTS, STATE = "params", "stream"  # names of the step's arguments
_SCOPE = re.compile(
    r"draft|choose|verify|reject|commit|layer_\d+|draft_stage_\d+|attention|ffn|engram|head|markov_chain"
)
_NUMBERED = re.compile(r"[_.]\d+(?=[/.]|$)")
NO_SCOPE, _DRAFTING = "step", "draft"
# An instruction with one of these computes something new from a weight; without, it moves or converts it.
_PRODUCTS = {"dot", "scaled-dot", "convolution", "reduce", "reduce-window", "sort", "topk", "custom-call"}


@dataclasses.dataclass(frozen=True)
class Moved:
    """A launch that writes a large array which it only moved or converted.

    Attributes:
      name: of the HLO instruction.
      arguments: the arguments that the bytes come from, at first or second hand.
      scope: named scope.
      bytes: written per launch.
      times: launches per step.
    """

    name: str
    arguments: tuple[str, ...]
    scope: str
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures of one program.

    Attributes:
      kernels: kernels in the program's text, each once.
      kernels_per_step: kernels launched per step; `kernels_at_least` with the shortest branches,
        drafting on (what a greedy step runs).
      copies_per_step, memsets_per_step: transfers within the device, and fills, that are no kernels.
      collectives_per_step: sums over devices, and whatever else waits for another device.
      command_buffers: graphs in the program's text.
      graph_cuts: places of the text where the host acts between graphs; 0 is one graph for the step.
      host_launches_per_step: graphs and single launches that the host issues.
      kernels_by_scope: per step, by named scope without control flow ("verify/layer_3/ffn").
      kernels_by_kind: per step, by emitter ("kLoop", "kInput", "__triton_nested_gemm_fusion", a Triton kernel's name).
      weight_copies: kernels that move or convert a large weight, or the result of such a kernel.
      state_copies: transfers of a large array of the decoding state.
      argument_leaves: arrays the program takes; `unused_leaves` were dropped by the compiler.
      aliased_bytes, state_bytes: outputs that stand in donated arguments, and what the state has.
      not_in_place: arrays of the state that no output takes over.
      argument_bytes, temp_bytes: memory.
      triton: Triton kernels of this project, assembled.
    """

    kernels: int
    kernels_per_step: int
    kernels_at_least: int
    copies_per_step: int
    memsets_per_step: int
    collectives_per_step: int
    command_buffers: int
    graph_cuts: int
    host_launches_per_step: int
    kernels_by_scope: dict[str, int]
    kernels_by_kind: dict[str, int]
    weight_copies: tuple[Moved, ...]
    state_copies: tuple[Moved, ...]
    argument_leaves: int
    unused_leaves: int
    aliased_bytes: int
    state_bytes: int
    not_in_place: tuple[str, ...]
    argument_bytes: int
    temp_bytes: int
    triton: tuple[Binary, ...]

    @property
    def kernels_by_part(self) -> dict[str, int]:
        """Kernels per step by scope with the layers of a kind added up ("verify/layer/ffn")."""
        parts: collections.Counter[str] = collections.Counter()
        for scope, count in self.kernels_by_scope.items():
            parts[_NUMBERED.sub("", scope)] += count
        return dict(parts.most_common())

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; moved arrays are added up over the layers of a kind."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("weight_copies", "state_copies"):
            moved = values[name]
            values[name] = sum(entry.times for entry in moved)
            values[f"{name}_bytes"] = sum(entry.bytes * entry.times for entry in moved)
            values[f"{name}_by_argument"] = _by_argument(moved)
        triton = values.pop("triton")
        values["triton_kernels"] = len(triton)
        values["spills"] = sum(binary.spilled > 0 for binary in triton)
        values["spilled_kernels"] = {binary.name: binary.spilled for binary in triton if binary.spilled}
        values["kernels_by_part"] = self.kernels_by_part
        return values


def _by_argument(moved: tuple[Moved, ...]) -> list[dict[str, Any]]:
    """Copies and their bytes per step by part and arguments, without layer numbers, the most bytes first."""
    sums: dict[tuple, list[int]] = {}
    for entry in moved:
        arguments = tuple(dict.fromkeys(_NUMBERED.sub("", name) for name in entry.arguments))
        total = sums.setdefault((_NUMBERED.sub("", entry.scope), arguments), [0, 0])
        total[0] += entry.times
        total[1] += entry.bytes * entry.times
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [
        {"part": part, "arguments": list(arguments), "copies": copies, "bytes": size}
        for (part, arguments), (copies, size) in ordered
    ]


def report(compiled: Compiled, state_bytes: int) -> Report:
    """Reads the figures out of a compiled step whose arguments are `params`, `stream` and others.

    Args: state_bytes, what the donated argument's arrays have together.
    """
    module = hlo_text.parse(compiled.hlo)
    thunks = thunk_text.parse(compiled.thunks, compiled.thunk_names)

    def trips(name: str) -> int | None:
        instruction = module.find(name)
        return instruction.trips if instruction else None

    def short(name: str) -> int:
        """The place of a conditional's shortest branch, or the next one where the shortest is not to draft."""
        instruction = module.find(name)
        return int(instruction is not None and scope_of(instruction.op_name) == _DRAFTING)

    launches = list(thunk_text.walk(thunks, trips))
    scopes = _scopes(module, launches)
    weights, state = _Arguments(module, WEIGHTS), _Arguments(module, STATE)
    by_scope: collections.Counter[str] = collections.Counter()
    by_kind: collections.Counter[str] = collections.Counter()
    by_role: collections.Counter[str] = collections.Counter()
    weight_copies, state_copies = [], []
    for launch, scope in zip(launches, scopes, strict=True):
        instruction, role = _instruction(module, launch.thunk), launch.thunk.role
        by_role[role] += launch.times
        if role == "kernel":
            by_scope[scope] += launch.times
            by_kind[_kind(module, launch.thunk, instruction)] += launch.times
        if instruction is None:
            continue
        arguments = weights.moved(instruction)
        if arguments:
            weight_copies.append(_moved(instruction, arguments, scope, launch.times))
        argument = state.argument(instruction.operands[0]) if role == "copy" else None
        if argument:
            state_copies.append(_moved(instruction, {argument}, scope, launch.times))
    return Report(
        kernels=sum(thunk.role == "kernel" for thunk in thunk_text.every(thunks)),
        kernels_per_step=by_role["kernel"],
        kernels_at_least=thunk_text.kernels(list(thunk_text.walk(thunks, trips, short))),
        copies_per_step=by_role["copy"],
        memsets_per_step=by_role["memset"],
        collectives_per_step=by_role["collective"],
        command_buffers=sum(t.kind == thunk_text.COMMAND_BUFFER for t in thunk_text.every(thunks)),
        graph_cuts=thunk_text.graph_cuts(thunks),
        host_launches_per_step=thunk_text.host_launches(thunks, trips),
        kernels_by_scope=dict(by_scope),
        kernels_by_kind=dict(by_kind.most_common()),
        weight_copies=tuple(weight_copies),
        state_copies=tuple(state_copies),
        argument_leaves=len(module.parameters),
        unused_leaves=compiled.leaves - len(module.parameters),
        aliased_bytes=compiled.aliased_bytes,
        state_bytes=state_bytes,
        not_in_place=tuple(
            parameter.argument
            for parameter in module.parameters
            if parameter.argument.startswith(f"{STATE}.") and parameter.number not in module.aliased
        ),
        argument_bytes=compiled.argument_bytes,
        temp_bytes=compiled.temp_bytes,
        triton=tuple(triton_binaries.assembled(_triton_kernels(module))),
    )


def kernels_in_order(compiled: Compiled) -> list[tuple[str, str]]:
    """(scope, name) of every kernel as the program runs them; a Triton kernel goes by its own name."""
    module = hlo_text.parse(compiled.hlo)
    launches = list(
        thunk_text.walk(thunk_text.parse(compiled.thunks, compiled.thunk_names), lambda name: None)
    )
    found = []
    for launch, scope in zip(launches, _scopes(module, launches), strict=True):
        if launch.thunk.role == "kernel":
            kind = _kind(module, launch.thunk, _instruction(module, launch.thunk))
            plain = kind.startswith("k") or not kind.isidentifier()
            found.append((scope, launch.thunk.name if plain else kind))
    return found


def scope_of(op_name: str) -> str:
    """The named scopes of this project in an operation's path, or an empty text."""
    return "/".join(part for part in op_name.split("/") if _SCOPE.fullmatch(part))


def _scopes(module: Module, launches: list[thunk_text.Launch]) -> list[str]:
    """The scope of each launch.

    JAX traces a loop's body once for all its callers, so inside a loop or branch the operations may carry another
    caller's path: what the loop itself says comes first.
    """

    def own(instruction: Instruction | None) -> str:
        if instruction is None or instruction.op_name:
            return scope_of(instruction.op_name) if instruction else ""
        # A launch with operands in slices has no path of its own: its slices and what it launches have.
        return next(filter(None, (scope_of(part.op_name) for part in module.operations(instruction))), "")

    found, last = [], NO_SCOPE
    for launch in launches:
        frame = ""
        for name in launch.inside:
            frame = _narrowed(frame, own(module.find(name)))
        last = _narrowed(frame, own(_instruction(module, launch.thunk))) or last
        found.append(last)
    return found


def _instruction(module: Module, thunk: thunk_text.Thunk) -> Instruction | None:
    """What a launch comes from: its own instruction, or that of the frame around it."""
    found = module.find(thunk.name)
    return _instruction(module, thunk.owner) if found is None and thunk.owner else found


def _narrowed(outer: str, inner: str) -> str:
    """The inner scope where it lies in the outer one, else the outer one."""
    return inner if not outer or f"{inner}/".startswith(f"{outer}/") else outer


def _kind(module: Module, thunk: thunk_text.Thunk, instruction: Instruction | None) -> str:
    """What emitted a kernel."""
    if instruction is None:
        return thunk.kind
    for operation in module.operations(instruction):
        if operation.custom_call_target == TRITON_CALL:
            return ptx_text.kernel_name(operation.kernel_text)
    return instruction.fusion_kind or instruction.custom_call_target or instruction.opcode


def _triton_kernels(module: Module) -> list[str]:
    """PTX of every Triton call in the program."""
    instructions = (i for computation in module.computations.values() for i in computation.values())
    return [i.kernel_text for i in instructions if i.custom_call_target == TRITON_CALL]


def _moved(instruction: Instruction, arguments: Iterable[str], scope: str, times: int) -> Moved:
    large = sum(size for size in instruction.arrays if size >= LARGE)
    return Moved(instruction.name, tuple(sorted(arguments)), scope, large, times)


class _Arguments:
    """Tells which values are large arrays of one argument of the step, or copies of them."""

    def __init__(self, module: Module, argument: str):
        self._module = module
        self._prefix = f"{argument}."
        self.moved = functools.cache(self._moved)

    def argument(self, name: str) -> str | None:
        """The place of the large array that a value is, if it is one."""
        found = self._module.source(name)
        if found is None or found[0].opcode != "parameter" or found[0].arrays[0] < LARGE:
            return None
        return found[0].argument if found[0].argument.startswith(self._prefix) else None

    def _moved(self, instruction: Instruction) -> frozenset[str]:
        """The arrays that a launch moves or converts, if it writes a large array and computes nothing new."""
        if max(instruction.arrays, default=0) < LARGE:
            return frozenset()
        if any(operation.opcode in _PRODUCTS for operation in self._module.operations(instruction)):
            return frozenset()
        arguments: set[str] = set()
        for operand in instruction.operands:
            argument, found = self.argument(operand), self._module.source(operand)
            if argument:
                arguments.add(argument)
            elif found is not None and found[0].opcode in ("fusion", "copy"):
                made, element = found
                if made.arrays[element] >= LARGE:
                    arguments |= self.moved(made)
        return frozenset(arguments)
