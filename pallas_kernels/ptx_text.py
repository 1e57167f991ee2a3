"""The PTX of a kernel as a text: without what only a debugger reads, and with constant offsets on its pointers.

Knows: how LLVM writes parameters, comments and line numbers. Does not know: what a kernel does, or who launches it.
"""

import functools
import re

_DECLARED = re.compile(r"^\s*\.shared [^;]*\[(\d+)\];", re.MULTILINE)
_ASKED = re.compile(r"\.extern (\.shared [^;]*?)\[\];")
_MOST_DECLARED = 48 << 10
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_ARCHITECTURE = re.compile(r"^\.target (sm_(\d+)\w*)", re.MULTILINE)


def short(ptx: str) -> str:
    """The same kernel without line numbers, comments and debug sections, a third to a half of the text.

    Every launch of a program carries its kernel's text.
    """
    code, _, _ = ptx.partition("\t.section\t.debug")
    code = re.sub(r"//.*", "", code)
    code = re.sub(r"^\s*(\.loc|\.file)\b.*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"^\$L__tmp\d+:$", "", code, flags=re.MULTILINE)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", code)).strip() + "\n"


@functools.cache  # the layers of a model share their kernels and offsets
def with_offsets(ptx: str, name: str, offsets: tuple[int, ...]) -> str:
    """The kernel with `offsets[i]` bytes added to its pointer parameter i where it is loaded.

    Raises ValueError for a parameter that is read in any other way.
    """
    for place, offset in enumerate(offsets):
        if offset:
            parameter = f"{name}_param_{place}"
            load = re.compile(rf"(ld\.param\.[bu]64\s+(%\w+), \[{parameter}\];)")
            ptx, loads = load.subn(rf"\1\nadd.s64 \2, \2, {offset};", ptx)
            if len(re.findall(rf"\b{parameter}\b", ptx)) != 1 + loads:
                raise ValueError(f"kernel {name} reads its parameter {place} by other means than a load")
    return ptx


def with_static_memory(ptx: str, size: int) -> tuple[str, int]:
    """The kernel with `size` bytes of shared memory declared rather than asked for at launch, and what is left to ask.

    A launch that asks makes XLA limit the kernel to what it asks for, and the driver then gives its multiprocessors
    less shared memory than their programs need beside what they declare: fewer run at once. Where both together are
    more than a kernel may declare, nothing changes.
    """
    declared = sum(map(int, _DECLARED.findall(ptx)))
    if not size or declared + size > _MOST_DECLARED:
        return ptx, size
    named, places = _ASKED.subn(rf"\1[{size}];", ptx)
    if places != 1:
        raise ValueError(f"a kernel asks for {size} bytes of shared memory in {places} places, expected 1")
    return named, 0


def kernel_name(ptx: str) -> str:
    """The name of the kernel in a PTX text."""
    return _ENTRY.search(ptx)[1]


def architecture(ptx: str) -> tuple[str, int]:
    """What a PTX text is for: ('sm_90a', 90)."""
    name, number = _ARCHITECTURE.search(ptx).groups()
    return name, int(number)
