"""The two backends: plain modules that XLA fuses, and hand-fused launches on packed weights.

Knows: what fused launches ask of device, packages, rows and number types; how a model comes out of the weights that a
backend keeps, and how those are made. Does not know: compilation, or what a launch does. Shapes that have no fused
body are found by tracing (`programs.build`), for the operations themselves say what they take.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.experts.tiers import Kept
from v4flash.checkpoint.inventory import abstract_model
from v4flash.config import ModelConfig
from v4flash.errors import CapacityError, UsageError, V4FlashError, first_line
from v4flash.model.drafter import Model
from v4flash.model.experts import Experts, RoutedExperts
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.model import ROWS, FusedModel
from v4flash.model.fused.packing import PackedModel, pack_model
from v4flash.model.fused.tensors import backbone_tensors
from v4flash.model.host_experts import changed_state, published_path
from v4flash.model.numerics import Numerics

AUTO, XLA, FUSED = "auto", "xla", "fused"
NAMES = (AUTO, XLA, FUSED)
RESIDENT = "resident"
CAPABILITIES = ("9.0", "10.3")  # H200 and GB300: what the launches are compiled and tuned for
PACKAGES = ("triton", "jax_triton")
FUSED_CHUNK, XLA_CHUNK = ROWS, 128
_INSTEAD = "use --backend xla or leave the option out"


class NoFusedBody(CapacityError):
    """A checkpoint that the fused launches do not take."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that can run here.

    Attributes:
      name: 'xla' or 'fused'.
      note: one sentence that a person should read, or None: why `auto` did not choose fused, or what a fused run does
        differently.
      experts: the way its routed experts are reached ('resident', ...).
    """

    name: str
    note: str | None = None
    experts: str = RESIDENT

    @property
    def label(self) -> str:
        """What figures are noted under: 'xla', or 'xla+host' where experts are reached another way than resident."""
        return self.name if self.experts == RESIDENT else f"{self.name}+{self.experts}"


def choose(wanted: str, numerics: Numerics, rows: int) -> Backend:
    """The backend for `wanted` ('auto', 'xla' or 'fused') on JAX's default device.

    Args: numerics, what the model computes in; rows, of a verifying pass.
    Raises UsageError for an unknown name, or rows that fused passes do not have; CapacityError where `fused` is asked
    for and device or packages do not allow it. `auto` raises neither.
    """
    if wanted not in NAMES:
        raise UsageError(f"backend is {wanted!r}, expected {', '.join(NAMES)}")
    if wanted == XLA:
        return Backend(XLA)
    single = numerics.dtype == jnp.float32 and not numerics.quantise
    rounds = "fused launches hand activations on as float16, and exact mode in float32 keeps all 24 bits"
    obstacle = _obstacle(rows)
    if wanted == FUSED:
        if obstacle is not None:
            raise obstacle
        return Backend(FUSED, f"{rounds}: logits will differ by about one part in 2,000" if single else None)
    if obstacle is not None:
        return Backend(XLA, reason(obstacle))
    return Backend(XLA, rounds) if single else Backend(FUSED)


def current_device() -> jax.Device:
    """The device that arrays go to by default."""
    return next(iter(jnp.zeros(()).devices()))


def can_launch() -> bool:
    """Whether fused launches can run on JAX's default device, for passes of their number of rows."""
    return _obstacle(ROWS) is None


def _obstacle(rows: int) -> V4FlashError | None:
    """Why fused launches cannot run here, whatever the checkpoint."""
    device = current_device()
    capability = getattr(device, "compute_capability", None)
    if capability not in CAPABILITIES:
        found = device.device_kind + (f" of compute capability {capability}" if capability else "")
        return CapacityError(
            f"backend fused needs an NVIDIA GPU of compute capability {' or '.join(CAPABILITIES)}, found {found}; "
            f"{_INSTEAD}"
        )
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return CapacityError(
                f"backend fused needs the package {package}, which does not import ({error}); install it with "
                "`pip install v4flash[gpu]`, or use --backend xla"
            )
    if launch.INTERPRETED:
        return CapacityError(
            "backend fused cannot run in Triton's interpreter, and TRITON_INTERPRET is 1; unset it, or use "
            "--backend xla"
        )
    if rows != ROWS:
        return UsageError(
            f"rows is {rows}, but passes of backend fused have {ROWS}, for k up to {ROWS - 1}; use --rows {ROWS} or "
            "--backend xla"
        )
    return None


def chosen_chunk(backend: Backend, chunk: int | None) -> tuple[int, str | None]:
    """Rows of a prefill pass for the wanted number (None: whatever suits the backend), and a note if it is another."""
    if backend.name == XLA:
        return chunk or XLA_CHUNK, None
    if chunk in (None, FUSED_CHUNK):
        return FUSED_CHUNK, None
    return FUSED_CHUNK, f"chunk is {chunk}, but passes of backend fused have {ROWS} rows: using {FUSED_CHUNK}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ChangingWeights:
    """Weights of which a pass changes some, such as slots for experts that are brought in when they are needed.

    The pinned programs take `changed` over and put what they made of it in its place. Other programs may read both.
    """

    kept: Any
    changed: Any


@dataclasses.dataclass(frozen=True)
class WeightForm:
    """How a backend keeps weights, and how a model comes out of them.

    Attributes:
      facts: what distinguishes its programs from those of other forms, for their cache.
      model: (weights) -> what `speculative.step` calls a model; inside a program.
      changed: (model) -> what a pass made of `ChangingWeights.changed`; asked only where weights change.
      plain_model: the same on the operations' definitions, for looking into a pass.
      tensors: (weights) -> (path in the module tree, values) of the backbone's weights.
    """

    facts: tuple[str, ...]
    model: Callable[[Any], Any]
    plain_model: Callable[[Any], Any]
    tensors: Callable[[Any], Iterator[tuple[tuple, jax.Array]]]
    changed: Callable[[Any], Any] | None = None


def module_form(graphdef: nnx.GraphDef) -> WeightForm:
    """Weights as nnx.State of the modules of `graphdef`, or two of them as ChangingWeights."""

    def model(params: nnx.State | ChangingWeights):
        if isinstance(params, ChangingWeights):
            return nnx.merge(graphdef, params.kept, params.changed)
        return nnx.merge(graphdef, params)

    def tensors(params: nnx.State | ChangingWeights) -> Iterator[tuple[tuple, jax.Array]]:
        kept = params.kept if isinstance(params, ChangingWeights) else params
        for path, variable in nnx.to_flat_state(kept):
            published = published_path(path)
            if path[0] == "backbone" and published is not None:
                yield published, variable.get_value()

    return WeightForm((XLA,), model, model, tensors, changed_state)


def packed_form(config: ModelConfig, numerics: Numerics, bodies: type[ReferenceBodies]) -> WeightForm:
    """Weights as PackedModel, or that and what is kept of cold experts as ChangingWeights; operations with `bodies`."""

    def parts(packed: PackedModel | ChangingWeights) -> tuple[PackedModel, Kept | None]:
        return (packed.kept, packed.changed) if isinstance(packed, ChangingWeights) else (packed, None)

    def model(packed: PackedModel | ChangingWeights, bodies: type[ReferenceBodies] = bodies) -> FusedModel:
        weights, kept = parts(packed)
        return FusedModel(config, numerics, weights, bodies, kept)

    return WeightForm(
        (FUSED, bodies.__name__),
        model,
        lambda packed: model(packed, ReferenceBodies),
        lambda packed: backbone_tensors(config, parts(packed)[0]),
        lambda model: model.backbone.kept,
    )


def packed_shapes(config: ModelConfig, numerics: Numerics, routed: RoutedExperts = Experts) -> PackedModel:
    """The packed weights of a configuration without values; `routed` makes the backbone's routed experts.

    Raises NoFusedBody where its matrices do not fit packed tiles.
    """
    graphdef, variables = abstract_model(config, numerics, routed)
    params = nnx.from_flat_state(variables)
    try:
        return jax.eval_shape(lambda params: pack_model(nnx.merge(graphdef, params)), params)
    except ValueError as error:
        raise no_fused_body(error) from error


def packed_weights(model: Model) -> PackedModel:
    """The packed weights of a loaded model, which gives its own up; see that nothing else holds them.

    They are packed layer by layer on the device they lie on: the most memory in use is that of the loaded model plus
    about three times that of its largest layer (`pack_model`).
    Raises NoFusedBody for scales that packed tiles cannot hold.
    """
    try:
        return pack_model(model, drain=True)
    except ValueError as error:
        raise no_fused_body(error) from error


def no_fused_body(error: Exception) -> NoFusedBody:
    """The sentence for what an operation or Triton said."""
    return NoFusedBody(f"this checkpoint does not fit backend fused: {first_line(error)}; {_INSTEAD}")


def reason(error: V4FlashError) -> str:
    """The sentence without the advice that is already followed."""
    return str(error).removesuffix(f"; {_INSTEAD}")


def refusals() -> tuple[type[Exception], ...]:
    """What tracing and lowering of fused launches raise for shapes they do not take."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (ValueError,)
    return ValueError, TritonError
