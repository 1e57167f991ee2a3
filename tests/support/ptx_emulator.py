"""A small PTX machine in numpy, and Triton's interpreter taught to run inline assembly with it.

It executes the instructions that the register kernels use, one after another for all threads of a program, each
register a numpy array [threads] of raw bits. Memory operands are the interpreter's real addresses. What it cannot
show: missing barriers (threads run in lockstep) and the order in which a tensor core adds.

Semantics and fragment layouts: NVIDIA's PTX ISA manual, sections on `mma.m16n8k16`, `cvt`, `lop3` and `shfl`.
"""

import ctypes
import functools
import re

import ml_dtypes
import numpy as np

_WIDTH = {"b16": np.uint16, "b32": np.uint32, "u32": np.uint32, "f32": np.uint32}
_HALF = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


class Machine:
    """Registers and shared memory of one inline-assembly statement run by `threads` threads."""

    def __init__(self, threads: int):
        self.threads = threads
        self.registers: dict[str, np.ndarray] = {}
        self.shared: dict[str, int] = {}
        self.memory = np.zeros(0, np.uint8)

    def value(self, name: str) -> np.ndarray:
        """Bits of a register, a number, a thread index or a shared symbol's address."""
        if name in self.registers:
            return self.registers[name]
        if name == "%tid.x":
            return np.arange(self.threads, dtype=np.uint32)
        if name in self.shared:
            return np.full(self.threads, self.shared[name], np.uint32)
        return np.full(self.threads, int(name, 0) & 0xFFFFFFFF, np.uint32)

    def number(self, name: str, kind=np.float32) -> np.ndarray:
        return self.value(name).view(kind)

    def set(self, name: str, bits: np.ndarray, where=None) -> None:
        if where is not None and name in self.registers:
            bits = np.where(where, bits, self.registers[name])
        self.registers[name] = np.ascontiguousarray(bits)

    def address(self, text: str) -> np.ndarray:
        """`[name + offset]` as byte addresses."""
        name, _, offset = text.strip("[]").partition("+")
        base = self.value(name.strip())
        return base + np.asarray(int(offset or 0), base.dtype)


def run(assembly: str, constraints: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Results of an inline-assembly statement, each [threads], for inputs of the same shape."""
    kinds = [kind.lstrip("=&") for kind in constraints.split(",")]
    count = len(kinds) - len(inputs)
    machine = Machine(inputs[0].shape[0])
    for i, array in enumerate(inputs):
        width = np.uint64 if array.dtype.itemsize == 8 else np.uint32
        machine.registers[f"${count + i}"] = np.ascontiguousarray(array).view(width)
    for guard, name, operands in _parsed(assembly):
        where = None if guard is None else machine.value(guard).astype(bool)
        _execute(machine, name, operands, where)
    types = {"r": np.int32, "f": np.float32}
    return [machine.value(f"${i}").view(types[kinds[i]]) for i in range(count)]


@functools.cache
def _parsed(assembly: str) -> list[tuple[str | None, str, list[str]]]:
    """(guard predicate, instruction, operands) per statement; declarations of registers and pragmas are dropped."""
    statements = []
    for line in assembly.replace("\n", " ").split(";"):
        line = re.sub(r"^[\s{]+(?=[.@a-z])", "", line.strip()).strip()
        if not line or line == "}" or line.startswith((".reg", ".pragma")):
            continue
        guard = re.match(r"@(\w+)\s+", line)
        if guard:
            line = line[guard.end() :]
        name, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        statements.append((guard and guard.group(1), name, operands))
    return statements


def _names(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{}").split(",")]


def _execute(m: Machine, name: str, args: list[str], where) -> None:
    parts = name.split(".")
    if name.startswith(".shared"):
        symbol, size = re.match(r"(\w+)\[(\d+)\]", args[-1]).groups()
        m.shared[symbol] = m.memory.size
        m.memory = np.concatenate([m.memory, np.full(int(size), 0x7F, np.uint8)])
    elif parts[0] == "bar":
        pass
    elif name.startswith("mma.sync"):
        _mma(m, args, _HALF[parts[-2]])
    elif name.startswith("ld.global"):
        _load_global(m, args, where)
    elif name.startswith("st.global"):
        _store_global(m, args, where)
    elif name.startswith("ld.shared"):
        m.set(args[0], m.memory.view(np.uint32)[m.address(args[1]) // 4])
    elif name.startswith("st.shared"):
        m.memory.view(np.uint32)[m.address(args[0]) // 4] = m.value(args[1])
    elif parts[0] == "shfl":
        lane, number = np.arange(m.threads), m.value(args[2])
        if parts[2] == "idx":
            assert args[3] == "0x1C1F", name  # groups of four lanes
            lane = lane // 4 * 4 + number
        else:
            assert parts[2] == "bfly" and args[3] == "0x1F", name
            lane = lane ^ number
        m.set(args[0], m.value(args[1])[lane])
    elif parts[0] == "mov" and args[1].startswith("{"):
        m.set(args[0], _joined(m, args[1]))
    elif parts[0] == "mov" and args[0].startswith("{"):
        low, high = _names(args[0])
        m.set(low, (m.value(args[1]) & 0xFFFF).astype(np.uint16))
        m.set(high, (m.value(args[1]) >> 16).astype(np.uint16))
    elif parts[0] == "cvt":
        m.set(args[0], _converted(m, name, args[1:]))
    elif parts[0] == "setp":
        assert parts[1] == "gt" and parts[2] == "s32", name
        m.set(args[0], m.number(args[1], np.int32) > m.number(args[2], np.int32))
    else:
        m.set(args[0], _computed(m, name, args[1:]), where)


def _joined(m: Machine, vector: str) -> np.ndarray:
    low, high = (m.value(part).astype(np.uint32) for part in _names(vector))
    return low | (high << 16)


def _computed(m: Machine, name: str, args: list[str]) -> np.ndarray:
    """Results of instructions without memory or other threads."""
    parts = name.split(".")
    operation, kind = parts[0], parts[-1]
    if operation == "lop3":
        a, b, c = (m.value(arg) for arg in args[:3])
        table, out = int(args[3], 0), np.zeros(m.threads, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out
    if kind == "f32":
        a, *rest = (m.number(arg) for arg in args)
        if operation == "fma":
            exact = a.astype(np.float64) * rest[0] + rest[1]
        else:
            exact = {"add": np.add, "mul": np.multiply, "sub": np.subtract}[operation](
                a.astype(np.float64), rest[0]
            )
        return exact.astype(np.float32).view(np.uint32)
    if kind == "f16x2":
        a, b = (m.number(arg, np.float16).reshape(-1, 2) for arg in args)
        if "xorsign" in parts:
            sign = (a.view(np.uint16) ^ b.view(np.uint16)) & 0x8000
            both = np.maximum(np.abs(a), np.abs(b)).view(np.uint16) | sign
        else:
            assert operation == "mul", name
            both = (a.astype(np.float32) * b.astype(np.float32)).astype(np.float16)
        return both.view(np.uint32).reshape(-1)
    a, *rest = (m.value(arg) for arg in args)
    b = rest[0] if rest else None
    actions = {
        "mov": lambda: a,
        "and": lambda: a & b,
        "or": lambda: a | b,
        "shl": lambda: a << b,
        "shr": lambda: a >> b,
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "max": lambda: np.maximum(a, b),
    }
    assert kind in ("b32", "u32"), name
    return actions[operation]()


def _converted(m: Machine, name: str, args: list[str]) -> np.ndarray:
    if name == "cvt.rn.f16x2.e4m3x2":
        pair = m.value(args[0]).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
        return pair.view(np.uint32)
    if name == "cvt.rn.satfinite.e4m3x2.f16x2":
        pair = np.clip(m.number(args[0], np.float16).astype(np.float32), -448, 448)
        return pair.astype(ml_dtypes.float8_e4m3fn).view(np.uint16)
    kind = {"cvt.rn.f16x2.f32": np.float16, "cvt.rn.bf16x2.f32": ml_dtypes.bfloat16}[name]
    high, low = (m.number(arg).astype(kind) for arg in args)
    return np.stack([low, high], axis=-1).reshape(-1).view(np.uint32)


def _load_global(m: Machine, args: list[str], where) -> None:
    address = m.address(args[1])
    targets = _names(args[0])
    loaded = np.zeros((m.threads, len(targets)), np.uint32)
    active = slice(None) if where is None else where
    asked = address[active]
    if asked.size:
        assert not np.any(asked % (4 * len(targets))), "a vector load is not aligned"
        # All threads read one array, so what lies between the first and the last address is that array's too.
        first, words = int(asked.min()), int(asked.max() - asked.min()) // 4 + len(targets)
        memory = np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(first))
        index = ((asked - np.uint64(first)) // np.uint64(4)).astype(np.int64)
        loaded[active] = memory[index[:, None] + np.arange(len(targets))]
    for i, target in enumerate(targets):
        m.set(target, loaded[:, i], where)


def _store_global(m: Machine, args: list[str], where) -> None:
    address, values = m.address(args[0]), np.stack([m.value(name) for name in _names(args[1])], axis=-1)
    active = slice(None) if where is None else where
    asked, values = address[active], values[active]
    if asked.size:
        assert not np.any(asked % (4 * values.shape[1])), "a vector store is not aligned"
        first, words = int(asked.min()), int(asked.max() - asked.min()) // 4 + values.shape[1]
        memory = np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(first))
        index = ((asked - np.uint64(first)) // np.uint64(4)).astype(np.int64)
        memory[index[:, None] + np.arange(values.shape[1])] = values


def _mma(m: Machine, args: list[str], half) -> None:
    """D = A B + C for every warp; fragments as the manual draws them."""
    d, a, b, c = (_names(arg) for arg in args)
    warps = m.threads // 32
    lane = np.arange(32)
    g, q = lane // 4, lane % 4
    left = np.zeros((warps, 16, 16), np.float32)
    right = np.zeros((warps, 16, 8), np.float32)
    total = np.zeros((warps, 16, 8), np.float64)
    for i, name in enumerate(a):
        pair = m.number(name, half).astype(np.float32).reshape(warps, 32, 2)
        row, column = g + 8 * (i % 2), 2 * q + 8 * (i // 2)
        left[:, row, column], left[:, row, column + 1] = pair[..., 0], pair[..., 1]
    for i, name in enumerate(b):
        pair = m.number(name, half).astype(np.float32).reshape(warps, 32, 2)
        right[:, 2 * q + 8 * i, g], right[:, 2 * q + 8 * i + 1, g] = pair[..., 0], pair[..., 1]
    for i, name in enumerate(c):
        total[:, g + 8 * (i // 2), 2 * q + i % 2] = m.number(name).reshape(warps, 32)
    total += left.astype(np.float64) @ right.astype(np.float64)
    for i, name in enumerate(d):
        result = total[:, g + 8 * (i // 2), 2 * q + i % 2].astype(np.float32)
        m.set(name, result.reshape(-1).view(np.uint32))


class _Results:
    def __init__(self, handles):
        self.handles = handles

    def get_result(self, index: int):
        return self.handles[index]


def teach_interpreter() -> None:
    """Triton's interpreter runs `tl.inline_asm_elementwise` (one element an instance) from now on."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_inline_asm(self, assembly, constraints, values, types, is_pure, pack):
        assert pack == 1
        results = run(assembly, constraints, [value.data for value in values])
        return _Results(
            [TensorHandle(result, kind.scalar) for result, kind in zip(results, types, strict=True)]
        )

    InterpreterBuilder.create_inline_asm = create_inline_asm
