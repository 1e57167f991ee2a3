"""Public kernels beside ours: which packages are installed, and how fast they are on the same products.

Knows: packages that hold such kernels, and the process that times those of PyTorch. Does not know: how they are called
(torch_peers), or what a case computes. What is not installed is named, never left out in silence.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.bench_case import OperationCase

COMMAND = (sys.executable, "-m", "v4flash.bench.torch_peers")
PATIENCE = 240  # seconds for all products
CALLED = "torch"
PACKAGES = {
    "torch": "BF16, FP8 and grouped BF16 products",
    "triton_kernels": "MXFP4 experts, which transformers uses too",
    "tokamax": "ragged products and attention in JAX",
}


def packages() -> dict[str, dict[str, Any]]:
    """Each package's version, or None where it is not installed, and whether its kernels are timed here."""
    found = {}
    for name, kernels in PACKAGES.items():
        version = _version(name) if importlib.util.find_spec(name) else None
        found[name] = {"version": version, "timed": bool(version) and name == CALLED, "kernels": kernels}
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def time_peers(cases: Sequence[OperationCase], say: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """For each case that public kernels could compute, by name: their `microseconds`, `bytes` and `rate`, or `problem`.

    Empty where the package that is called is not there.
    """
    # Plain products first: a kernel that breaks the process then costs no other its time.
    public = sorted((case for case in cases if case.public), key=lambda case: case.public.experts)
    wanted = [case.public.asked(case.name) for case in public]
    if not wanted or importlib.util.find_spec(CALLED) is None:
        return {}
    say(f"timing {CALLED} on {len(wanted)} of the same products")
    found: dict[str, list[dict[str, Any]]] = {}
    answers, problem = _answers(wanted)
    for answer in answers:
        name = answer.pop("name")
        if "microseconds" in answer:
            answer["rate"] = round(answer["bytes"] / answer["microseconds"] * 1e6)
        found[name] = [answer]
    for product in wanted:
        found.setdefault(product["name"], [{"peer": CALLED, "problem": problem or "no answer"}])
    return found


def _answers(wanted: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """What the process said, and why it said no more."""
    try:
        made = subprocess.run(
            COMMAND, input=json.dumps(wanted), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return _whole_lines(said), f"no answer within {PATIENCE} s"
    problem = None
    if made.returncode:
        problem = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1][:200]
    return _whole_lines(made.stdout), problem


def _whole_lines(said: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in said.splitlines(keepends=True)
        if line.startswith("{") and line.endswith("\n")
    ]
