"""Programs compiled for a GPU on a machine that has none, from shapes alone.

Knows: XLA's ahead-of-time compilation for a described device, the options that make it write its reports, and
the whole speculative step at a configuration's real shapes. Does not know: what the reports mean
(executable_report), and no weight: every argument is a ShapeDtypeStruct.

The compiler has no GPU to time its choices on, so it takes its default tiles: count kernels in these programs, do
not judge the speed of XLA's own matrix products.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding

from pallas_kernels import launch
from pallas_kernels.bench_case import tree_bytes
from v4flash.checkpoint.inventory import abstract_model
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options, peer_way
from v4flash.engine.backends import packed_shapes
from v4flash.engine.programs import Shapes, make_control, new_state, new_stream
from v4flash.errors import CapacityError, UsageError
from v4flash.model.experts import Experts
from v4flash.model.fused.model import FusedModel
from v4flash.model.fused.packing import PackedModel
from v4flash.model.numerics import Numerics
from v4flash.model.paired_experts import PeerExperts
from v4flash.profile.targets import Target
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.step import Control, Stream, speculative_step

BACKENDS = ("xla", "fused")
REAL_NUMERICS = Numerics(dtype=jnp.bfloat16, quantise=True, packed=True)
# Compiling holds a program's arguments to a share of the device's memory, and recomputes values beyond it.
MEMORY_FACTOR = 4
_NO_PLUGIN = (
    "compiling for a GPU needs JAX's CUDA plugin, which is not installed; run: make env-test, or "
    "pip install --no-deps -c constraints.txt jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc "
    "nvidia-cuda-runtime nvidia-nvvm"
)
# Candidates for tiles are compiled one by one, yet without a GPU the first one wins: skip that.
_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_dump_hlo_as_text": True}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a target, as the compiler describes it.

    Attributes:
      hlo: text of the optimised and scheduled module.
      thunks: the list of launches, indented by control flow and command buffers.
      thunk_names: which instruction of `hlo` each launch comes from.
      argument_bytes, output_bytes, aliased_bytes, temp_bytes: memory of one call; aliased outputs stand in
        donated arguments.
      leaves: arrays among the arguments.
      seconds: time spent tracing, lowering and compiling.
    """

    hlo: str
    thunks: str
    thunk_names: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temp_bytes: int
    leaves: int
    seconds: dict[str, float]


def compile_for(
    target: Target,
    function: Callable,
    arguments: tuple,
    donated: int | tuple[int, ...] = (),
    *,
    devices: int = 1,
    beside_each_other: bool = False,
) -> Compiled:
    """Compiles `function` for one device of `target`, or as one program for two.

    Args:
      arguments: one pytree of arrays or ShapeDtypeStructs per parameter; for two devices the first are weights with
        divided stacks (`peer_way.specs_of`), in the shapes that both devices have together.
      donated: indices of arguments whose memory the result may take over.
      beside_each_other: of `compiler_options.of`.

    Raises CapacityError where JAX has no compiler for the target.
    """
    found = _devices(target, devices)
    if devices == 1:
        spread = jax.tree.map(lambda _: SingleDeviceSharding(found[0]), arguments)
    else:
        mesh, params = peer_way.mesh_of(found), arguments[0]
        places = peer_way.specs_of(params), *[peer_way.WHOLE] * len(arguments[1:])
        function = peer_way.mapped(function, mesh, places)
        spread = (
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), places[0]),
            *jax.tree.map(lambda _: NamedSharding(mesh, peer_way.WHOLE), arguments[1:]),
        )
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments, spread
    )
    seconds, started = {}, time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[phase], started = round(now - started, 1), now

    with launch.compiling_for(target.capability), tempfile.TemporaryDirectory() as folder:
        traced = jax.jit(function, donate_argnums=donated).trace(*abstract)
        lap("trace")
        lowered = traced.lower()
        lap("lower")
        options = compiler_options.of(lowered, "gpu", beside_each_other=beside_each_other)
        options |= _OPTIONS | {"xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=options)
        lap("compile")
        thunks, names = _launches(Path(folder))
    memory = compiled.memory_analysis()
    return Compiled(
        hlo=compiled.as_text(),
        thunks=thunks,
        thunk_names=names,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        leaves=len(jax.tree.leaves(abstract)),
        seconds=seconds,
    )


def compile_step(
    config: ModelConfig, target: Target, backend: str, shapes: Shapes, slots: int | None = None
) -> Compiled:
    """The whole speculative step (draft, verify, reject, commit) with the stream donated.

    With `slots` it is one program for two devices that have so many experts of each layer each.

    Weights are packed as published, activations and caches bfloat16, roundings simulated: what a real checkpoint
    runs with on a GPU. Where weights and state exceed the target's memory, they are compiled as if it were larger.
    """
    function, arguments = step_program(config, REAL_NUMERICS, backend, shapes, slots)
    needed = tree_bytes(arguments)
    if needed * MEMORY_FACTOR > target.memory:
        target = target.with_memory(needed * MEMORY_FACTOR)
    return compile_for(target, function, arguments, donated=1, devices=1 if slots is None else 2)


def step_program(
    config: ModelConfig, numerics: Numerics, backend: str, shapes: Shapes, slots: int | None = None
) -> tuple[Callable, tuple[nnx.State, Stream, Control]]:
    """The step as a function step(params, stream, control) and its arguments without values.

    With `slots` the function is that of one device of two, and the arguments are those of both together.
    Raises UsageError for a backend that is not one of BACKENDS.
    """
    params, build = abstract_weights(config, numerics, backend, slots)
    if slots is not None:
        params = peer_way.of_both(params)

    def step(params, stream, control):
        return speculative_step(build(params), stream, control, shapes.rows)

    decode = jax.eval_shape(lambda: new_state(config, numerics, shapes))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    control = jax.eval_shape(lambda key: make_control(0, 0, SamplingParams.make(), key, ()), key)
    stream = jax.eval_shape(
        lambda decode, control: new_stream(decode, (), 0, control, shapes), decode, control
    )
    return step, (params, stream, control)


def abstract_weights(
    config: ModelConfig, numerics: Numerics, backend: str, slots: int | None = None
) -> tuple[nnx.State | PackedModel, Callable]:
    """A backend's weights as shapes, and the function that makes a model of such weights.

    With `slots` they are those of one device of two that has so many experts of each layer.
    Raises UsageError for a backend that is not one of BACKENDS.
    """
    routed = Experts if slots is None else functools.partial(PeerExperts, slots=slots)
    if backend not in BACKENDS:
        raise UsageError(f"no backend {backend}; expected one of {', '.join(BACKENDS)}")
    if backend == "fused":
        return packed_shapes(config, numerics, routed), lambda packed: FusedModel(config, numerics, packed)
    graphdef, variables = abstract_model(config, numerics, routed)
    return nnx.from_flat_state(variables), lambda params: nnx.merge(graphdef, params)


def _devices(target: Target, count: int) -> list:
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=target.text, topology=f"1x1x{count}"
        )
    except NotImplementedError:
        raise CapacityError(_NO_PLUGIN) from None
    return topology.devices


def _launches(folder: Path) -> tuple[str, str]:
    """The list of launches and their names, from the files the compiler wrote."""

    def written(ending: str) -> str | None:
        files = sorted(folder.glob(f"*.jit_*.{ending}"))
        return files[-1].read_text(encoding="utf-8") if files else None

    # The second file is written only where a command buffer was formed.
    plain = written("thunk_sequence.txt")
    return written("thunk_sequence_after_thunk_passes.txt") or plain, written("thunk_metadata.txt")
