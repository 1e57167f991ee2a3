"""Training of target and drafter together: text is predicted, and both laws move towards each other.

Knows: the joint loss and one jitted step. Does not know: how either half of the loss is made (target.py,
drafter.py), schedules, files.

A target that never met its drafter answers with much that nothing cheap can foresee. Here the drafter's losses reach
it on three ways: through its own law, which the law distance pulls towards the drafter's; through the taps, which
learn to carry what the drafter and its confidence need; and through embedding and head, which both use.

Source: DeepSeek-V3 report, multi-token prediction trained with the backbone.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from v4flash.training.batches import Streams, draw
from v4flash.training.drafter import TEMPERATURES, block_losses, blocks_behind, draft_loads, draw_anchors
from v4flash.training.optimise import TrainingState, constants, load_spread, trained, updated
from v4flash.training.stored_weights import Skeleton, Weights
from v4flash.training.target import NORMALISER_PENALTY, expert_loads, next_token_loss, run_target

# Of the drafter's losses beside the next-token loss. Adam takes any weight for the drafter's own parameters. For the
# target it is a price: the law distance then pulls its law with about half the strength of the text, at most.
JOINT_WEIGHT = 0.5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointState:
    """The states of both rooms, which have optimisers of their own: norms of their gradients differ."""

    target: TrainingState
    draft: TrainingState

    @property
    def step(self) -> jax.Array:
        """int32 [], steps made."""
        return self.target.step

    @property
    def weights(self) -> Weights:
        """Master weights of the whole model."""
        return self.target.weights | self.draft.weights


@dataclasses.dataclass(frozen=True)
class JointShape:
    """A step: `sequences` crops of `length` predicted tokens, `anchors` blocks on each."""

    sequences: int
    length: int
    anchors: int


def make_loss(skeleton: Skeleton) -> Callable:
    """A function (trained stored weights, the others, tokens [B, T + 1], anchors [B, A], temperature [B, A, 1]).

    It gives the joint loss and (figures by name, loads of both rooms' routers).
    """

    def loss(weights: Weights, fixed: Weights, tokens: jax.Array, places: jax.Array, temperature: jax.Array):
        model = skeleton.model(fixed | weights)
        hidden, taps, routes = run_target(model, tokens[:, :-1])
        entropy, normaliser = next_token_loss(model, hidden, tokens[:, 1:])
        blocks = blocks_behind(model, tokens[:, :-1], hidden, taps, places)
        drafting, parts = block_losses(blocks, temperature)
        loads = expert_loads(skeleton, routes), draft_loads(skeleton, blocks.routes)
        value = entropy + NORMALISER_PENALTY * normaliser + JOINT_WEIGHT * drafting
        return value, ({"loss": entropy, "drafting": drafting, **parts}, loads)

    return loss


def make_step(
    skeleton: Skeleton,
    shape: JointShape,
    optimisers: tuple[optax.GradientTransformation, optax.GradientTransformation],
    seed: int,
) -> Callable:
    """A function (JointState, streams, rate, balance rate) -> (state, metrics); the state is donated.

    `optimisers`: the target's and the drafter's. Batches depend on the seed and the step number alone.
    """
    loss = make_loss(skeleton)

    def step(state: JointState, streams: Streams, rate, balance_rate):
        rooms = state.target, state.draft
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), 3)
        tokens = draw(streams, keys[0], shape.sequences, shape.length + 1)
        rows = skeleton.config.draft.block_size
        places = draw_anchors(keys[1], shape.sequences, shape.anchors, shape.length, rows)
        temperature = jax.random.choice(
            keys[2], jnp.asarray(TEMPERATURES), (shape.sequences, shape.anchors, 1)
        )
        (_, (metrics, loads)), gradients = jax.value_and_grad(loss, has_aux=True)(
            skeleton.stored(trained(state.weights)), constants(state.weights), tokens, places, temperature
        )
        moved = []
        for room, optimiser, load in zip(rooms, optimisers, loads, strict=True):
            own = {name: gradients[name].astype(jnp.float32) for name in trained(room.weights)}
            moved.append(updated(room, optimiser, own, load, rate, balance_rate))
        return JointState(*moved), metrics | {"load_spread": load_spread(loads[0] | loads[1])}

    return jax.jit(step, donate_argnums=0)
