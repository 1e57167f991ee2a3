"""Times PyTorch's own kernels on the products of a case. A process of its own: `python -m v4flash.bench.torch_peers`.

Knows: which public function computes a product, and PyTorch's graphs and events. Does not know: JAX, which holds memory
of the same GPU in the process that asks (bench.peers).

It reads a JSON list of products from standard input and writes a JSON line for each. Products are repeated in one CUDA
graph, on weights that together exceed every cache, as often as makes a chain; a call's time is that of some replays
behind another over their calls, gaps included.
"""

import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROWS = 8
SCALED_ROWS = 16  # the fewest that scaled_mm's kernels have a tile for
WALK, MOST_CALLS, LEAST_CALLS = 1 << 29, 32, 4  # bytes of different weights, calls of a graph
REPEATS, REPLAYS = 5, 4


def main() -> None:
    """Answers standard input line by line; a product that fails is answered with its problem."""
    torch = importlib.import_module("torch")
    for wanted in json.load(sys.stdin):
        try:
            answer = measured(torch, wanted)
        except Exception as problem:  # one product must not hide the others
            said = (str(problem).splitlines() or ["no message"])[0][:200]
            answer = {"peer": "torch", "problem": f"{type(problem).__name__}: {said}"}
        print(json.dumps({"name": wanted["name"]} | answer), flush=True)
        torch.cuda.empty_cache()


def measured(torch: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Name of the peer, microseconds of one call, and bytes of its weights.

    Args: wanted, the fields of `pallas_kernels.bench_case.PublicProduct`.
    """
    peer, make = _peer(wanted)
    total, size = 0.0, 0
    for rows, columns in wanted["sizes"]:
        x, weights, call = make(torch, rows, columns, wanted)
        one = weights(0)
        bytes_read = one.numel() * one.element_size()
        copies = max(1, min(MOST_CALLS, WALK // bytes_read))
        walked = [one, *(weights(seed) for seed in range(1, copies))]
        calls = [walked[i % copies] for i in range(max(copies, LEAST_CALLS))]
        total += _microseconds(torch, lambda calls=calls, x=x, call=call: [call(x, w) for w in calls]) / len(
            calls
        )
        size += bytes_read
    return {"peer": peer, "microseconds": round(total, 2), "bytes": size}


def _peer(wanted: dict[str, Any]) -> tuple[str, Callable]:
    if wanted["experts"]:
        return "torch grouped_mm, BF16 weights", _grouped
    if wanted["format"] == "fp8":
        return f"torch _scaled_mm, {SCALED_ROWS} rows, one scale a tensor", _scaled
    return "torch linear, BF16", _linear


def _linear(torch: Any, rows: int, columns: int, wanted: dict) -> tuple:
    def call(x, weight):
        return torch.nn.functional.linear(x, weight)

    return _normal(torch, 0, ROWS, columns), lambda seed: _normal(torch, seed, rows, columns), call


def _scaled(torch: Any, rows: int, columns: int, wanted: dict) -> tuple:
    one = torch.ones((), device="cuda", dtype=torch.float32)

    def eight_bits(seed, *shape):
        return _normal(torch, seed, *shape).to(torch.float8_e4m3fn)

    def call(x, weight):
        return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return eight_bits(0, SCALED_ROWS, columns), lambda seed: eight_bits(seed, rows, columns), call


def _grouped(torch: Any, rows: int, columns: int, wanted: dict) -> tuple:
    experts, routed = wanted["experts"], wanted["routed"]
    ends = [(i + 1) * routed // experts for i in range(experts)]
    ends = torch.tensor(ends, device="cuda", dtype=torch.int32)

    def call(x, weight):
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    return _normal(torch, 0, routed, columns), lambda seed: _normal(torch, seed, experts, rows, columns), call


def _normal(torch: Any, seed: int, *shape: int):
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)


def _microseconds(torch: Any, run: Callable[[], Any]) -> float:
    """Median time of a replay of what `run` launches, one behind another."""
    return statistics.median(_times(torch, run))


def _times(torch: Any, run: Callable[[], Any]) -> Iterator[float]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPEATS):
        graph.replay()  # the host is ahead when the clock starts
        first.record()
        for _ in range(REPLAYS):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        yield first.elapsed_time(last) * 1e3 / REPLAYS


if __name__ == "__main__":
    main()
