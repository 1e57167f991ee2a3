"""The whole step compiled from shapes alone."""

import jax
import jax.numpy as jnp
import pytest
from tiny_step import LAYERS, tiny_json

from pallas_kernels import formats
from v4flash.config import ModelConfig
from v4flash.engine.programs import Shapes
from v4flash.errors import CapacityError, UsageError
from v4flash.profile import budget, deviceless, executable_report, targets

MOST_ARGUMENTS = 600  # each costs the host half a microsecond a step
SHAPES = Shapes(rows=8, chunk=16, context=256)


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_dict(tiny_json(drafter=False))


@pytest.fixture(scope="module")
def arguments(config):
    return deviceless.step_program(config, deviceless.REAL_NUMERICS, "xla", SHAPES)[1]


@pytest.fixture(scope="module")
def found(config, arguments):
    """The report of the tiny step for the newer target; the command's test compiles for the other one."""
    compiled = deviceless.compile_step(config, targets.target("gb300"), "xla", SHAPES)
    return executable_report.report(compiled, deviceless.tree_bytes(arguments[1]))


def test_arguments_are_shapes_of_packed_weights(arguments):
    params, stream, control = arguments
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))
    kinds = {leaf.dtype for leaf in jax.tree.leaves(params)}
    assert {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8), jnp.dtype(jnp.bfloat16)} <= kinds
    assert stream.decode.windows[0].dtype == jnp.bfloat16
    assert control.draft_length.shape == ()


def test_real_weights_cost_no_memory():
    path = targets.folder().parent / "models" / "v4.1-flash.json"
    config = ModelConfig.from_file(path)
    _, (params, _, _) = deviceless.step_program(
        config, deviceless.REAL_NUMERICS, "xla", Shapes(8, 128, 65536)
    )
    assert 509e9 < deviceless.tree_bytes(params) < 511e9


def test_every_layer_launches_kernels_in_its_scope(found):
    parts = {f"verify/layer_{layer}/{part}" for layer in range(LAYERS) for part in ("attention", "ffn")}
    assert parts | {"verify/head", "reject", "commit"} <= set(found.kernels_by_scope)
    assert sum(found.kernels_by_scope.values()) == found.kernels_per_step


def test_step_keeps_its_state_in_place_and_copies_no_weight(found):
    assert found.aliased_bytes == found.state_bytes
    assert found.not_in_place == ()
    assert found.weight_copies == (), "no weight of this configuration reaches a megabyte"


def test_loops_of_the_step_have_known_lengths(found):
    """The mixing matrix is normalised in a loop: its trips make more launches than the text has."""
    assert found.kernels_per_step > found.kernels > LAYERS * 50


@pytest.mark.parametrize("name", ["v4-flash-0731", "v4.1-flash"])
def test_fused_step_of_a_real_configuration_takes_few_arguments(name):
    config = ModelConfig.from_file(budget.configuration(name))
    _, arguments = deviceless.step_program(config, deviceless.REAL_NUMERICS, "fused", Shapes(8, 128, 65536))
    assert len(jax.tree.leaves(arguments)) <= MOST_ARGUMENTS


def test_unknown_backends_are_refused(config):
    with pytest.raises(UsageError, match="no backend guess; expected one of xla, fused"):
        deviceless.step_program(config, deviceless.REAL_NUMERICS, "guess", SHAPES)


def test_absent_plugin_is_said_with_the_way_to_get_it(monkeypatch):
    def absent(*arguments, **settings):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(deviceless.topologies, "get_topology_desc", absent)
    with pytest.raises(CapacityError, match="make env-test"):
        deviceless.compile_for(targets.target("h200"), lambda x: x, (jnp.zeros(3),))


def test_weights_beyond_the_memory_compile_as_if_there_were_room(config, monkeypatch):
    asked = []
    monkeypatch.setattr(deviceless, "compile_for", lambda target, *rest, **settings: asked.append(target))
    target = targets.target("h200")
    for memory in (target.memory, 1000):
        deviceless.compile_step(config, target.with_memory(memory), "xla", SHAPES)
    needed = deviceless.tree_bytes(
        deviceless.step_program(config, deviceless.REAL_NUMERICS, "xla", SHAPES)[1]
    )
    assert [found.memory for found in asked] == [target.memory, needed * deviceless.MEMORY_FACTOR]


def test_simulated_rounding_survives_the_compiler():
    """On GPUs XLA drops conversions to a narrow type and back; the rounding must be an operation it keeps."""
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    compiled = deviceless.compile_for(targets.target("h200"), lambda x: formats.fp8_round_trip(x, 128), (x,))
    assert "reduce-precision(" in compiled.hlo
