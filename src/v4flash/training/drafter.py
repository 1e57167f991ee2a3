"""Training of the drafter on a frozen target: blocks at random anchors of whole sequences.

Knows: how one target pass serves many blocks, the teacher-forced Markov chain, and the three losses. Does not
know: where sequences come from, schedules, files, or how a target learns beside its drafter (joint.py).

A block at anchor t holds [x_t, noise, ...] at positions t, t + 1, ...; it sees context rows before t only;
its row j predicts x_{t+1+j}, and the law it should have is the target's at position t + j.

Sources: the DSpark paper and the DeepSpec recipe (loss weights, decay over rows, anchors).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from v4flash.model.drafter import Model
from v4flash.state import DecodeState, ring_capacity, ring_positions
from v4flash.training.optimise import TrainingState, constants, counted, load_spread, trained, updated
from v4flash.training.stored_weights import Skeleton, Weights
from v4flash.training.target import run_target

LABEL_WEIGHT, LAW_WEIGHT = 0.1, 0.9
# Several times that of the law: the head behind the last hidden vector is linear, so the vector must be asked for it.
CONFIDENCE_WEIGHT = 8.0
ROW_DECAY = 4.0  # row j counts exp(-j / ROW_DECAY)
# Greedy text wants a sharp law; at temperature 1 there is more to know.
TEMPERATURES = (0.3, 1.0, 1.0)
WEIGHT_DECAY = 0.01


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows of A blocks behind B sequences, teacher-forced.

    Attributes:
      drafted: [B, A, K, V] float32 biased logits of the drafter.
      target: [B, A, K, V] float32 logits of the target for the same tokens.
      confidence: [B, A, K] logits of being accepted.
      labels: int32 [B, A, K], the tokens that followed.
      routes: per stage, expert ids [B, A, K, k].
    """

    drafted: jax.Array
    target: jax.Array
    confidence: jax.Array
    labels: jax.Array
    routes: list[jax.Array]


def draw_anchors(key: jax.Array, batch: int, count: int, length: int, rows: int) -> jax.Array:
    """Distinct positions int32 [batch, count] that have a token before them and `rows` tokens behind them."""
    places = jnp.arange(1, length - rows, dtype=jnp.int32)
    keys = jax.random.split(key, batch)
    return jax.vmap(lambda own: jax.random.choice(own, places, (count,), replace=False))(keys)


def context_window(rows: jax.Array, before: jax.Array, window: int) -> jax.Array:
    """The ring [R, d] that decoding would hold of context rows [T, d] once `before` of them are committed."""
    slots = ring_positions(ring_capacity(window, 1), before - 1)
    return rows[jnp.maximum(slots, 0)]


def run_blocks(model: Model, tokens: jax.Array, anchors: jax.Array) -> Blocks:
    """Blocks at anchors int32 [B, A] of sequences int32 [B, T] behind a target that stays as it is."""
    hidden, taps, _ = jax.lax.stop_gradient(run_target(model, tokens))
    return blocks_behind(model, tokens, hidden, taps, anchors)


def blocks_behind(
    model: Model, tokens: jax.Array, hidden: jax.Array, taps: jax.Array, anchors: jax.Array
) -> Blocks:
    """Blocks at anchors int32 [B, A] of sequences int32 [B, T], given what `run_target` found along them.

    Gradients reach the target through hidden [B, T, D] (its law), taps [B, T, n * D], and the embedding and the head
    that the drafter borrows.
    """
    config, drafter, backbone = model.config, model.drafter, model.backbone
    rows = config.draft.block_size

    def sequence(tokens: jax.Array, hidden: jax.Array, taps: jax.Array, anchors: jax.Array):
        main = drafter.context(taps)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        context = [stage.attn.window_rows(main, positions) for stage in drafter.stages]
        empty = DecodeState.create(config, context=0, max_rows=1, dtype=model.numerics.dtype)

        def block(anchor: jax.Array):
            windows = tuple(context_window(own, anchor, config.sliding_window) for own in context)
            state = empty.replace(length=anchor, draft_windows=windows)
            inputs = jax.lax.dynamic_slice(tokens, (anchor,), (rows,))
            made = drafter.block(backbone, state, inputs[0], rows, jnp.int32(rows))
            drafted, embedded = drafter.biased_logits(made.base_logits, inputs)
            law = backbone.logits(jax.lax.dynamic_slice_in_dim(hidden, anchor, rows))
            labels = jax.lax.dynamic_slice(tokens, (anchor + 1,), (rows,))
            confidence = drafter.confidence_logits(made.hidden, embedded)
            return drafted, law, confidence, labels, made.routes

        return jax.vmap(block)(anchors)

    return Blocks(*jax.vmap(sequence)(tokens, hidden, taps, anchors))


def overlap(blocks: Blocks, temperature: jax.Array) -> jax.Array:
    """Probability [B, A, K] that a token drawn from the drafter is accepted: sum_v min(p, q).

    `temperature` broadcasts to [B, A, K].
    """
    scale = temperature[..., None]
    distance = jnp.abs(jax.nn.softmax(blocks.drafted / scale) - jax.nn.softmax(blocks.target / scale))
    return 1 - 0.5 * jnp.sum(distance, axis=-1)


def judged_rows(blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """How decoding by the block rule would meet each row at temperature 1: (chance, reach), both [B, A, K].

    Chance: that the row's draft stays if those before it are the labels and stay, sum_v min(s p, q) / s, s the share of
    the target's mass that they still stand for. Reach: the probability that decoding drafts the labels before the row
    and keeps them, over that of the target writing them, prod q / p * s; weighted by it, text of the target at
    temperature 1 holds rows as often as decoding does.
    """
    own, target = jax.nn.log_softmax(blocks.drafted), jax.nn.log_softmax(blocks.target)
    ratio = jnp.take_along_axis(own - target, blocks.labels[..., None], axis=-1)[..., 0]
    product = jnp.cumsum(ratio, axis=-1) - ratio
    # The share becomes min(share * p / q, 1) with every label, so that product times share is the least product so far.
    reach = jax.lax.cummin(product, axis=product.ndim - 1)
    share = (reach - product)[..., None]
    return jnp.sum(jnp.exp(jnp.minimum(target, own - share)), axis=-1), jnp.exp(reach)


def block_losses(blocks: Blocks, temperature: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted loss and its parts: label cross entropy, law distance, confidence cross entropy."""
    rows = blocks.labels.shape[-1]
    weight = jnp.exp(-jnp.arange(rows) / ROW_DECAY)
    weight = weight / (jnp.sum(weight) * blocks.labels[..., 0].size)
    accepted = overlap(blocks, temperature)
    label = optax.softmax_cross_entropy_with_integer_labels(blocks.drafted, blocks.labels)
    # A confidence knows no temperature: it learns what happens to untempered draws, on the rows that decoding meets.
    chance, reach = jax.lax.stop_gradient(judged_rows(blocks))
    sure = optax.sigmoid_binary_cross_entropy(blocks.confidence, chance)
    parts = {
        "label": jnp.sum(weight * label),
        "law": jnp.sum(weight * 2 * (1 - accepted)),
        "confidence": jnp.sum(reach * sure) / jnp.sum(reach),
        "accepted": jnp.mean(accepted, axis=(0, 1)),
    }
    loss = LABEL_WEIGHT * parts["label"] + LAW_WEIGHT * parts["law"] + CONFIDENCE_WEIGHT * parts["confidence"]
    return loss, parts


def draft_loads(skeleton: Skeleton, routes: list[jax.Array]) -> Weights:
    """{name of the router's bias: rows each expert received} of the drafter's stages."""
    experts = skeleton.config.draft.n_routed_experts
    return {
        f"drafter.stages.{stage}.ffn.gate.bias": counted(ids, experts) for stage, ids in enumerate(routes)
    }


def make_step(
    skeleton: Skeleton, anchors: int, draw: Callable, optimiser: optax.GradientTransformation, seed: int
) -> Callable:
    """A function (state, target's stored weights, data, rate, balance rate) -> (state, metrics).

    `state` is the drafter's TrainingState and is donated. `draw(data, key)` gives sequences int32 [B, T].
    """

    def loss(weights: Weights, fixed: Weights, tokens: jax.Array, places: jax.Array, temperature: jax.Array):
        blocks = run_blocks(skeleton.model(fixed | weights), tokens, places)
        value, parts = block_losses(blocks, temperature)
        return value, (parts, draft_loads(skeleton, blocks.routes))

    def step(state: TrainingState, target: Weights, data, rate, balance_rate):
        stored = skeleton.stored(trained(state.weights))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), 3)
        tokens = draw(data, keys[0])
        batch, length = tokens.shape
        places = draw_anchors(keys[1], batch, anchors, length, skeleton.config.draft.block_size)
        temperature = jax.random.choice(keys[2], jnp.asarray(TEMPERATURES), (batch, anchors, 1))
        fixed = constants(state.weights) | target
        (value, (parts, loads)), gradients = jax.value_and_grad(loss, has_aux=True)(
            stored, fixed, tokens, places, temperature
        )
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        metrics = {"loss": value, **parts, "load_spread": load_spread(loads)}
        return updated(state, optimiser, gradients, loads, rate, balance_rate), metrics

    return jax.jit(step, donate_argnums=0)
