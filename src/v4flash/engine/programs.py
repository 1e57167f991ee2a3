"""The two pinned programs of a loaded model: prefill of one chunk, and one speculative step.

Knows: ahead-of-time compilation with donated state, and the on-disk cache of executables. Does not know:
prompts, text, or when to stop. Weights are arguments of the programs, never constants inside them.

A cached executable is found by a key of everything that could change it: versions, device, processor,
configuration, backend, number types, shapes, flags, and the source text of every file it is made from.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

import pallas_kernels
import v4flash
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options
from v4flash.engine.backends import (
    ChangingWeights,
    WeightForm,
    module_form,
    no_fused_body,
    packed_form,
    refusals,
)
from v4flash.engine.diagnosis import Diagnosis
from v4flash.engine.steady_step import SteadyStep, kept, step_in_place
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.numerics import Numerics
from v4flash.placement.host_memory import MEMORIES
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import LookupPolicy
from v4flash.speculative.step import draft_limit, prefill, speculative_step
from v4flash.speculative.stream import Control, StepResult, Stream
from v4flash.state import DecodeState

STOP_IDS = 8
CACHE_VARIABLE = "V4FLASH_CACHE"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of the programs: rows of a verifying pass, of a prefill chunk, and positions kept."""

    rows: int
    chunk: int
    context: int

    @property
    def max_rows(self) -> int:
        return max(self.rows, self.chunk)


@dataclasses.dataclass(frozen=True)
class Runner:
    """How functions of the weights become programs, and values come to them and from them, wherever weights lie.

    Attributes:
      pin: compiles a function ahead of time, called as `executable`.
      jit: compiles one at its first call, as `jax.jit` does, without options.
      place: a tree of arrays where the pinned step takes them; others are moved, or refused, at every step.
      read: as `jax.device_get`.
    """

    pin: Callable
    jit: Callable = jax.jit
    place: Callable = lambda tree: tree
    read: Callable = jax.device_get


@dataclasses.dataclass
class Programs:
    """Compiled programs. Calling either with other shapes raises TypeError; nothing ever recompiles.

    Attributes:
      prefill: (params, decode, tokens, count, control) -> (decode, token, usable); decode is donated.
      step: (params, stream, control) -> (stream, packed result); the stream is donated.
      draft_limit: the most drafts a step verifies.
      seconds: time spent compiling or loading them.
      cached: whether both came from the cache.
      diagnosis: what to ask when logits are not finite; compiled only then.
      model: (params) -> the model that the programs run, for other functions of the same params.
      exchange: (params, placement, layer, pairs of (hot, cold) experts) -> placement; lets them change places. None
        where all experts are resident.
      runner: what pinned them.
    """

    shapes: Shapes
    prefill: Callable
    step: SteadyStep
    draft_limit: int
    seconds: float
    cached: bool
    diagnosis: Diagnosis
    model: Callable
    exchange: Callable | None
    runner: Runner


def new_state(config: ModelConfig, numerics: Numerics, shapes: Shapes) -> DecodeState:
    """An empty decoding state that fits the programs."""
    return DecodeState.create(config, shapes.context, shapes.max_rows, numerics.dtype)


def make_control(
    draft_length: int,
    block_rows: int,
    sampling: SamplingParams,
    key: jax.Array,
    stop_ids: tuple[int, ...],
    *,
    draft_sampling: SamplingParams | None = None,
    blockwise: bool = True,
    depth: DepthPolicy | None = None,
    lookup: LookupPolicy | None = None,
    repeat_limit: int = 0,
) -> Control:
    """The step's data arguments as device arrays; at most STOP_IDS stop ids.

    By default drafts are drawn with the text's own sampling options, judged block by block, all of them verified,
    none copied, and no repetition ends the text.
    """
    padded = list(stop_ids) + [-1] * (STOP_IDS - len(stop_ids))
    return Control(
        draft_length=jnp.asarray(draft_length, jnp.int32),
        block_rows=jnp.asarray(block_rows, jnp.int32),
        sampling=sampling,
        draft_sampling=draft_sampling or sampling,
        key=key,
        stop_ids=jnp.asarray(padded, jnp.int32),
        blockwise=jnp.asarray(blockwise),
        depth=depth or DepthPolicy.make(adaptive=False),
        lookup=lookup or LookupPolicy.make(on=False),
        repeat_limit=jnp.asarray(repeat_limit, jnp.int32),
    )


def new_stream(
    decode: DecodeState,
    tokens: Sequence[int],
    remaining: int | jax.Array,
    control: Control,
    shapes: Shapes,
) -> Stream:
    """The stream that goes on behind `tokens`, all but the last of which are committed to `decode`."""
    history = np.zeros((shapes.context + shapes.rows,), np.int32)
    history[: len(tokens)] = tokens
    return Stream.start(decode, history[max(len(tokens) - 1, 0)], remaining, history, control)


def build(
    graphdef: nnx.GraphDef | None,
    params: Any,
    config: ModelConfig,
    numerics: Numerics,
    shapes: Shapes,
    cache: Path | None,
    *,
    bodies: type[ReferenceBodies] | None = None,
    runner: Runner | None = None,
    exchange: Callable | None = None,
) -> Programs:
    """Compiles both programs, or loads them from `cache` (a folder; None switches the cache off).

    Args:
      graphdef, params: the modules and their weights, arrays or ShapeDtypeStructs.
      bodies: run these bodies of the operations instead; params is then a PackedModel, and graphdef None.
      runner: what compiles them, by default for one device.
      exchange: of the Programs.

    Raises NoFusedBody where `bodies` do not take the shapes of this configuration.
    """
    form = packed_form(config, numerics, bodies) if bodies else module_form(graphdef)
    try:
        return _built(form, params, config, numerics, shapes, cache, runner or Runner(executable), exchange)
    except refusals() as error:
        if bodies is None:
            raise
        raise no_fused_body(error) from error


def _built(
    form: WeightForm,
    params: Any,
    config: ModelConfig,
    numerics: Numerics,
    shapes: Shapes,
    cache: Path | None,
    runner: Runner,
    exchange: Callable | None,
) -> Programs:
    started = time.perf_counter()
    scalar = jnp.zeros((), jnp.int32)
    control = make_control(0, 0, SamplingParams.make(), jnp.zeros((2,), jnp.uint32), ())
    decode = jax.eval_shape(lambda: new_state(config, numerics, shapes))
    stream = jax.eval_shape(
        lambda decode, control: new_stream(decode, (), 0, control, shapes), decode, control
    )
    tokens = jnp.zeros((shapes.chunk,), jnp.int32)
    limit = draft_limit(shapes.rows) if config.draft else 0

    result = StepResult.blank(limit)
    step = step_in_place(functools.partial(speculative_step, rows=shapes.rows))
    facts = (*form.facts, repr(config), repr(numerics), repr(shapes))
    pinned = functools.partial(_pinned, runner.pin, form, params, facts, cache)
    prefill_run, *known = pinned(
        "prefill", prefill, (decode, tokens, scalar, control), (decode, scalar, scalar), (0,)
    )
    step_run, step_known = pinned("step", step, (stream, control, result), (stream, result), (0, 2))
    keep, keep_known = runner.pin("result", kept, ((), result), scalar, (), facts, cache)
    seconds = time.perf_counter() - started
    return Programs(
        shapes=shapes,
        prefill=prefill_run,
        step=SteadyStep(step_run, keep, lambda: runner.place(jax.device_put(result))),
        draft_limit=limit,
        seconds=seconds,
        cached=all((*known, step_known, keep_known)),
        diagnosis=Diagnosis(form, config, runner.jit),
        model=form.model,
        exchange=exchange,
        runner=runner,
    )


def _pinned(
    pin: Callable,
    form: WeightForm,
    params: Any,
    facts: tuple[str, ...],
    cache: Path | None,
    name: str,
    function: Callable,
    arguments: tuple,
    outputs: tuple,
    donated: tuple[int, ...],
) -> tuple[Callable, bool]:
    """A compiled function(model, *arguments), some of which it takes over, as one of (params, *arguments)."""
    if not isinstance(params, ChangingWeights):

        def run(params, *arguments):
            return function(form.model(params), *arguments)

        taken = tuple(1 + place for place in donated)
        return pin(name, run, (params, *arguments), outputs, taken, facts, cache)

    def run_changing(kept, changed, *arguments):
        model = form.model(ChangingWeights(kept, changed))
        made = function(model, *arguments)
        return form.changed(model), *made

    parts = (params.kept, params.changed)
    compiled, cached = pin(
        name,
        run_changing,
        (*parts, *arguments),
        (params.changed, *outputs),
        (1, *[2 + place for place in donated]),
        facts,
        cache,
    )

    def run_in_place(weights: ChangingWeights, *arguments):
        weights.changed, *made = compiled(weights.kept, weights.changed, *arguments)
        return tuple(made)

    return run_in_place, cached


def executable(
    name: str,
    function: Callable,
    arguments: tuple,
    outputs: Any,
    donated: tuple[int, ...],
    facts: tuple[str, ...],
    cache: Path | None,
    *,
    beside_each_other: bool = False,
) -> tuple[Callable, bool]:
    """Compiles `function` for arguments of these shapes, or loads it from `cache`; True if it was loaded.

    Args:
      name: beginning of the cached file's name.
      arguments: one pytree of arrays or ShapeDtypeStructs for each parameter, the weights first.
      outputs: any pytree with the structure of the result.
      donated: indices of arguments whose memory the result may take over.
      facts: whatever else the compiled code depends on, for the key.
      cache: a folder; None neither reads nor writes.
      beside_each_other: of `compiler_options.of`.
    """
    devices = _devices(arguments)
    key = _cache_key((name, *facts, repr(beside_each_other)), arguments, devices[0]) if cache else ""
    file = cache / f"{name}-{key}.executable" if cache else None
    found = _load(file, arguments, outputs, devices) if file else None
    if found is not None:
        return found, True
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_kept_sharding(x)), arguments
    )
    # An argument that is there for its memory alone is one as well.
    lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).trace(*abstract).lower()
    kinds = {getattr(leaf.sharding, "memory_kind", None) for leaf in jax.tree.leaves(abstract)}
    outside = not kinds.isdisjoint(MEMORIES)
    options = compiler_options.of(
        lowered, devices[0].platform, host_memory=outside, beside_each_other=beside_each_other
    )
    compiled = lowered.compile(compiler_options=options)
    if file:
        _store(file, compiled)
    return compiled, False


def cache_folder() -> Path:
    """Where executables are kept: $V4FLASH_CACHE, or v4flash under the user's cache folder."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "v4flash"


def _devices(arguments: tuple) -> list[jax.Device]:
    """The devices that a program of these arguments runs on: those they lie on, or the default one."""
    shardings = [_kept_sharding(leaf) for leaf in jax.tree.leaves(arguments)]
    meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    if meshes:
        return list(meshes[0].devices.flat)
    return next((list(s.device_set) for s in shardings if s is not None), jax.devices()[:1])


def _cache_key(facts: tuple[str, ...], arguments: tuple, device: jax.Device) -> str:
    leaves = [
        (str(path), leaf.shape, str(leaf.dtype), str(_kept_sharding(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)
    ]
    parts = [
        jax.__version__, jaxlib.__version__, flax.__version__, device.platform, device.device_kind,
        device.client.platform_version, _processor(), *facts, repr(leaves),
        os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", ""), _source_digest(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _kept_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where an argument lies, if that is not simply the first device's own memory."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return sharding
    (device,) = sharding.device_set
    kind = sharding.memory_kind
    usual = device == jax.devices()[0] and kind in (None, device.default_memory().kind)
    return None if usual else sharding


@functools.cache
def _source_digest() -> str:
    """Digest of the files whose functions and tile choices are compiled; commands and text enter no program."""
    package, kernels = Path(v4flash.__file__).parent, Path(pallas_kernels.__file__).parent
    files = [package / "config.py", package / "state.py", Path(__file__)]
    names = ("compiler_options", "steady_step", "peer_way", "sidecar_way")
    files += [package / "engine" / f"{name}.py" for name in names]
    files += [*kernels.rglob("*.py"), *kernels.rglob("tuning/*.json")]
    for room in ("model", "placement", "speculative", "fidelity"):
        files += (package / room).rglob("*.py")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _processor() -> str:
    """The processor's feature flags: XLA's CPU code is made for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _load(file: Path, arguments: tuple, outputs: Any, devices: list[jax.Device]) -> Callable | None:
    """The cached executable, or None if there is none or it cannot be used here."""
    if not file.is_file():
        return None
    structure = jax.tree.structure((arguments, {}))
    try:
        return serialize_executable.deserialize_and_load(
            file.read_bytes(),
            structure,
            jax.tree.structure(outputs),
            backend=devices[0].client,
            execution_devices=devices,
        )
    except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError, TypeError):
        file.unlink(missing_ok=True)
        return None


def _store(file: Path, executable: Any) -> None:
    """Writes an executable under a temporary name, then renames it; a full or read-only disk is no error."""
    try:
        payload, _, _ = serialize_executable.serialize(executable)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            temporary.write(payload)
        os.replace(temporary.name, file)
    except (OSError, ValueError, RuntimeError):
        return
