"""Toy models with cold experts in the host's memory."""

import functools

import flax.nnx as nnx
import numpy as np
from toy_models import Toy

from v4flash.engine import host_way
from v4flash.engine.backends import ChangingWeights
from v4flash.model.host_experts import HostExperts
from v4flash.placement.host_memory import host_memory
from v4flash.placement.table import Placement


def placement(model: Toy, hot: int, seed: int = 0) -> Placement:
    """A table with `hot` hot experts of each layer, chosen by random counts."""
    shape = (model.config.num_hidden_layers, model.config.n_routed_experts)
    return Placement.from_counts(np.random.default_rng(seed).random(shape), hot)


def tiered(model: Toy, table: Placement, spare: int) -> tuple[nnx.GraphDef, ChangingWeights]:
    """The toy with its experts cut by the table, as opening a checkpoint does it."""
    memory, cut = host_memory(), []
    for path, variable in nnx.to_flat_state(model.params):
        parts = host_way.put(table, memory, path, variable.get_value())
        cut += [(own, variable.replace(array)) for own, array in parts.items()]
    routed = functools.partial(HostExperts, hot=table.hot, spare=spare)
    return host_way.tiered(nnx.from_flat_state(cut), model.config, model.numerics, routed, table)
