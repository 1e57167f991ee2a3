"""Hand-fused operations checked against their definitions, and timed, on the device that is there.

Knows: how cases of pallas_kernels are compiled, run, compared and profiled, and what that asks of the machine. Does not
know: any operation, or how a record is shown (cli/kernel_cases).

Programs are compiled by several threads ahead of the one that runs them. A case that raises is reported as wrong and
hides no other.
"""

import concurrent.futures
import contextvars
import importlib
import importlib.util
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import bench_case, launch
from pallas_kernels.bench_case import OperationCase, Pair
from v4flash.bench import peers
from v4flash.bench.real_step import copy_bandwidth
from v4flash.engine.backends import CAPABILITIES, PACKAGES, current_device
from v4flash.errors import CapacityError
from v4flash.profile import profile_table
from v4flash.profile.profile_table import Event

CHECK_SCHEMA, BENCH_SCHEMA = "v4flash.kernels.check/1", "v4flash.kernels.bench/1"
REPEATS = 3
REFERENCE_CALLS = 4  # different operands that a definition is timed on
_MOST_THREADS = 8


def runnable(cases: Sequence[OperationCase]) -> tuple[OperationCase, ...]:
    """The cases that can run here: on a GPU those that are made for it, in Triton's interpreter some.

    Raises CapacityError where none can.
    """
    _require_packages()
    if launch.INTERPRETED:
        chosen = tuple(case for case in cases if case.interpreted)
        if not chosen:
            raise CapacityError(
                "Triton's interpreter runs the demo's operations without tensor core instructions only, and none of "
                "them was asked for; give --model demo, or unset TRITON_INTERPRET on a GPU"
            )
        return chosen
    _require_gpu("set TRITON_INTERPRET=1 to check the demo's cases in Triton's interpreter")
    return _made_for_this_gpu(cases)


def _require_packages() -> None:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise CapacityError(
            f"the kernels need the package {missing[0]}, which is not installed; install the gpu extra"
        )
    # Now, while there is one thread: two that import a package at once may each see half of it.
    for package in (*PACKAGES, "triton.language", "jax.experimental.pallas.mosaic_gpu"):
        importlib.import_module(package)


def timeable(cases: Sequence[OperationCase]) -> tuple[OperationCase, ...]:
    """The cases that are for the GPU that is there. Raises CapacityError where there is none, or none are."""
    _require_packages()
    if launch.INTERPRETED:
        raise CapacityError(
            "Triton's interpreter has no times worth knowing; unset TRITON_INTERPRET to bench"
        )
    _require_gpu("there is nothing to time without one")
    return _made_for_this_gpu(cases)


def _require_gpu(instead: str) -> None:
    device = current_device()
    capability = getattr(device, "compute_capability", None)
    if capability not in CAPABILITIES:
        found = device.device_kind + (f" of compute capability {capability}" if capability else "")
        raise CapacityError(
            f"the kernels run on an NVIDIA GPU of compute capability {' or '.join(CAPABILITIES)}, found {found}; "
            f"{instead}"
        )


def _made_for_this_gpu(cases: Sequence[OperationCase]) -> tuple[OperationCase, ...]:
    found = getattr(current_device(), "compute_capability", None)
    chosen = tuple(case for case in cases if case.capability in (None, found))
    if not chosen:
        raise CapacityError(
            f"{cases[0].name} runs on compute capability {cases[0].capability} alone, found {found}; choose other cases"
        )
    return chosen


def device() -> dict[str, str]:
    """The device as a record names it."""
    found = current_device()
    kind = "Triton's interpreter" if launch.INTERPRETED else found.device_kind
    return {"platform": found.platform, "kind": kind}


def ahead(
    items: Sequence[Any], prepare: Callable[[Any], Any]
) -> Iterator[tuple[Any, concurrent.futures.Future]]:
    """Each item with what `prepare` makes of it in another thread, in order. Behind the last one all are made."""
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    pool, given_up = concurrent.futures.ThreadPoolExecutor(threads), True
    try:
        # A context of its own: what the caller set for compiling holds in the other thread too.
        yield from [(item, pool.submit(contextvars.copy_context().run, prepare, item)) for item in items]
        given_up = False
    finally:
        pool.shutdown(cancel_futures=given_up)


def check(cases: Sequence[OperationCase], heard: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs both bodies of every case on the same operands. `heard` gets each case's verdict as it is known.

    Returns the record, JSON-ready. A case is right if no output's error is above its tolerance and a second call gives
    the same bits.
    """
    found = []
    for case, made in ahead(cases, OperationCase.compiled_pair):
        try:
            verdict = compared(case, made.result()())
        except Exception as problem:  # one case must not hide the others
            verdict = {"right": False, "problem": told(problem)}
        found.append(_named(case) | verdict)
        heard(found[-1])
    return {"schema": CHECK_SCHEMA, "device": device(), "cases": found}


def compared(case: OperationCase, pair: Pair) -> dict[str, Any]:
    """Errors (None where numbers are not finite) and tolerances by output, and the verdict."""
    right, outputs = pair.repeats, {}
    for name, value in pair.reference.items():
        error, tolerance = bench_case.error(pair.fused[name], value), case.tolerances[name]
        right &= error <= tolerance
        outputs[name] = {"error": error if math.isfinite(error) else None, "tolerance": tolerance}
    return {"right": right, "repeats": pair.repeats, "outputs": outputs}


def bench(
    cases: Sequence[OperationCase],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    reference: bool = True,
    public: bool = True,
) -> dict[str, Any]:
    """Times every case's chain, then the definitions as XLA compiles them, then public kernels; needs a GPU.

    Cases for another GPU are left out. `say` hears one line of progress at a time; `keep` gets the record, unfinished
    at first, after each case. Returns the record, JSON-ready: rates are over the bytes that a call has to read. Raises
    CapacityError where no such GPU is there.
    """
    cases = timeable(cases)
    rows = [_named(case) | {"bytes": case.bytes, "calls": case.calls} for case in cases]
    record = {"schema": BENCH_SCHEMA, "device": device(), "repeats": REPEATS, "cases": rows}

    def timed(prepare: Callable, measure: Callable) -> None:
        # All are compiled before the first is timed: compiling tries programs on the device.
        ready = list(ahead(cases, prepare))
        if "copy_bandwidth" not in record:
            record["copy_bandwidth"] = round(copy_bandwidth())
            say(f"copy bandwidth {record['copy_bandwidth'] / 1e12:.2f} TB/s")
        for (case, made), row in zip(ready, rows, strict=True):
            try:
                row |= measure(case, made.result(), record["copy_bandwidth"])
            except Exception as problem:  # one case must not hide the others
                row["problem"] = told(problem)
            say(described(row))
            keep(record)

    timed(_compiled_chain, _timed_chain)
    if reference:
        timed(_compiled_reference, _timed_reference)
    if public:
        record["packages"] = peers.packages()
        found = peers.time_peers(cases, say)
        for row in rows:
            if row["name"] in found:
                row["peers"] = found[row["name"]]
        keep(record)
    return record


def _compiled_chain(case: OperationCase) -> Callable:
    return jax.jit(case.chain).lower(*case.shapes(case.calls)).compile()


def _compiled_reference(case: OperationCase) -> Callable:
    shared, (own,) = case.shapes()
    return jax.jit(case.reference).lower(shared, own).compile()


def _timed_chain(case: OperationCase, chain: Callable, bandwidth: float) -> dict[str, Any]:
    operands = case.operands(case.calls)
    made = measured(profiled([lambda: chain(*operands)]), case.kernels, REPEATS, case.calls)
    rate = case.bytes / (made["microseconds"] * 1e-6)
    return made | {"rate": round(rate), "share": round(rate / bandwidth, 4)}


def _timed_reference(case: OperationCase, body: Callable, bandwidth: float) -> dict[str, Any]:
    calls = min(case.calls, REFERENCE_CALLS)
    shared, walked = case.operands(calls)
    events = profiled([lambda: [body(shared, own) for own in walked]])
    return {
        "reference_microseconds": round(sum(event.duration for event in events) / 1e3 / REPEATS / calls, 2),
        "reference_launches": round(len(events) / REPEATS / calls, 1),
    }


def profiled(runs: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> list[Event]:
    """What the device did in so many rounds of `runs`, each waited for, behind one round that does not count."""
    for run in runs:
        jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                for run in runs:
                    jax.block_until_ready(run())
        return profile_table.read_events(Path(folder))


def measured(events: Sequence[Event], kernels: Sequence[str], repeats: int, calls: int) -> dict[str, Any]:
    """Figures of one call from the events of `repeats` chains of `calls` calls.

    `kernel_microseconds` are medians by kernel, `microseconds` their sum; `span_microseconds` is the shortest chain
    from its first event to its last over its calls, so it holds the gaps and whatever XLA put between the launches.
    """
    each = {kernel: statistics.median(found) for kernel, found in durations(events, kernels).items()}
    length = len(events) // repeats
    runs = [events[i * length : (i + 1) * length] for i in range(repeats)]
    span = min(max(event.end for event in run) - run[0].start for run in runs) / 1e3 / calls
    return {
        "microseconds": round(sum(each.values()), 2),
        "kernel_microseconds": {kernel: round(value, 2) for kernel, value in each.items()},
        "span_microseconds": round(span, 2),
        "launches": round(length / calls, 1),
    }


def durations(events: Sequence[Event], kernels: Sequence[str]) -> dict[str, list[float]]:
    """Microseconds of every launch of each kernel, in order. Raises ValueError where one was never launched."""
    found: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for event in events:
        # The longest fitting name: one kernel's name may be part of another's.
        fitting = [kernel for kernel in kernels if kernel in event.name]
        if fitting:
            found[max(fitting, key=len)].append(event.duration / 1e3)
    absent = [kernel for kernel, own in found.items() if not own]
    if absent:
        raise ValueError(f"the profile shows no kernel {absent[0]} among {len(events)} events")
    return found


def described(row: dict[str, Any]) -> str:
    """One timed case in one line."""
    if "problem" in row:
        return f"{row['name']}: {row['problem']}"
    against = f", XLA {row['reference_microseconds']:.1f} us" if "reference_microseconds" in row else ""
    return (
        f"{row['name']}: {row['microseconds']:.1f} us, {row['rate'] / 1e9:,.0f} GB/s "
        f"({100 * row['share']:.0f} %), span {row['span_microseconds']:.1f} us{against}"
    )


def _named(case: OperationCase) -> dict[str, Any]:
    return {
        "name": case.name, "operation": case.operation, "model": case.model, "kernels": list(case.kernels)
    }  # fmt: skip


def told(problem: Exception) -> str:
    """An exception in one line."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or ['no message'])[0][:300]}"
