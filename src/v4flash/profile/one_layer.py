"""One layer of a published model, compiled alone for a GPU that need not be here: what it launches, in order.

Knows: how a configuration is cut down to one layer, and that compiling happens in a process of its own (budget).
Does not know: the step around the layer.
"""

import dataclasses
import functools
import json
from typing import Any

from v4flash.profile import budget
from v4flash.profile.budget import configuration


@dataclasses.dataclass(frozen=True)
class Layer:
    """One backbone layer as a compiler made it.

    Attributes:
      kernels: (scope, name) of every kernel in the order of the program; scope is 'attention', 'ffn' or ''.
      copied_weights: bytes of weights that are moved or converted in memory before they are used.
      not_in_place: donated arrays of the state that come back elsewhere.
      hlo: text of the optimised program.
      thunks: the list of launches, with the nearest one before and behind each that shares memory with it.
    """

    kernels: tuple[tuple[str, str], ...]
    copied_weights: int
    not_in_place: tuple[str, ...]
    hlo: str
    thunks: str

    def launches(self, scope: str) -> int:
        """Kernels of one scope."""
        return sum(own == scope for own, _ in self.kernels)


def layer(
    config: str,
    target: str,
    backend: str,
    *,
    ratio: int = 4,
    context: int = 65536,
    hot: int | None = None,
    early: bool = False,
) -> Layer:
    """Compiles one layer with compression `ratio` of the V4 model `config` for 'h200' or 'gb300'.

    With `hot` only so many of its experts are on the device, the others in host memory; the compiler does not see that
    memory without a GPU, and takes both for the device's. Backend xla then has loops, whose kernels are counted once;
    with `early`, backend fused fetches guessed experts before the layer, while other launches run.
    `config` is a file, or the name of one in configs/models. It runs in a process of its own, a quarter of a minute.
    Raises what `budget.budget` raises.
    """
    request = dict(
        config=config, target=target, backend=backend, ratio=ratio, context=context, hot=hot, early=early
    )
    answer = budget.apart("v4flash.profile.one_layer", request, f"one layer of {config} for {target}")
    return Layer(
        tuple(map(tuple, answer["kernels"])),
        answer["copied_weights"],
        tuple(answer["not_in_place"]),
        answer["hlo"],
        answer["thunks"],
    )


def one_layer_json(raw: dict[str, Any], ratio: int) -> dict[str, Any]:
    """A published V4 configuration cut down to one layer that scores its experts, without a drafter."""
    kept = {name: value for name, value in raw.items() if not name.startswith("dspark")}
    return kept | dict(
        num_hidden_layers=1, compress_ratios=[ratio], num_hash_layers=0, num_nextn_predict_layers=0
    )


def compiled_layer(
    config: str, target: str, backend: str, ratio: int, context: int, hot: int | None, early: bool
) -> dict[str, Any]:
    """The document of one layer, compiled in this process."""
    import jax
    import jax.numpy as jnp

    from v4flash.config import ModelConfig
    from v4flash.engine.backends import ChangingWeights
    from v4flash.engine.programs import Shapes, new_state
    from v4flash.profile import deviceless, executable_report, targets

    path = configuration(config)
    raw = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    model = ModelConfig.from_dict(one_layer_json(raw, ratio))
    params, kept, form = _weights(model, backend, hot, early)
    state = jax.eval_shape(lambda: new_state(model, deviceless.REAL_NUMERICS, Shapes(8, 8, context)))
    rows, scalar = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def trunk(params, stream, kept, tokens, count):
        found = form.model(params if hot is None else ChangingWeights(params, kept))
        output, stream = found.backbone.trunk(tokens, stream, count)
        return stream, None if hot is None else form.changed(found), output.hidden

    arguments = params, state, kept, rows, scalar
    compiled = deviceless.compile_for(
        targets.target(target), trunk, arguments, donated=(1, 2), beside_each_other=early
    )
    report = executable_report.report(compiled, deviceless.tree_bytes((state, kept)))
    return {
        "kernels": [
            (scope.rpartition("/")[2] if "layer_" in scope else "", name)
            for scope, name in executable_report.kernels_in_order(compiled)
        ],
        "copied_weights": sum(moved.bytes * moved.times for moved in report.weight_copies),
        "not_in_place": report.not_in_place,
        "hlo": compiled.hlo,
        "thunks": compiled.thunks,
    }


def _weights(model, backend: str, hot: int | None, early: bool) -> tuple[Any, Any, Any]:
    """Weights that stay and those that a pass changes, as shapes, and how a model comes out of them (a WeightForm)."""
    import flax.nnx as nnx
    import jax

    from v4flash.checkpoint.inventory import abstract_model
    from v4flash.engine import backends
    from v4flash.model.experts import Experts
    from v4flash.model.fused import two_memories
    from v4flash.model.fused.bodies import FusedBodies
    from v4flash.model.host_experts import CACHE, HostExperts
    from v4flash.placement.cache import SPARE
    from v4flash.profile.deviceless import REAL_NUMERICS, abstract_weights

    if backend == backends.FUSED:
        form = backends.packed_form(model, REAL_NUMERICS, FusedBodies)
        params, _ = abstract_weights(model, REAL_NUMERICS, backend)
        if hot is None:
            return params, None, form
        params = two_memories.shapes(params, hot)
        empty = functools.partial(two_memories.nothing_kept, params, SPARE)
        if early:
            empty = functools.partial(two_memories.nothing_fetched, params, SPARE, model.num_experts_per_tok)
        return params, jax.eval_shape(empty), form
    routed = Experts if hot is None else functools.partial(HostExperts, hot=hot, spare=SPARE)
    graphdef, variables = abstract_model(model, REAL_NUMERICS, routed)
    parts = [
        nnx.from_flat_state([(path, variable) for path, variable in variables if (CACHE in path) == changed])
        for changed in (False, True)
    ]
    return parts[0], None if hot is None else parts[1], backends.module_form(graphdef)


if __name__ == "__main__":
    raise SystemExit(budget.answer(lambda request: compiled_layer(**request)))
