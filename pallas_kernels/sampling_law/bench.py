"""The laws of a verifying pass as cases to check and to time."""

import jax.numpy as jnp

from pallas_kernels.bench_case import EXACT, SUMS, OperationCase, normal
from pallas_kernels.sampling_law import reference
from pallas_kernels.sampling_law.reference import Filters
from pallas_kernels.sampling_law.specs import VOCABULARIES

CALLS, ROWS = 3, 8
# Top-k and top-p; every pass of a filter is a round in Triton's interpreter, so those stay on GPUs.
FILTERS = {"without filters": (0, 1.0), "with top-p": (0, 0.95), "with top-k and top-p": (40, 0.95)}


def cases() -> tuple[OperationCase, ...]:
    """All rows of a pass, with filters and without."""
    return tuple(
        _case(model, vocabulary, way, *FILTERS[way])
        for model, vocabulary in VOCABULARIES.items()
        for way in FILTERS
    )


def _case(model: str, vocabulary: int, way: str, top_k: int, top_p: float) -> OperationCase:
    filters = Filters(jnp.float32(0.7), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(0.0))

    def operands(calls):
        from pallas_kernels import device_barrier
        from pallas_kernels.sampling_law import fused as launches

        logits = [normal(10 + i, ROWS, vocabulary, scale=3.0) for i in range(calls)]
        return device_barrier.counters(launches.COUNTER_LINES), logits

    def named(laws, counters):
        # The counters' sign bits tell how often a barrier was passed.
        return {"laws": laws, "counters": counters & 0x7FFFFFFF}

    def fused(counters, logits):
        from pallas_kernels.sampling_law import fused as launches

        laws, counters = launches.laws(logits, filters, counters)
        return named(laws, counters), counters

    def definition(counters, logits):
        return named(reference.laws(logits, filters), counters)

    return OperationCase(
        "sampling_law", f"{model} laws of {ROWS} rows, {way}", ("sampling_law",),
        ROWS * vocabulary * 4, CALLS, operands, fused, definition,
        {"laws": SUMS, "counters": EXACT}, interpreted=model == "demo" and (top_k, top_p) == (0, 1.0),
    )  # fmt: skip
