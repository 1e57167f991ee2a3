import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

from v4flash.speculative.rejection import acceptance_probability, block_chances
from v4flash.state import DecodeState
from v4flash.training.batches import draw
from v4flash.training.drafter import (
    Blocks,
    block_losses,
    draw_anchors,
    judged_rows,
    make_step,
    run_blocks,
)
from v4flash.training.evaluate import make_measure, ranking_quality, summarised
from v4flash.training.initialise import drafter_from_target
from v4flash.training.optimise import TrainingState, adamw
from v4flash.training.sampler import make_sampler
from v4flash.training.schedule import (
    Budget,
    joint_phases,
    phase_at,
    rate_share,
    seconds_until,
    target_phases,
)
from v4flash.training.stored_weights import of_room

LENGTH = 24
# One pass over a sequence and a pass a token differ in the order of float32 sums only.
SUM_ORDER = 2e-4


@pytest.fixture(scope="module")
def setting():
    skeleton = toy_model.skeleton()
    weights = toy_model.weights(skeleton)
    weights |= drafter_from_target(skeleton, weights, jax.random.key(1))
    tokens = draw(toy_model.streams(LENGTH), jax.random.key(2), 2, LENGTH)
    return skeleton, weights, tokens


def test_training_blocks_equal_decoding_with_an_incremental_state(setting):
    """Window-limited context gathered from a whole sequence is what a decoder holds at that moment."""
    skeleton, weights, tokens = setting
    rows, sequence = skeleton.config.draft.block_size, tokens[0]
    # Roundings are steps: a last-bit difference may cross one. Without them only sum order is left.
    exact = skeleton.without_rounding()
    # The position bias of the Markov head starts at zero; give it something to say.
    weights = weights | {
        "drafter.stages.0.markov_head.head": jax.random.normal(jax.random.key(3), (64, 8)),
        "drafter.stages.0.confidence.weight": jax.random.normal(jax.random.key(4), (1, 40)),
    }

    @jax.jit
    def in_one_pass(weights, anchors):
        return run_blocks(exact.model(weights), tokens[:1], anchors[None])

    @jax.jit
    def step(weights, state, token):
        model = exact.model(weights)
        output, state = model.backbone.trunk(token[None], state, jnp.int32(1))
        state = model.drafter.commit(state, output.taps, state.length, jnp.int32(1))
        return model.backbone.logits(output.hidden)[0], state.advance(jnp.int32(1))

    @jax.jit
    def decoding_block(weights, state, block_tokens):
        model = exact.model(weights)
        block = model.drafter.block(model.backbone, state, block_tokens[0], rows, jnp.int32(rows))
        logits, embedded = model.drafter.biased_logits(block.base_logits, block_tokens)
        return logits, model.drafter.confidence_logits(block.hidden, embedded)

    anchors = [1, 5, 9, 17]
    blocks = in_one_pass(weights, jnp.asarray(anchors))
    state = DecodeState.create(exact.config, context=LENGTH, max_rows=1)
    for position in range(LENGTH - rows):
        if position in anchors:
            index = anchors.index(position)
            logits, confidence = decoding_block(weights, state, sequence[position : position + rows])
            np.testing.assert_allclose(blocks.drafted[0, index], logits, atol=SUM_ORDER)
            np.testing.assert_allclose(blocks.confidence[0, index], confidence, atol=SUM_ORDER)
            following = sequence[position + 1 : position + 1 + rows]
            np.testing.assert_array_equal(blocks.labels[0, index], following)
        law, state = step(weights, state, sequence[position])
        if position in anchors:
            np.testing.assert_allclose(blocks.target[0, anchors.index(position), 0], law, atol=SUM_ORDER)


def test_drafter_learns_and_leaves_the_target_alone(setting):
    skeleton, weights, tokens = setting
    target = skeleton.stored(of_room(weights, "backbone"))
    optimiser = adamw(0.01)
    step = make_step(skeleton, 4, lambda data, key: data, optimiser, seed=0)
    own = jax.tree.map(jnp.copy, of_room(weights, "drafter"))  # steps give their state's buffers away
    state = TrainingState.create(own, optimiser)
    rates = jnp.float32(1e-2), jnp.float32(1e-3)
    step, losses = toy_model.compiled(step, state, target, tokens, *rates), []
    for _ in range(25):
        state, metrics = step(state, target, tokens, *rates)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert set(state.weights) == {name for name in weights if name.startswith("drafter.")}

    anchors = draw_anchors(jax.random.key(1), 2, 4, LENGTH, skeleton.config.draft.block_size)
    estimate = summarised(make_measure(skeleton)(target | skeleton.stored(state.weights), tokens, anchors))
    assert len(estimate.accepted) == skeleton.config.draft.block_size
    assert 1 <= estimate.tau <= 1 + skeleton.config.draft.block_size


def test_losses_of_a_perfect_drafter_are_the_entropies_only():
    law = 3 * jax.random.normal(jax.random.key(0), (2, 2, 3, 64))
    labels, sure = jnp.zeros((2, 2, 3), jnp.int32), jnp.full((2, 2, 3), 20.0)
    loss, parts = block_losses(Blocks(law, law, sure, labels, []), jnp.full((2, 2, 1), 0.6))
    assert float(parts["law"]) == pytest.approx(0, abs=1e-6)
    assert float(parts["confidence"]) == pytest.approx(0, abs=1e-6)
    # The confidence counts eight times, and sums of a law end in the last place.
    assert float(loss) == pytest.approx(0.1 * float(parts["label"]), abs=1e-4)
    np.testing.assert_allclose(parts["accepted"], 1, atol=1e-6)


def test_judged_rows_are_what_the_block_rule_says():
    drafted, target = 2 * jax.random.normal(jax.random.key(0), (2, 1, 3, 4, 7))
    labels = jax.random.randint(jax.random.key(1), (1, 3, 4), 0, 7)
    chance, reach = judged_rows(Blocks(drafted, target, jnp.zeros(labels.shape), labels, []))
    q, p = jax.nn.softmax(drafted), jax.nn.softmax(target)
    for block in range(3):
        ids, own, law = labels[0, block], q[0, block], p[0, block]
        share = block_chances(ids, own, law, 4)[0][:4]
        expected = acceptance_probability(share[:, None] * law, own) / share
        np.testing.assert_allclose(chance[0, block], expected, rtol=1e-5)
        ratio = own[jnp.arange(4), ids] / law[jnp.arange(4), ids]
        before = jnp.cumprod(jnp.concatenate([jnp.ones(1), ratio[:-1]]))
        np.testing.assert_allclose(reach[0, block], before * share, rtol=1e-5)


def test_samples_follow_their_prompts_and_low_temperature_repeats_the_best_token(setting):
    skeleton, weights, tokens = setting
    stored, prompts = skeleton.stored(weights), tokens[:, :8]
    sample = make_sampler(skeleton, 5)
    cold = [np.asarray(sample(stored, jax.random.key(k), prompts, jnp.full((2,), 1e-4))) for k in (0, 1)]
    assert cold[0].shape == (2, 13)
    np.testing.assert_array_equal(cold[0][:, :8], prompts)
    np.testing.assert_array_equal(cold[0], cold[1])
    warm = np.asarray(sample(stored, jax.random.key(0), prompts, jnp.full((2,), 5.0)))
    assert (warm[:, 8:] != cold[0][:, 8:]).any()


def test_anchors_are_distinct_and_leave_room():
    anchors = np.asarray(draw_anchors(jax.random.key(0), 5, 12, LENGTH, 3))
    assert all(len(set(row)) == 12 for row in anchors.tolist())
    assert anchors.min() >= 1 and anchors.max() + 3 < LENGTH


def test_ranking_quality_of_known_orders():
    assert ranking_quality(np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 1.0])) == 1.0
    assert ranking_quality(np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 0.0])) == 0.0
    assert ranking_quality(np.zeros(4), np.array([1.0, 0.0, 1.0, 0.0])) == 0.5
    # A row that is never met counts nothing.
    met = np.array([1.0, 1.0, 0.0])
    assert ranking_quality(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 0.0]), met) == 1.0


def test_a_deadline_stretches_and_shortens_all_plans_alike():
    assert seconds_until(None, [20.0, 60.0]) == 20.0
    assert seconds_until(time.time() + 40, [20.0, 60.0]) == pytest.approx(10, abs=0.1)
    assert seconds_until(time.time() + 160, [20.0, 60.0]) == pytest.approx(40, abs=0.1)


def test_schedule_warms_up_decays_and_passes_its_phases():
    shares = [rate_share(progress, 0.1) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert shares[2] == pytest.approx(1.0)
    assert shares[0] < shares[1] < shares[2] > shares[3] > shares[4] > 0
    assert rate_share(1.0, 0.1, 0.5) == pytest.approx(0.5)
    phases = target_phases((8, 16, 32))
    assert [phase_at(phases, progress) for progress in (0, 0.79, 0.8, 1)] == [0, 0, 1, 1]
    phases = joint_phases((8, 16, 32))
    assert [phase_at(phases, progress) for progress in (0, 0.89, 0.9, 1)] == [0, 0, 1, 1]
    budget = Budget(seconds=100, spent=25)
    assert budget.progress(step=7) == 0.25
    assert Budget(seconds=100, steps=10).progress(step=4) == 0.4
