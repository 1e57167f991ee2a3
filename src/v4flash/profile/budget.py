"""The kernel budget of a configuration's step: one JSON document, made in a process of its own.

Knows: what belongs in the document, its versions, and how to run the compiler apart: compiling holds gigabytes,
writes to standard error, and must not start JAX on a GPU. Does not know: how a person sees it (cli/kernels).
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v4flash import errors
from v4flash.errors import CapacityError, UsageError, V4FlashError
from v4flash.profile import targets

if TYPE_CHECKING:
    from v4flash.config import ModelConfig
    from v4flash.profile.deviceless import Compiled

SCHEMA = "v4flash.kernel_budget/1"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "jax-triton", "triton")
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What a budget is asked for: the configuration's file, the target's name, the backend, and sizes.

    `k` None is the drafter's trained block, within what the rows allow. `experts` is 'resident', or 'peer' for one
    program on two devices that have half of the routed experts each.
    """

    config: str
    target: str
    backend: str = "xla"
    experts: str = "resident"
    k: int | None = None
    rows: int = 8
    chunk: int = 128
    context: int = 65536


def configuration(given: str) -> Path:
    """The configuration file that a person means: a path, or the name of one in configs/models.

    Raises UsageError where there is neither.
    """
    path, known = Path(given).expanduser(), targets.folder().parent / "models"
    if path.exists():
        return path
    if (known / f"{given}.json").is_file():
        return known / f"{given}.json"
    names = ", ".join(sorted(file.stem for file in known.glob("*.json"))) or "none"
    raise UsageError(
        f"no configuration {given}: expected a config.json, a checkpoint folder, or one of {names}"
    )


def budget(request: Request) -> dict[str, Any]:
    """The document of one budget, compiled in a process of its own.

    Raises what the compilation raises: UsageError for a backend without bodies, a target without description or
    too many drafts, CheckpointError for a wrong configuration, CapacityError without the CUDA plugin.
    """
    configuration(request.config), targets.target(request.target)
    what = f"{request.config} for {request.target}"
    return apart("v4flash.profile.budget", dataclasses.asdict(request), what)


def apart(module: str, request: dict[str, Any], what: str) -> dict[str, Any]:
    """Runs `python -m module` with the request as JSON, and returns what it answers; `what` it compiles, for errors."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        env=inherited | _ENVIRONMENT, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CapacityError(
            f"compiling {what} ended with code {done.returncode} ({said}); the compiler needs about 3 GB of memory"
        ) from None
    if "error" in answer:
        raise getattr(errors, answer["kind"], V4FlashError)(answer["error"])
    return answer


def compiled_budget(request: Request) -> dict[str, Any]:
    """The document of one budget, compiled in this process."""
    from v4flash.config import ModelConfig
    from v4flash.engine.programs import Shapes
    from v4flash.profile import deviceless
    from v4flash.speculative.step import draft_limit

    config, target = ModelConfig.from_file(configuration(request.config)), targets.target(request.target)
    limit = draft_limit(request.rows) if config.draft else 0
    if request.k is None:
        request = dataclasses.replace(request, k=min(config.draft.block_size, limit) if config.draft else 0)
    if request.k > limit:
        hint = "give more rows" if config.draft else "this configuration has no drafter"
        raise UsageError(f"k is {request.k}, this program takes 0 to {limit}; {hint}")
    shapes = Shapes(request.rows, request.chunk, request.context)
    compiled = deviceless.compile_step(config, target, request.backend, shapes, slots(request, config))
    return document(request, compiled) | {"compile": compiled.seconds | _resources()}


def slots(request: Request, config: "ModelConfig") -> int | None:
    """Places for experts of a layer on each of two devices; None where one device has them all."""
    return None if request.experts == "resident" else -(-config.n_routed_experts // 2)


def document(request: Request, compiled: "Compiled") -> dict[str, Any]:
    """The figures of a compiled step, with what was asked for and the floor beneath it."""
    from v4flash.config import ModelConfig
    from v4flash.engine.programs import Shapes
    from v4flash.profile import deviceless, executable_report
    from v4flash.profile.floor import CORRELATED, UNIFORM, floor

    path = configuration(request.config)
    config, target = ModelConfig.from_file(path), targets.target(request.target)
    numerics = deviceless.REAL_NUMERICS
    shapes = Shapes(request.rows, request.chunk, request.context)
    each = slots(request, config)
    _, (weights, stream, _) = deviceless.step_program(config, numerics, request.backend, shapes, each)
    report = executable_report.report(compiled, deviceless.tree_bytes(stream))
    return {
        "schema": SCHEMA,
        "config": path.name if path.is_dir() else path.stem,
        "target": {
            "name": target.name,
            "product": target.product,
            "capability": target.capability,
            "cores": target.cores,
            "memory": target.memory,
        },
        "backend": request.backend,
        "devices": 1 if each is None else 2,
        "experts": request.experts,
        "experts_each": config.n_routed_experts if each is None else each,
        "k": request.k,
        "rows": request.rows,
        "chunk": request.chunk,
        "context": request.context,
        "dtype": numerics.dtype.__name__,
        "mode": "qat" if numerics.quantise else "exact",
        "layers": config.num_hidden_layers,
        "draft_stages": config.draft.stages if config.draft else 0,
        **report.to_json(),
        "weight_bytes": deviceless.tree_bytes(weights),
        "fits": compiled.argument_bytes + compiled.temp_bytes <= target.memory,
        "floor": [
            floor(config, request.k, request.context, m).to_json(target) for m in (UNIFORM, CORRELATED)
        ],
        "versions": installed_versions(),
    }


def _resources() -> dict[str, int | float]:
    """What this process and the assemblers it started have used: processor seconds, and its own peak of memory."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "processor": round(sum(usage.ru_utime + usage.ru_stime for usage in used), 1),
        "processors": os.cpu_count(),
        "peak_bytes": used[0].ru_maxrss * 1024,
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that make and run programs."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def answer(function: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """What a process started by `apart` does: answers the request in its first argument on standard output."""
    try:
        found = function(json.loads(sys.argv[1]))
    except V4FlashError as error:
        found = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(answer(lambda request: compiled_budget(Request(**request))))
