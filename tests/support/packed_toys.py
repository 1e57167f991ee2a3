"""Toy models with their weights stored as published, FP8 and FP4 payloads with scales: what packing takes."""

import functools

import flax.nnx as nnx
import jax.numpy as jnp
from toy_models import V4_TOY, V41_TOY, Toy, random_toy, toy, with_table_sizes

from pallas_kernels import formats
from v4flash.config import ModelConfig
from v4flash.model.drafter import Model
from v4flash.model.numerics import Numerics

_FEW = dict(hc_sinkhorn_iters=2)
# As few layers as have compressed entries, an index, and with V4.1 candidates and an n-gram memory.
SMALL = {
    "v4": V4_TOY | _FEW | dict(
        num_hidden_layers=1, compress_ratios=[4, 0], num_hash_layers=0, dspark_target_layer_ids=[0]
    ),
    "v41": V41_TOY | _FEW | dict(
        num_hidden_layers=2, compress_ratios=[2, 1, 0], kv_source_layer_ids=[0, 1], index_source_layer_ids=[0, 1],
        candidate_source_layer_id=1, engram_layer_ids=[1], dspark_target_layer_ids=[0, 1],
    ),
}  # fmt: skip


@functools.cache
def small_toy(family: str) -> Toy:
    """A toy of one or two layers with payloads."""
    return with_payloads(random_toy(ModelConfig.from_dict(with_table_sizes(SMALL[family])), quantise=True))


@functools.cache
def whole_toy(family: str) -> Toy:
    """The toy of a family with payloads."""
    return with_payloads(toy(family, quantise=True))


def with_payloads(plain: Toy) -> Toy:
    """A toy with decoded weights as one that stores FP8 and FP4 payloads with scales, and bf16."""
    config, numerics = plain.config, Numerics(quantise=plain.numerics.quantise, packed=True)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Model(config, numerics)))
    decoded = {path: variable.get_value() for path, variable in nnx.to_flat_state(plain.params)}
    variables, payloads, chosen = nnx.to_flat_state(abstract), {}, []
    for path, variable in variables:
        dtype, rows = variable.get_value().dtype, "engram" in path and "embed" in path
        if path[-1] != "weight" or dtype not in (jnp.float8_e4m3fn, jnp.uint8):
            continue
        if dtype == jnp.uint8:
            pair = formats.encode_fp4(decoded[path])
        elif rows:
            pair = (
                part[:, 0] for part in formats.encode_fp8(decoded[path][:, None], config.weight_block_size)
            )
        else:
            pair = formats.encode_fp8(decoded[path], config.weight_block_size)
        payloads |= zip((path, (*path[:-1], "scale")), pair, strict=True)
    for path, variable in variables:
        value, shape = payloads.get(path, decoded.get(path)), variable.get_value()
        assert value.shape == shape.shape, path
        chosen.append((path, variable.replace(value.astype(shape.dtype))))
    return Toy(config, numerics, graphdef, nnx.from_flat_state(chosen))
