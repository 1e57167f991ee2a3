"""The text of an optimised HLO module as a table of instructions.

Knows: XLA's text format as far as counting needs it, how sizes follow from shapes, and where a value comes from
across the computations that control flow calls. Does not know: which instructions become kernels.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc](\d+)\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([^\s,()]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|branch_computations)="
    r"(?:%([^\s,{}]+)|\{([^}]*)\})"
)
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KERNEL_TEXT = re.compile(r'kernel_data = "([^"]*)"')
_ESCAPE = re.compile(rb"\\(\\|[0-9A-F]{2})")
_KIND = re.compile(r"\bkind=(k\w+)")
_FUSION_KIND = re.compile(r'"fusion_backend_config":\{"kind":"([^"]*)"')
_ALIAS = re.compile(r"\((\d+), \{\}, (?:may|must)-alias\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a module.

    Attributes:
      name, opcode: of the instruction.
      arrays: bytes of each array of its result, in order (one, unless it is a tuple); without the operands that an
        asynchronous start hands on.
      operands: names of the values it reads, of the same computation.
      number: a parameter's number, a get-tuple-element's index, else None.
      line: the rest of the text, for what is asked rarely.
    """

    name: str
    opcode: str
    arrays: tuple[int, ...]
    operands: tuple[str, ...]
    number: int | None
    line: str

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it calls, by attribute ('calls', 'body', 'branch_computations', ...)."""
        return {
            attribute: (single,) if single else tuple(_OPERAND.findall(several))
            for attribute, single, several in _CALLED.findall(self.line)
        }

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional in the order of its operands."""
        called = self.called
        two = called.get("true_computation", ()) + called.get("false_computation", ())
        return called.get("branch_computations", two)

    @property
    def op_name(self) -> str:
        """The path of named scopes and primitives it comes from, or an empty text."""
        return _first(_OP_NAME, self.line, "")

    @property
    def argument(self) -> str:
        """A parameter's place among the arguments, such as 'params.backbone.layers.3.attn.wq_a.weight'."""
        steps = self.op_name.replace("\\'", "").removesuffix(".value").replace("]", "")
        return steps.replace("[", ".")

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows."""
        found = _first(_TRIPS, self.line)
        return int(found) if found else None

    @property
    def custom_call_target(self) -> str:
        return _first(_TARGET, self.line, "")

    @property
    def kernel_text(self) -> str:
        """The PTX handed to a custom call, or an empty text."""
        text = _first(_KERNEL_TEXT, self.line, "").encode("latin-1")
        plain = _ESCAPE.sub(lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1], 16)]), text)
        return plain.decode()

    @property
    def fusion_kind(self) -> str:
        """How a fusion is emitted: the name of its emitter where it states one, else kLoop, kInput, ..."""
        return _first(_FUSION_KIND, self.line) or _first(_KIND, self.line, "")


def _first(pattern: re.Pattern, text: str, default: str | None = None) -> str | None:
    found = pattern.search(text)
    return found[1] if found else default


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, each a mapping of instructions in scheduled order."""

    entry: str
    computations: dict[str, dict[str, Instruction]]
    aliased: frozenset[int]

    @property
    def parameters(self) -> list[Instruction]:
        """The entry's parameters in order."""
        found = [i for i in self.computations[self.entry].values() if i.opcode == "parameter"]
        return sorted(found, key=lambda instruction: instruction.number)

    @functools.cached_property
    def home(self) -> dict[str, str]:
        """The computation of every instruction outside fusions; their names are unique in a module."""
        fused = {
            name
            for instructions in self.computations.values()
            for instruction in instructions.values()
            for attribute, called in instruction.called.items()
            if attribute in ("calls", "to_apply") and instruction.opcode != "call"
            for name in called
        }
        return {
            instruction: computation
            for computation, instructions in self.computations.items()
            if computation not in fused
            for instruction in instructions
        }

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that runs a computation as control flow."""
        return {
            called: instruction
            for name, computation in self.home.items()
            if (instruction := self.computations[computation][name]).opcode
            in ("while", "conditional", "call")
            for names in instruction.called.values()
            for called in names
        }

    def find(self, name: str) -> Instruction | None:
        """An instruction outside fusions by its name."""
        return self.computations[self.home[name]][name] if name in self.home else None

    def operations(self, instruction: Instruction) -> Iterator[Instruction]:
        """What a fusion consists of, nested fusions unfolded; any other instruction alone."""
        called = instruction.called.get("calls")
        if called is None:
            yield instruction
            return
        for inner in self.computations[called[0]].values():
            yield from self.operations(inner)

    def source(self, name: str, element: int | None = None) -> tuple[Instruction, int] | None:
        """The instruction that makes a value and the number of that value among its results.

        Follows bitcasts, tuples and the arguments of branches and loops; None where a loop changes the value.
        """
        instruction = self.find(name)
        while instruction is not None:
            if instruction.opcode == "bitcast":
                instruction = self.find(instruction.operands[0])
            elif instruction.opcode == "get-tuple-element":
                element, instruction = instruction.number, self.find(instruction.operands[0])
            elif instruction.opcode == "tuple" and element is not None:
                instruction, element = self.find(instruction.operands[element]), None
            elif instruction.opcode == "parameter" and self.home[instruction.name] in self.callers:
                instruction = self._argument(instruction, element)
            else:
                return instruction, element or 0
        return None

    def _argument(self, parameter: Instruction, element: int | None) -> Instruction | None:
        """What the caller passes for a parameter of a branch or loop."""
        computation = self.home[parameter.name]
        caller = self.callers[computation]
        if caller.opcode == "conditional":
            return self.find(caller.operands[1 + caller.branches.index(computation)])
        if caller.opcode == "while":
            if not self._invariant(caller, element):
                return None
            return self.find(caller.operands[0])
        return self.find(caller.operands[parameter.number])

    def _invariant(self, loop: Instruction, element: int | None) -> bool:
        """Whether the loop's body hands this element on unchanged."""
        instructions = self.computations[loop.called["body"][0]]
        root = next(reversed(instructions.values()))
        if element is None or root.opcode != "tuple":
            return False
        passed = instructions[root.operands[element]]
        return (
            passed.opcode == "get-tuple-element"
            and passed.number == element
            and instructions[passed.operands[0]].opcode == "parameter"
        )


def parse(text: str) -> Module:
    """Reads a module's text."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
            continue
        found = _COMPUTATION.match(line)
        if found:
            current = computations[found[2]] = {}
            if found[1]:
                entry = found[2]
    header = text.partition("\n")[0]
    aliases = header.partition("input_output_alias=")[2].partition(", entry_computation_layout=")[0]
    return Module(entry, computations, frozenset(int(number) for number in _ALIAS.findall(aliases)))


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    _, name, shape, opcode, rest = found.groups()
    operands, _, attributes = rest.partition(")")
    number = None
    if opcode == "parameter":
        number = int(operands)
    elif opcode == "get-tuple-element":
        number = int(attributes.partition("index=")[2].partition(",")[0])
    if opcode.endswith("-start") and shape.startswith("(("):
        shape = _behind_first(shape)
    return Instruction(
        name, opcode, tuple(array_bytes(shape)), tuple(_OPERAND.findall(operands)), number, attributes
    )


def _behind_first(shape: str) -> str:
    """A tuple's shape without its first element, which is a tuple itself."""
    depth = 0
    for place, sign in enumerate(shape):
        depth += (sign == "(") - (sign == ")")
        if sign == ")" and depth == 1:
            return shape[place + 1 :]
    return shape


def array_bytes(shape: str) -> Iterator[int]:
    """Bytes of each array in the text of a shape such as '(f32[8,4]{1,0}, s32[])'."""
    for kind, bits, dimensions in _ARRAY.findall(shape):
        size = {"pred": 8, "bf16": 16}.get(kind) or int(bits)
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension)
        yield -(-size // 8)
