"""The list of all operations that have hand-fused bodies, each with its cases.

Knows: the operations' folders. Does not know: what a case computes, or what is done with it. Nothing here needs
Triton: a case imports its launches when they are called.
"""

import functools
import importlib
from collections.abc import Sequence

from pallas_kernels.bench_case import OperationCase

OPERATIONS = (
    "experts",
    "dense",
    "head",
    "hyper_connections",
    "attention_input",
    "router",
    "attention",
    "attention_output",
    "key_rows",
    "index_selection",
    "engram",
    "markov_chain",
    "sampling_law",
)


@functools.cache
def cases() -> tuple[OperationCase, ...]:
    """The cases of every operation, in that order."""
    return tuple(
        case
        for operation in OPERATIONS
        for case in importlib.import_module(f"pallas_kernels.{operation}.bench").cases()
    )


def tuned_with(some: Sequence[OperationCase]) -> tuple[OperationCase, ...]:
    """The cases whose tile choices have a name that `some` have too: together they say which choice is the fastest."""
    names = {(case.operation, name) for case in some for name in case.choices}
    return tuple(case for case in cases() if any((case.operation, name) in names for name in case.choices))


def chosen(only: str | None = None, model: str | None = None) -> tuple[OperationCase, ...]:
    """Those with `only` in their name, their operation or a kernel's name, of `model`."""
    return tuple(
        case
        for case in cases()
        if (model is None or case.model == model)
        and (only is None or any(only in text for text in (case.name, case.operation, *case.kernels)))
    )
