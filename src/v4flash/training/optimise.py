"""AdamW over a flat mapping of master weights, and the rule that balances expert loads.

Knows: which parameters decay, clipping, and how selection biases follow loads. Does not know: what the loss
is or how the learning rate runs over time; the rate comes as an argument.

Source of the balancing rule: auxiliary-loss-free balancing of the DeepSeek-V3 report.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from v4flash.training.stored_weights import Weights, is_trained

CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
_UNDECAYED_SUFFIXES = ("embed", "engram.embed.weight", "ape", ".fn", ".base", ".scale", "attn_sink")


def decays(name: str, value: jax.Array) -> bool:
    """Matrices decay; tables of rows, norms and hyper-connections do not."""
    return value.ndim >= 2 and not name.endswith(_UNDECAYED_SUFFIXES)


def adamw(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate: gradients to descent directions of about unit size."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(*BETAS),
        optax.add_decayed_weights(
            weight_decay, mask=lambda weights: {name: decays(name, value) for name, value in weights.items()}
        ),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingState:
    """What training one room of the model carries from step to step.

    Attributes:
      weights: master weights of the room, float32, constants included.
      moments: state of the optimiser over the trained ones.
      step: int32 [], steps made.
    """

    weights: Weights
    moments: optax.OptState
    step: jax.Array

    @classmethod
    def create(cls, weights: Weights, optimiser: optax.GradientTransformation) -> "TrainingState":
        return cls(weights, optimiser.init(trained(weights)), jnp.zeros((), jnp.int32))


def trained(weights: Weights) -> Weights:
    """The parameters that gradients move."""
    return {name: value for name, value in weights.items() if is_trained(name)}


def constants(weights: Weights) -> Weights:
    """The other parameters: tables of ids and selection biases."""
    return {name: value for name, value in weights.items() if not is_trained(name)}


def updated(
    state: TrainingState,
    optimiser: optax.GradientTransformation,
    gradients: Weights,
    loads: Weights,
    rate: jax.Array,
    balance_rate: jax.Array,
) -> TrainingState:
    """The state after one step.

    Args: gradients of the trained weights; loads {bias name: float32 [E]} rows each expert received; rate and
    balance_rate, step sizes of weights and selection biases.
    """
    weights = trained(state.weights)
    directions, moments = optimiser.update(gradients, state.moments, weights)
    moved = {name: weights[name] - rate * directions[name] for name in weights}
    fixed = dict(constants(state.weights))
    for name, load in loads.items():
        if name in fixed:
            fixed[name] = fixed[name] + balance_rate * jnp.sign(jnp.mean(load) - load)
    return TrainingState(moved | fixed, moments, state.step + 1)


def load_spread(loads: Weights) -> jax.Array:
    """Largest load over mean load, the worst layer's: 1 is perfectly even."""
    return jnp.max(jnp.stack([jnp.max(load) / jnp.mean(load) for load in loads.values()]))


def counted(routes: jax.Array, experts: int) -> jax.Array:
    """Rows each expert received, float32 [E], from expert ids of any shape."""
    return jnp.zeros((experts,), jnp.float32).at[routes.reshape(-1)].add(1.0)
