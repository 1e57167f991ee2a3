"""Checking and timing of operations: verdicts, figures of made-up profiles, and what a machine is refused for."""

import contextlib
import dataclasses
import json
import math
import sys
import types

import jax.numpy as jnp
import pytest

from pallas_kernels.bench_case import OperationCase, PublicProduct
from v4flash.bench import kernel_cases, peers, torch_peers
from v4flash.errors import CapacityError
from v4flash.profile.profile_table import Event


def doubling(name: str, factor: float, tolerance: float = 1e-6) -> OperationCase:
    """A case whose body multiplies by `factor` what its definition doubles."""
    return OperationCase(
        "doubling", name, ("double",), 64, 2, lambda calls: (jnp.ones(16), [jnp.arange(16.0)] * calls),
        lambda shared, own: ({"double": factor * own}, shared), lambda shared, own: {"double": 2 * own},
        {"double": tolerance},
    )  # fmt: skip


def failing(name: str) -> OperationCase:
    def body(shared, own):
        raise ValueError("no such tile\nand a page of detail")

    return OperationCase("failing", name, ("fail",), 1, 1, lambda calls: (None, [None]), body, body, {})


def test_verdicts():
    heard = []
    record = kernel_cases.check(
        [doubling("demo right", 2), failing("demo failing"), doubling("demo wrong", 2.1),
         doubling("demo close", 2.1, 0.06), doubling("demo endless", float("inf"))],
        heard.append,
    )  # fmt: skip
    assert heard == record["cases"]
    verdicts = {case["name"]: case["right"] for case in record["cases"]}
    assert verdicts == {
        "demo right": True, "demo failing": False, "demo wrong": False, "demo close": True, "demo endless": False
    }  # fmt: skip
    found = {case["name"]: case for case in record["cases"]}
    assert found["demo wrong"]["outputs"]["double"]["error"] == pytest.approx(0.05, rel=1e-4)
    assert found["demo endless"]["outputs"]["double"]["error"] is None
    assert found["demo failing"]["problem"] == "ValueError: no such tile"
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_body_that_does_not_repeat_itself_is_wrong():
    case = doubling("demo right", 2)
    pair = case.pair()
    assert pair.repeats and kernel_cases.compared(case, pair)["right"]
    assert not kernel_cases.compared(case, pair._replace(repeats=False))["right"]


def test_figures_of_a_profile():
    """Two chains of two calls; each call is a `walk`, a `walk_back` and something of XLA's. Times in ns."""
    events = []
    for start, slow in ((0.0, 0.0), (100_000.0, 4_000.0)):
        for call in range(2):
            at = start + call * 10_000
            events += [
                Event("walk_kernel", "Stream", at, 2_000 + slow),
                Event("walk_back_kernel", "Stream", at + 7_000, 1_000),
                Event("loop_add_fusion", "Stream", at + 8_000, 1_500),
            ]
    found = kernel_cases.measured(events, ("walk", "walk_back"), repeats=2, calls=2)
    assert found == {
        "microseconds": 5.0,  # the medians of 2, 2, 6, 6 and of 1
        "kernel_microseconds": {"walk": 4.0, "walk_back": 1.0},
        "span_microseconds": 9.75,  # from 0 to 19.5 us, two calls
        "launches": 3.0,
    }


def test_a_profile_without_the_kernel_is_an_error():
    with pytest.raises(ValueError, match="no kernel walk among 1 events"):
        kernel_cases.measured([Event("other", "Stream", 0, 1)], ("walk",), 1, 1)


def test_a_cpu_is_refused():
    with pytest.raises(
        CapacityError, match="NVIDIA GPU of compute capability 9.0 or 10.3, found cpu; set TRITON"
    ):
        kernel_cases.runnable([doubling("demo right", 2)])
    with pytest.raises(CapacityError, match="nothing to time without one"):
        kernel_cases.bench([doubling("demo right", 2)], print)


def test_cases_for_another_gpu_are_left_out(monkeypatch):
    hopper = dataclasses.replace(doubling("demo hopper", 2), capability="9.0")
    every = doubling("demo every", 2)
    monkeypatch.setattr(kernel_cases, "_require_gpu", lambda instead: None)
    for capability, kept in (("9.0", (hopper, every)), ("10.3", (every,))):
        gpu = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(kernel_cases, "current_device", lambda gpu=gpu: gpu)
        assert kernel_cases.runnable([hopper, every]) == kept
    with pytest.raises(CapacityError, match="demo hopper runs on compute capability 9.0 alone, found 10.3"):
        kernel_cases.runnable([hopper])


def test_the_interpreter_runs_what_it_can(monkeypatch):
    monkeypatch.setattr(kernel_cases.launch, "INTERPRETED", True)
    with pytest.raises(CapacityError, match="give --model demo"):
        kernel_cases.runnable([doubling("v4-flash right", 2)])
    with pytest.raises(CapacityError, match="unset TRITON_INTERPRET"):
        kernel_cases.bench([doubling("demo right", 2)], print)


def test_absent_packages_are_named(monkeypatch):
    monkeypatch.setattr(kernel_cases, "PACKAGES", ("absent_package",))
    with pytest.raises(CapacityError, match="need the package absent_package"):
        kernel_cases.runnable([doubling("demo right", 2)])


def test_a_bench_goes_on_behind_a_case_that_fails(monkeypatch):
    """With a made-up profile: 2 us a call for 64 bytes, beside a copy of 64 MB/s."""

    def profiled(runs):
        for run in runs:
            run()
        return [Event("double", "Stream", 10_000.0 * i, 2_000) for i in range(2 * kernel_cases.REPEATS)]

    monkeypatch.setattr(kernel_cases, "_require_gpu", lambda instead: None)
    monkeypatch.setattr(kernel_cases, "copy_bandwidth", lambda: 64e6)
    monkeypatch.setattr(kernel_cases, "profiled", profiled)
    said, kept = [], []
    record = kernel_cases.bench(
        [failing("demo failing"), doubling("demo right", 2)], said.append, kept.append
    )
    assert len(said) == 5 and len(kept) == 5 and kept[-1] is record
    assert set(record["packages"]) == set(peers.PACKAGES)
    broken, timed = record["cases"]
    assert broken["problem"] == "ValueError: no such tile"
    assert (timed["microseconds"], timed["rate"], timed["share"]) == (2.0, 32_000_000, 0.5)
    assert (timed["span_microseconds"], timed["launches"]) == (6.0, 1.0)
    assert (timed["reference_microseconds"], timed["reference_launches"]) == (2.0, 1.0)
    assert said[-1] == "demo right: 2.0 us, 0 GB/s (50 %), span 6.0 us, XLA 2.0 us"
    assert (
        "reference_microseconds"
        not in kernel_cases.bench([doubling("demo right", 2)], said.append, reference=False)["cases"][0]
    )


PUBLIC = PublicProduct("bf16", ((32, 64),))


def with_peers(monkeypatch, program: str, *names: str) -> dict:
    """What is heard of peers that a program speaks for."""
    monkeypatch.setattr(peers, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == peers.CALLED)
    cases = [dataclasses.replace(doubling(name, 2), public=PUBLIC) for name in names]
    return peers.time_peers([doubling("demo unasked", 2), *cases], print)


def test_public_kernels_stand_beside_their_cases(monkeypatch):
    program = (
        "import json, sys\n"
        "for case in json.load(sys.stdin):\n"
        "    assert case['sizes'] == [[32, 64]] and case['format'] == 'bf16'\n"
        "    print(json.dumps({'name': case['name'], 'peer': 'other', 'microseconds': 2.0, 'bytes': 4096}))"
    )
    found = with_peers(monkeypatch, program, "demo one", "demo two")
    peer = {"peer": "other", "microseconds": 2.0, "bytes": 4096, "rate": 2_048_000_000}
    assert found == {"demo one": [peer], "demo two": [peer]}


def test_a_peer_that_dies_is_named_with_what_it_said(monkeypatch):
    program = (
        'print(\'{"name": "demo one", "peer": "other", "problem": "no such kernel"}\')\n'
        "print('{\"name\": \"demo', end='', flush=True)\n"
        "raise SystemExit('out of memory')"
    )
    found = with_peers(monkeypatch, program, "demo one", "demo two")
    assert found["demo one"] == [{"peer": "other", "problem": "no such kernel"}]
    assert found["demo two"] == [{"peer": "torch", "problem": "out of memory"}]


def test_packages_that_are_absent_are_named(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found = peers.packages()
    assert set(found) == {"torch", "triton_kernels", "tokamax"}
    assert not any(package["version"] or package["timed"] for package in found.values())
    assert peers.time_peers([dataclasses.replace(doubling("demo one", 2), public=PUBLIC)], print) == {}


class Recorded:
    """Stands for torch: arrays are shapes, kernels are names, and every replay takes a millisecond."""

    def __init__(self):
        self.calls, self.float8_e4m3fn, self.bfloat16, self.float32, self.int32 = (
            [],
            "fp8",
            "bf16",
            "f32",
            "i32",
        )
        self.nn = types.SimpleNamespace(functional=self)
        self.cuda = self

    def randn(self, shape, generator, device, dtype):
        return Array(shape, dtype)

    def ones(self, shape, device, dtype):
        return Array(shape, dtype)

    def tensor(self, values, device, dtype):
        return values

    def linear(self, x, weight):
        assert x.shape[1] == weight.shape[1]
        self.calls.append(("linear", x.shape, weight.shape))

    def _scaled_mm(self, x, weight, scale_a, scale_b, out_dtype):
        assert x.dtype == weight.dtype == "fp8" and x.shape[1] == weight.shape[0]
        self.calls.append(("scaled", x.shape, weight.shape))

    def grouped_mm(self, x, weight, offs):
        assert x.shape[1] == weight.shape[1] and len(offs) == weight.shape[0] and offs[-1] == x.shape[0]
        self.calls.append(("grouped", x.shape, weight.shape))

    def Generator(self, device):
        return types.SimpleNamespace(manual_seed=lambda seed: seed)

    def Stream(self):
        return None

    def stream(self, stream):
        return contextlib.nullcontext()

    def graph(self, graph, stream):
        return contextlib.nullcontext()

    def CUDAGraph(self):
        return types.SimpleNamespace(replay=lambda: None)

    def Event(self, enable_timing):
        return types.SimpleNamespace(record=lambda: None, elapsed_time=lambda last: 4.0)

    def synchronize(self):
        pass


@dataclasses.dataclass(frozen=True)
class Array:
    shape: tuple
    dtype: str

    def to(self, dtype):
        return Array(self.shape, dtype)

    def t(self):
        return Array(self.shape[::-1], self.dtype)

    def transpose(self, first, second):
        assert (first, second) == (1, 2)
        return Array((self.shape[0], self.shape[2], self.shape[1]), self.dtype)

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return {"fp8": 1, "bf16": 2}[self.dtype]


@pytest.mark.parametrize(
    ("public", "call", "calls", "size"),
    [
        (PublicProduct("bf16", ((1 << 15, 1 << 12),)), ("linear", (8, 1 << 12), (1 << 15, 1 << 12)), 4, 1 << 28),
        (PublicProduct("fp8", ((1 << 12, 1 << 13),)), ("scaled", (16, 1 << 13), (1 << 13, 1 << 12)), 16, 1 << 25),
        (PublicProduct("fp4", ((64, 32),), 5, 12), ("grouped", (12, 32), (5, 32, 64)), 32, 5 * 64 * 32 * 2),
    ],
)  # fmt: skip
def test_how_pytorch_is_asked(public, call, calls, size):
    torch = Recorded()
    found = torch_peers.measured(torch, public.asked("demo one"))
    assert (
        set(torch.calls) == {call} and len(torch.calls) == 3 * calls
    )  # twice before the capture, once in it
    assert (found["bytes"], found["microseconds"]) == (size, round(1000 / calls, 2))
