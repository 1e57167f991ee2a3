import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

from v4flash.training import joint
from v4flash.training.batches import draw
from v4flash.training.drafter import draw_anchors, run_blocks
from v4flash.training.initialise import drafter_from_target
from v4flash.training.joint import JointShape, JointState, make_step
from v4flash.training.optimise import TrainingState, adamw, constants, trained
from v4flash.training.saving import RunFolder
from v4flash.training.stored_weights import of_room
from v4flash.training.target import sequence_loss

LENGTH = 16
RATE, BALANCE = jnp.float32(1e-2), jnp.float32(1e-3)
OPTIMISERS = adamw(0.1), adamw(0.01)


def begin(skeleton):
    weights = toy_model.weights(skeleton)
    weights |= drafter_from_target(skeleton, weights, jax.random.key(1))
    rooms = (of_room(weights, "backbone"), of_room(weights, "drafter"))
    return JointState(*(TrainingState.create(*pair) for pair in zip(rooms, OPTIMISERS, strict=True)))


@pytest.fixture(scope="module")
def training():
    skeleton, streams = toy_model.skeleton(), toy_model.streams(LENGTH + 1)
    step = make_step(skeleton, JointShape(4, LENGTH, 4), OPTIMISERS, seed=3)
    return skeleton, streams, toy_model.compiled(step, begin(skeleton), streams, RATE, BALANCE)


def run(step, state, streams, count):
    found = []
    for _ in range(count):
        state, metrics = step(state, streams, RATE, BALANCE)
        found.append({name: np.asarray(value) for name, value in metrics.items()})
    return state, found


def test_text_and_drafts_are_learnt_together(training):
    skeleton, streams, step = training
    state, found = run(step, begin(skeleton), streams, 120)

    def mean(name, begin, end):
        return np.mean([entry[name] for entry in found[begin:end]])

    assert mean("loss", 110, 120) < 0.3 * mean("loss", 0, 5)
    # Laws of two fresh models are alike: only once the target knows its text is there something to agree on.
    for name in ("drafting", "law", "label"):
        assert mean(name, 110, 120) < 0.9 * mean(name, 30, 40), name
    assert int(state.step) == 120
    for bias in ("backbone.layers.0.ffn.gate.bias", "drafter.stages.0.ffn.gate.bias"):
        moved = np.asarray(state.weights[bias]) / float(BALANCE)
        assert np.abs(moved).max() > 0.5, bias  # each room's routers follow their loads
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-2)


def test_a_resumed_run_repeats_the_uninterrupted_one(training, tmp_path):
    skeleton, streams, step = training
    _, whole = run(step, begin(skeleton), streams, 5)
    state, before = run(step, begin(skeleton), streams, 2)
    RunFolder(tmp_path).save_state("joint", state, 7.5)
    state, seconds = RunFolder(tmp_path).load_state("joint", begin(skeleton))
    assert seconds == 7.5 and int(state.step) == 2
    _, after = run(step, state, streams, 3)
    assert [float(e["loss"]) for e in before + after] == [float(e["loss"]) for e in whole]


def test_losses_are_those_of_the_separate_stages_and_both_rooms_answer_for_the_drafter(monkeypatch):
    skeleton = toy_model.skeleton()
    stored = skeleton.stored(begin(skeleton).weights)
    tokens = draw(toy_model.streams(LENGTH + 1), jax.random.key(2), 2, LENGTH + 1)
    places = draw_anchors(jax.random.key(3), 2, 4, LENGTH, skeleton.config.draft.block_size)
    loss = joint.make_loss(skeleton)
    arguments = trained(stored), constants(stored), tokens, places, jnp.ones((2, 4, 1))

    @jax.jit
    def separate(stored):
        model = skeleton.model(stored)
        return sequence_loss(model, tokens)[0], run_blocks(model, tokens[:, :-1], places).drafted

    (_, (parts, _)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
    entropy, _ = separate(stored)
    assert float(parts["loss"]) == pytest.approx(float(entropy), abs=1e-5)
    monkeypatch.setattr(joint, "JOINT_WEIGHT", 0.0)
    _, alone = jax.jit(jax.value_and_grad(joint.make_loss(skeleton), has_aux=True))(*arguments)
    for name in gradients:
        if name.startswith("drafter."):
            assert not np.asarray(alone[name], np.float32).any(), name
    # The first layer is reached through the taps, the head through both laws.
    for name in ("backbone.layers.0.attn.wo_b.weight", "backbone.head", "drafter.stages.0.main_proj.weight"):
        difference = np.asarray(gradients[name], np.float32) - np.asarray(alone[name], np.float32)
        assert np.abs(difference).max() > 1e-6, name
