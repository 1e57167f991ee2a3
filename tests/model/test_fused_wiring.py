"""The model on packed weights, run on the operations' definitions, against the plain modules.

The order of operations, packing and joining of matrices, rotations, caches and taps are the same whichever body an
operation has; that the fused bodies compute what the definitions say is tested with each operation.
"""

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_toys import whole_toy
from toy_models import assert_same_state

from v4flash.model.drafter import Drawing
from v4flash.model.fused.arena import Arena
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.model import ROWS, FusedModel
from v4flash.model.fused.packing import pack_model
from v4flash.speculative.filters import LAWS, UNRANKED, SamplingParams
from v4flash.speculative.randomness import invert

# Sums of float32 in another order, behind a few layers; a rounding that flips moves a logit by about this much.
TOLERANCE = 2e-4
# The toy's weights are noise: where a rounding of the drafter falls on the edge, its whole block comes out other.
UNLIKE_BLOCKS = 1
CONTEXT = 160
BLOCK, WANTED = 5, 2


def one_pass(model, tokens, state, count):
    """Everything a step asks of a model: logits, routes, state, and a drafted block behind it."""
    output, state = model.backbone.trunk(tokens, state, count)
    logits = model.backbone.logits(output.hidden)
    state = model.drafter.commit(state, output.taps, state.length, count).advance(count)
    block = model.drafter.block(model.backbone, state, tokens[0], BLOCK, jnp.int32(BLOCK))
    drafts = model.drafter.greedy_chain(block, tokens[0], jnp.int32(BLOCK))

    def likeliest(j, row):
        return jnp.argmax(row).astype(jnp.int32), None

    taken, _ = model.drafter.chain(block, tokens[0], likeliest)
    some, _ = model.drafter.chain(block, tokens[0], likeliest, lambda j, confidence: j < WANTED)
    place = jnp.arange(BLOCK)
    alike = (taken.ids == drafts.ids) & ((some.ids == taken.ids) | (place >= WANTED))
    alike &= (taken.count == BLOCK) & (some.count == WANTED)
    for ended, known in ((taken, BLOCK), (some, WANTED + 1)):
        alike &= (jnp.abs(ended.confidence - drafts.confidence) < TOLERANCE) | (place >= known)
    drafts = dataclasses.replace(drafts, ids=jnp.where(alike, drafts.ids, -1))
    drawn = drawn_block(model, block, tokens[0])
    return logits, output.routes, state, block.base_logits, drafts.ids, drafts.confidence, *drawn


def drawn_block(model, block, anchor):
    """The tokens drawn from a block, their laws and confidences, of those that are wanted."""
    sampling = SamplingParams.make(temperature=1.3)
    uniforms = jnp.asarray(np.random.default_rng(9).uniform(size=(BLOCK, 2)), jnp.float32)
    drawing = Drawing(
        sampling,
        lambda: uniforms,
        LAWS[UNRANKED:],
        invert,
        lambda j, confidence: j < WANTED,
        jnp.int32(WANTED),
    )
    made = model.drafter.drawn_chains(block, anchor, drawing)[0]()
    count = jnp.where(made.count == WANTED, WANTED, -1)
    return made.ids[:WANTED], made.laws[:WANTED], made.confidence[: WANTED + 1], count


# The family with more operations every time, both with the slow tests.
@pytest.mark.parametrize("family", ["v41", pytest.param("v4", marks=pytest.mark.slow)])
def test_packed_model_computes_what_the_modules_do(family):
    plain = whole_toy(family)
    packed = pack_model(plain.model)
    config, numerics = plain.config, plain.numerics
    modules = jax.jit(lambda params, *rest: one_pass(nnx.merge(plain.graphdef, params), *rest))
    joined = jax.jit(
        lambda packed, *rest: one_pass(FusedModel(config, numerics, packed, ReferenceBodies), *rest)
    )
    first = second = plain.state(CONTEXT, ROWS)
    ids, place, blocks, alike = np.random.default_rng(3).integers(2, 90, CONTEXT), 0, 0, 0
    for count in (8, 3, 8, 1, 5, 8, 7, *[8] * 13):  # past the window, and over a closing group of 128
        tokens = jnp.asarray(np.resize(ids[place : place + count], ROWS), jnp.int32)
        logits, routes, first, *drafted = modules(plain.params, tokens, first, jnp.int32(count))
        found, found_routes, second, *found_drafted = joined(packed, tokens, second, jnp.int32(count))
        place += count
        np.testing.assert_allclose(found[:count], logits[:count], rtol=0, atol=TOLERANCE)
        blocks += 1
        alike += all(
            np.allclose(
                ours, theirs, rtol=0, atol=TOLERANCE
            )  # base logits, ids, confidence; and of drawn tokens
            for ours, theirs in zip(found_drafted, drafted, strict=True)
        )
        for ours, theirs in zip(found_routes, routes, strict=True):
            assert ours[:count].tolist() == theirs[:count].tolist()
        assert_same_state(config, second, first, TOLERANCE)
    assert alike >= blocks - UNLIKE_BLOCKS


def test_arena_gives_back_what_it_took():
    arrays = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.ones((1,)),
        "c": jnp.zeros((0, 4)),
        "d": jnp.arange(70.0),
    }
    arena = Arena.pack(arrays, jnp.float32)
    for name, array in arrays.items():
        np.testing.assert_array_equal(arena[name], array)
    assert "a" in arena and "e" not in arena
    with pytest.raises(KeyError):
        arena["e"]
    assert len(jax.tree.leaves(arena)) == 1
