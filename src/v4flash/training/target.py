"""Training of the target: next-token loss, and one jitted step.

Knows: the loss over batches of sequences, microbatches, and the expert loads that balance the routers. Does
not know: schedules of time, rate and length (schedule.py), files, or the drafter.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from v4flash.model.drafter import Model
from v4flash.state import DecodeState
from v4flash.training.batches import Streams, draw
from v4flash.training.optimise import TrainingState, constants, counted, load_spread, trained, updated
from v4flash.training.stored_weights import Skeleton, Weights

NORMALISER_PENALTY = 1e-4  # weight of the squared log normaliser, which keeps logits from drifting
WEIGHT_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """`microbatches` passes of `sequences` crops of `length` predicted tokens make one step."""

    microbatches: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.microbatches * self.sequences * self.length


def run_target(model: Model, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """The target over whole sequences int32 [B, T] from position 0.

    Returns hidden [B, T, D], taps [B, T, n * D] (None without a drafter) and per layer expert ids [B, T, K].
    """
    rows = tokens.shape[1]

    def one(sequence: jax.Array):
        # No context beyond the pass itself: its own rows bring the entries they complete.
        state = DecodeState.create(model.config, context=0, max_rows=rows, dtype=model.numerics.dtype)
        output, _ = model.backbone.trunk(sequence, state, jnp.int32(rows))
        return output.hidden, output.taps, output.routes

    return jax.vmap(one)(tokens)


def next_token_loss(model: Model, hidden: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cross entropy in nats, mean squared log normaliser) of ids int32 [B, T] behind hidden [B, T, D].

    The softmax runs over all ids, the padded ones too: they never occur, so the model learns to avoid them
    and a decoder needs no mask for them.
    """
    logits = jax.vmap(model.backbone.logits)(hidden)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return jnp.mean(normaliser - chosen), jnp.mean(jnp.square(normaliser))


def sequence_loss(model: Model, tokens: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(cross entropy in nats, mean squared log normaliser, routes) of predicting tokens[:, 1:]."""
    hidden, _, routes = run_target(model, tokens[:, :-1])
    return *next_token_loss(model, hidden, tokens[:, 1:]), routes


def expert_loads(skeleton: Skeleton, routes: list[jax.Array]) -> Weights:
    """{name of the router's bias: rows each expert received} of the score-routed layers."""
    layers = skeleton.config.layers
    return {
        f"backbone.layers.{layer.index}.ffn.gate.bias": counted(ids, skeleton.config.n_routed_experts)
        for layer, ids in zip(layers, routes, strict=True)
        if not layer.hash_routed
    }


def make_step(
    skeleton: Skeleton, shape: BatchShape, optimiser: optax.GradientTransformation, seed: int
) -> Callable:
    """A function (state, streams, drafter weights, rate, balance rate) -> (state, metrics).

    `state` is the backbone's TrainingState and is donated. The drafter's weights only complete the module
    tree. Batches depend on the seed and the step number alone.
    """

    def loss(weights: Weights, fixed: Weights, tokens: jax.Array):
        model = skeleton.model(fixed | weights)
        entropy, normaliser, routes = sequence_loss(model, tokens)
        return entropy + NORMALISER_PENALTY * normaliser, (entropy, expert_loads(skeleton, routes))

    def step(state: TrainingState, streams: Streams, drafter: Weights, rate, balance_rate):
        stored = skeleton.stored(trained(state.weights))
        fixed = constants(state.weights) | drafter
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def accumulate(sums, index):
            tokens = draw(streams, jax.random.fold_in(key, index), shape.sequences, shape.length + 1)
            (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(stored, fixed, tokens)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, (gradients, aux)), None

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32),
            jax.eval_shape(
                lambda: (
                    stored,
                    loss(stored, fixed, draw(streams, key, shape.sequences, shape.length + 1))[1],
                )
            ),
        )
        (gradients, (entropy, loads)), _ = jax.lax.scan(accumulate, zeros, jnp.arange(shape.microbatches))
        gradients = jax.tree.map(lambda g: g / shape.microbatches, gradients)
        metrics = {
            "loss": entropy / shape.microbatches,
            "gradient_norm": optax.tree.norm(gradients),
            "load_spread": load_spread(loads),
        }
        return updated(state, optimiser, gradients, loads, rate, balance_rate), metrics

    return jax.jit(step, donate_argnums=0)


def make_loss(skeleton: Skeleton) -> Callable:
    """A jitted function (master weights, tokens int32 [B, T + 1]) -> cross entropy in nats, float32 []."""

    def evaluate(weights: Weights, tokens: jax.Array) -> jax.Array:
        return sequence_loss(skeleton.model(skeleton.stored(weights)), tokens)[0]

    return jax.jit(evaluate)
