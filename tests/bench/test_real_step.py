"""The step on random weights: finite, complete, and beside its floor; a tiny model on the CPU."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import peer_bench
import pytest
from several_devices import QUICK, apart
from tiny_step import tiny_json

from v4flash.bench import random_weights, real_step, streams
from v4flash.cli import main
from v4flash.config import ModelConfig
from v4flash.engine.programs import Shapes
from v4flash.errors import UsageError
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.model import FusedModel
from v4flash.profile import deviceless, targets
from v4flash.profile.deviceless import REAL_NUMERICS
from v4flash.profile.floor import correlated_experts, floor
from v4flash.speculative.step import speculative_step

SHAPES = Shapes(rows=8, chunk=8, context=512)


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_dict(tiny_json(drafter=True))


@pytest.mark.parametrize("backend", ["xla", "fused"])
def test_every_array_is_filled_as_its_shape_says(config, backend):
    abstract = random_weights.with_resident(
        deviceless.abstract_weights(config, REAL_NUMERICS, backend)[0], config, config.n_routed_experts - 2
    )
    experts = random_weights.popular_experts(config, config.n_routed_experts - 2, 6)
    made = random_weights.fill(abstract, config, experts)
    assert jax.tree.structure(made) == jax.tree.structure(abstract)
    for path, (given, wanted) in zip(
        jax.tree_util.tree_leaves_with_path(made),
        zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True),
        strict=True,
    ):
        assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype), path[0]
        if jnp.issubdtype(given.dtype, jnp.floating):
            assert np.isfinite(np.asarray(given, np.float32)).all(), path[0]


def test_popularity_makes_rows_choose_as_many_experts_as_modelled():
    config = ModelConfig.from_dict(tiny_json(drafter=True))
    config = dataclasses.replace(config, n_routed_experts=64)
    experts = random_weights.popular_experts(config, 50, 6)
    random = np.random.default_rng(9)
    scores = np.sqrt(np.logaddexp(0, random.normal(size=(400, 6, 64)))) + experts.bias
    picked = np.argsort(-scores, axis=-1)[..., : config.num_experts_per_tok]
    assert picked.max() < 50
    counted = np.mean([len(np.unique(sample)) for sample in picked])
    assert counted == pytest.approx(correlated_experts(64, config.num_experts_per_tok, 6), rel=0.1)


def test_no_router_chooses_an_expert_that_is_not_there(config):
    """Neither the target's nor the drafter's, which may have fewer experts."""
    resident, fewer = 3, config.n_routed_experts // 2
    experts = random_weights.popular_experts(config, resident, 6)
    for count in (config.n_routed_experts, fewer):
        leaf = jax.ShapeDtypeStruct((count,), jnp.float32)
        bias = random_weights._values(("gate", "bias"), leaf, config, experts, 1)
        assert bool(jnp.all(bias[resident:] < -1e20)) and bool(jnp.all(jnp.abs(bias[:resident]) < 1e3))


def test_token_maps_stay_in_the_compressed_vocabulary(config):
    """Beyond it a hash of 64 bits turns negative, and a table row would be read in front of its table."""
    few = dataclasses.replace(config, engram=SimpleNamespace(compressed_vocab_size=5))
    leaf = jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32)
    made = random_weights._values(("token_map",), leaf, few, None, 1)
    assert int(made.max()) == 4 and int(made.min()) == 0


@pytest.mark.slow  # the command runs such weights every time, in their published layout
def test_packed_weights_run_finite(config):
    abstract, _ = deviceless.abstract_weights(config, REAL_NUMERICS, "fused")
    experts = random_weights.popular_experts(config, config.n_routed_experts, 6)
    params = random_weights.fill(abstract, config, experts)
    stream = real_step.at_context(real_step.noisy(real_step.empty_stream(config, SHAPES)), 200, config)

    @jax.jit
    def step(params, stream, control):
        return speculative_step(
            FusedModel(config, REAL_NUMERICS, params, ReferenceBodies), stream, control, 8
        )

    _, result = step(params, stream, real_step.control_of(config, 3, 8))
    assert bool(result.usable) and int(result.drafted) == 3


def test_the_command_times_cells_and_writes_a_record(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_json(drafter=True)))
    out = tmp_path / "record.json"
    code = main(
        [
            "bench", "--random-weights", "--config", str(tmp_path / "config.json"), "--backend", "xla", "--k", "0,3",
            "--context", "200", "--steps", "2", "--repeats", "3", "--device", "cpu", "--quiet", "--out", str(out),
        ]
    )  # fmt: skip
    assert code == 0
    record = json.loads(out.read_text())
    assert [(cell["k"], cell["depth"]) for cell in record["cells"]] == [(0, None), (3, None)]
    assert record["top_p"] == 1
    for cell in record["cells"]:
        assert cell["usable"] and cell["verified"] == cell["k"]
        assert cell["spread"][0] <= cell["milliseconds"] <= cell["spread"][1]
        assert math.isclose(
            cell["over_floor"], cell["milliseconds"] / cell["floor_milliseconds"], rel_tol=0.1
        )
        assert 1 <= cell["experts_per_layer"]["least"] <= cell["experts_per_layer"]["most"]
    assert "ms/step" in capsys.readouterr().out


def test_steps_that_choose_their_depth_stop_where_they_are_told(config):
    request = real_step.Request(
        config, backends=("xla",), draft_lengths=(3,), contexts=(200,), temperatures=(0.0, 1.0), top_p=0.9,
        depths=(0, 2, 3), steps=1, repeats=1, profile=False,
    )  # fmt: skip
    record = real_step.run(request)
    assert [cell["verified"] for cell in record["cells"]] == [0, 2, 3] * 2
    assert all(cell["usable"] for cell in record["cells"])
    assert record["top_p"] == 0.9 and "k=3 depth=2 T=1" in real_step.describe(record["cells"][4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_lengths": (8,)},
        {"backends": ("fast",)},
        {"contexts": (1 << 30,)},
        {"resident": 1},
        {"contexts": ()},
        {"draft_lengths": (5, 2), "depths": (3,)},
        {"depths": ()},
        {"top_p": 1.5},
    ],
)
def test_wrong_requests_are_refused(config, wrong):
    with pytest.raises(UsageError):
        real_step.Request(config=config, **wrong)


def test_large_tables_are_replaced_by_small_ones_of_which_as_much_is_read():
    published = ModelConfig.from_file((targets.folder().parent / "models") / "v4.1-flash.json")
    small = random_weights.with_small_memory(published)
    assert max(small.engram.num_embeddings) < 1e6 < min(published.engram.num_embeddings)
    assert floor(small, 5, 2048).bytes == floor(published, 5, 2048).bytes
    abstract, _ = deviceless.abstract_weights(small, REAL_NUMERICS, "fused")
    assert {engram.table.shape[0] for engram in abstract.engrams.values()} == set(small.engram.num_embeddings)
    assert random_weights.with_small_memory(small) == small


def test_streams_are_the_packed_matrices_that_a_step_reads(config):
    packed, _ = deviceless.abstract_weights(config, REAL_NUMERICS, "fused")
    every = [config.n_routed_experts] * config.num_hidden_layers
    read = streams.stream_bytes(packed, every, config.draft.n_routed_experts, drafts=True)
    layers = [*packed.layers, *packed.stages]
    experts = sum(
        leaf.size * leaf.dtype.itemsize for pack in layers for leaf in jax.tree.leaves(pack.experts)
    )
    words = sum(pack.words.data.size * 4 for pack in layers)  # shared experts and dense products
    exact = sum(
        np.prod(shape) * 2 for pack in layers for name, _, shape in pack.plain.layout if name == "exact"
    )
    taps = packed.tap_words.data.size * 4
    assert read["gate_up"] + read["down"] + read["products"] == pytest.approx(
        experts + words + exact + taps,
        rel=0.01,  # the arenas' gaps, in a model this small
    )
    profile = {
        "kernels": [{"name": "down", "microseconds": 2.0}, {"name": "fp8_product", "microseconds": 3.0}]
    }
    found = streams.rates(profile, read, bandwidth=4e12)
    assert found["down"]["share"] == pytest.approx(read["down"] / 2e-6 / 4e12, abs=5e-5)
    assert found["products"]["microseconds"] == 3.0 and "gate_up" not in found


def test_a_step_of_two_devices_is_timed_with_and_without_their_sum():
    record = apart(peer_bench.__file__, 2, **QUICK)
    assert (record["devices"], record["experts_resident"]) == (2, peer_bench.RESIDENT)
    (cell,) = record["cells"]
    assert cell["usable"] and 2 <= cell["experts_per_layer"]["mean"] <= peer_bench.RESIDENT
    lost = cell["milliseconds"] - cell["without_sum_milliseconds"]
    assert cell["exposed_microseconds_per_layer"] == pytest.approx(1e3 * lost / record["layers"], abs=0.02)
    assert f"{cell['exposed_microseconds_per_layer']:.1f} us a layer" in real_step.describe(cell)


def test_two_devices_are_timed_with_packed_weights_only(config):
    with pytest.raises(UsageError, match="two devices are timed with backend fused only"):
        real_step.Request(config, backends=("xla",), draft_lengths=(0,), contexts=(16,), peer=True)
