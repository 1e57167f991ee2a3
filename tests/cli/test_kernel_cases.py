"""`v4flash kernels list`, `check` and `bench`: what they print, and what they refuse without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import registry
from v4flash.bench import kernel_cases as running
from v4flash.cli import kernel_cases

TIMED = {
    "device": {"platform": "gpu", "kind": "Some GPU"},
    "copy_bandwidth": 4_000_000_000_000,
    "packages": {
        "torch": {"version": "2.11", "timed": True, "kernels": "products"},
        "triton_kernels": {"version": None, "timed": False, "kernels": "experts"},
        "tokamax": {"version": "1.0", "timed": False, "kernels": "attention"},
    },
    "cases": [
        {
            "name": "v4-flash experts", "microseconds": 118.8, "rate": 3_587_000_000_000, "share": 0.8968,
            "span_microseconds": 120.1, "launches": 3.0, "kernel_microseconds": {"gate_up": 74.7, "down": 44.1},
            "reference_microseconds": 2710.4,
            "peers": [{"peer": "torch grouped_mm", "microseconds": 412.0, "bytes": 1.5e9, "rate": 3.64e12}],
        },
        {
            "name": "v4-flash router", "microseconds": 7.1, "rate": 304_000_000_000, "share": 0.076,
            "span_microseconds": 8.2, "launches": 1.0, "kernel_microseconds": {"route": 7.1},
        },
        {"name": "v4-flash head", "problem": "ValueError: no such tile"},
    ],
}  # fmt: skip


def test_list_names_every_case(call):
    outcome = call("kernels", "list", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert [case["name"] for case in found["cases"]] == [case.name for case in registry.cases()]
    assert all(case["bytes"] > 0 and case["kernels"] for case in found["cases"])
    lines = call("kernels", "list", "--only", "engram", "--model", "demo").out.splitlines()
    assert lines[1:] == [
        "    2 kB  engram             demo engram look-up                                  lookup",
        "  254 kB  engram             demo engram merge                                    merge",
    ]


def test_list_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = sys.modules['jax_triton'] = None; from v4flash.cli import main; "
        "sys.exit(main(['kernels', 'list', '--only', 'head']))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    made = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "v4.1-flash head" in made.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["check"], 4, "found cpu; set TRITON_INTERPRET=1 to check"),
        (["bench"], 4, "found cpu; there is nothing to time without one"),
        (["check", "--only", "nothing of that name"], 2, "`v4flash kernels list` names them"),
        (["bench", "--model", "v5"], 2, "expected one of v4-flash, v4.1-flash, demo"),
        (["bench", "--out", "absent/record.json"], 2, "there is no folder absent"),
        (["tune"], 4, "found cpu; there is nothing to time without one"),
        (["tune", "--only", "engram look-up"], 2, "has tile choices to try"),
        (["tune", "--out", "absent"], 2, "there is no such folder"),
        (["list", "--model", "v5"], 2, "expected one of v4-flash, v4.1-flash, demo"),
    ],
)
def test_refusals_are_one_sentence(call, arguments, code, said):
    outcome = call("kernels", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err and outcome.err.count("\n") == 1


def test_check_in_the_interpreter(tmp_path):
    command = [
        sys.executable,
        "-m",
        "v4flash",
        "kernels",
        "check",
        "--only",
        "demo drafter router",
        "--quiet",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    out = tmp_path / "record.json"
    made = subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    verdict, last = made.stdout.splitlines()
    assert verdict.startswith("right  demo drafter router  ") and last == "1 right, 0 wrong"
    (case,) = json.loads(out.read_text())["cases"]
    assert set(case["outputs"]) == {"expert_ids", "count", "weight", "slot", "ids", "counters"}


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_a_wrong_case_ends_with_code_1(call, monkeypatch, right, code):
    outputs = {"sum": {"error": 2e-5, "tolerance": 1e-5 if not right else 1e-4}}
    verdict = {"name": "demo head", "right": right, "repeats": True, "outputs": outputs}

    def check(cases, heard):
        heard(verdict)
        return {"cases": [verdict]}

    monkeypatch.setattr(running, "check", check)
    monkeypatch.setattr(running, "runnable", lambda cases: cases)
    outcome = call("kernels", "check", "--only", "demo head", "--quiet")
    assert outcome.code == code
    assert f"{'right' if right else 'WRONG'}  demo head" in outcome.out and "2.0e-05 (sum;" in outcome.out


def test_a_verdict_shows_the_worst_output():
    outputs = {
        "close": {"error": 1e-6, "tolerance": 1e-5},
        "far": {"error": 0.02, "tolerance": 0.01},
        "same": {"error": 0.0, "tolerance": 0.0},
    }
    case = {"name": "demo head", "right": False, "repeats": True, "outputs": outputs}
    line = kernel_cases.verdict_line(case)
    assert line.startswith("WRONG  demo head ") and line.endswith(
        "relative error 2.0e-02 (far; at most 1e-02)"
    )
    outputs["same"]["error"] = 0.25
    assert "(same;" in kernel_cases.verdict_line(case)
    outputs["close"]["error"] = None
    assert "not finite (close;" in kernel_cases.verdict_line(case)
    assert kernel_cases.verdict_line(case | {"repeats": False}).endswith("ANOTHER CALL GIVES OTHER BITS")
    line = kernel_cases.verdict_line({"name": "demo head", "right": False, "problem": "ValueError: no"})
    assert line.endswith("ValueError: no")


def test_table_of_times():
    lines = kernel_cases.bench_text(TIMED).splitlines()
    assert lines[0].startswith("Some GPU: copy bandwidth 4.00 TB/s")
    assert lines[3].split() == "118.8 3587 90 % 120.1 2710.4 v4-flash experts gate_up 74.7, down 44.1".split()
    assert lines[4].split() == "3640 412.0 torch grouped_mm, 1.5 GB".split()
    assert lines[5].split() == "7.1 304 8 % 8.2 - v4-flash router route 7.1".split()
    assert lines[6].endswith("ValueError: no such tile")
    assert lines[7:] == [
        "torch 2.11: products compared",
        "triton_kernels is absent: experts not compared",
        "tokamax 1.0: attention found, but this bench does not call them",
    ]
