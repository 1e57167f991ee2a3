import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

from v4flash.checkpoint.loading import load
from v4flash.model.indexer import kth_largest
from v4flash.training.batches import draw
from v4flash.training.initialise import balanced_expert_table
from v4flash.training.optimise import TrainingState, adamw
from v4flash.training.saving import RunFolder, load_weights, save_checkpoint
from v4flash.training.stored_weights import of_room
from v4flash.training.target import BatchShape, make_step, run_target

LENGTH = 16
RATE, BALANCE = jnp.float32(1e-2), jnp.float32(1e-3)


@pytest.fixture(scope="module")
def training():
    skeleton = toy_model.skeleton()
    optimiser = adamw(0.1)
    step, streams = (
        make_step(skeleton, BatchShape(2, 8, LENGTH), optimiser, seed=3),
        toy_model.streams(LENGTH + 1),
    )
    state, drafter = begin(skeleton, optimiser)
    return skeleton, optimiser, toy_model.compiled(step, state, streams, drafter, RATE, BALANCE), streams


def begin(skeleton, optimiser):
    weights = toy_model.weights(skeleton)
    return TrainingState.create(of_room(weights, "backbone"), optimiser), of_room(weights, "drafter")


def run(step, state, streams, drafter, count):
    losses = []
    for _ in range(count):
        state, metrics = step(state, streams, drafter, RATE, BALANCE)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_loss_falls_and_routers_follow_loads(training):
    skeleton, optimiser, step, streams = training
    state, drafter = begin(skeleton, optimiser)
    state, losses = run(step, state, streams, drafter, 30)
    assert losses[0] == pytest.approx(np.log(64), abs=0.5)  # a fresh model knows nothing
    assert losses[-1] < 0.7 * losses[0]
    bias = np.asarray(state.weights["backbone.layers.0.ffn.gate.bias"])
    steps = np.round(bias / float(BALANCE))
    assert np.abs(bias).max() > 0
    np.testing.assert_allclose(bias, steps * float(BALANCE), atol=1e-6)  # the rule moves by whole steps only


def test_a_resumed_run_repeats_the_uninterrupted_one(training, tmp_path):
    skeleton, optimiser, step, streams = training
    state, drafter = begin(skeleton, optimiser)
    _, whole = run(step, state, streams, drafter, 5)
    state, drafter = begin(skeleton, optimiser)
    state, before = run(step, state, streams, drafter, 2)
    folder = RunFolder(tmp_path / "run")
    folder.record("target", {"step": 2})
    folder.record("target", {"step": 3})
    folder.save_state("target", state, 12.5)
    fresh, drafter = begin(skeleton, optimiser)
    again = RunFolder(tmp_path / "run")
    state, seconds = again.load_state("target", fresh)
    assert seconds == 12.5
    assert again.records["target"] == [{"step": 2}]
    _, after = run(step, state, streams, drafter, 3)
    assert before + after == whole


def test_export_keeps_every_logit(training, tmp_path):
    skeleton = training[0]
    weights = toy_model.weights(skeleton, seed=5)
    weights["backbone.layers.0.ffn.gate.bias"] = jnp.asarray([0.3, -0.1, 0.0, 0.2])
    tokens = jnp.arange(12, dtype=jnp.int32)[None] * 5 % 64

    @jax.jit
    def logits(model_weights):
        model = skeleton.model(model_weights)
        return jax.vmap(model.backbone.logits)(run_target(model, tokens)[0])

    trained = logits(skeleton.stored(weights))
    save_checkpoint(tmp_path / "model", skeleton, weights, toy_model.TOY, {"note.txt": b"x"})
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 3
    # Equal to the bit: rounding in training and in export is the same function.
    np.testing.assert_array_equal(logits(load_weights(tmp_path / "model", skeleton)), trained)
    loaded = load(tmp_path / "model", skeleton.numerics)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(loaded.params)]
    assert sorted(names) == sorted(weights)


def test_balanced_table_loads_experts_evenly_with_distinct_choices():
    table = balanced_expert_table(400, 3, 8)
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert np.bincount(table[:, 0], minlength=8).tolist() == [50] * 8
    assert np.abs(np.bincount(table.ravel(), minlength=8) - 150).max() < 45


def test_crops_stay_inside_their_class_and_often_start_documents():
    streams = toy_model.streams(LENGTH + 1)
    for kind, step in enumerate((1, 2, 3, 5)):
        crops = np.asarray(draw(streams, jax.random.key(kind), 64, LENGTH, kind))
        inside = (crops[:, 1:] > 1) & (crops[:, :-1] > 1)
        difference = (crops[:, 1:] - crops[:, :-1]) % 60
        assert set(difference[inside].tolist()) == {step}
        assert (crops[:, 0] == 0).mean() > 0.2


@pytest.mark.parametrize("k", [1, 7, 39])
def test_kth_largest_equals_sorting(k):
    scores = np.random.default_rng(k).normal(size=(9, 40)).astype(np.float32)
    scores[:, ::3] = 0.0
    scores[0, :20] = -np.inf
    expected = np.sort(scores, axis=-1)[:, -k]
    np.testing.assert_array_equal(np.asarray(kth_largest(jnp.asarray(scores), k))[:, 0], expected)
