"""The numerics gate: packed weights by the definitions pass, a broken weight does not, and what the verdict weighs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_toys import small_toy, with_payloads
from toy_models import FAMILIES
from toy_models import toy as random_model

from v4flash.fidelity import gate, gate_sides
from v4flash.fidelity.gate import Distance, Output, Text
from v4flash.model.fused.bodies import ReferenceBodies
from v4flash.model.fused.packing import pack_model

CONTEXT, TOKENS = 64, 8
PROMPTS = [np.random.default_rng(seed).integers(2, 90, 9 + seed).tolist() for seed in range(2)]


# Every time a layer whose attention sees its window alone; with the slow tests those with all operations.
@pytest.fixture(
    scope="module", params=["mini", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def sides(request):
    """The three models of a toy, on programs that nobody optimised."""
    jax.config.update("jax_disable_most_optimizations", True)
    small = request.param == "mini"
    toy = with_payloads(random_model("mini", quantise=True)) if small else small_toy(request.param)
    config = dataclasses.replace(toy.config, draft=None)
    model = toy.model
    model.drafter = None
    graphdef, params = gate_sides.nnx.split(model)
    reference = gate_sides.plain_side(graphdef, params, config, toy.numerics, CONTEXT, None)
    packed = pack_model(model)
    found = {
        "fused": gate_sides.packed_side(packed, config, toy.numerics, ReferenceBodies, CONTEXT, None),
        "reference": reference,
        "noise": gate_sides.jittered(reference, gate_sides.ROUNDED),
    }
    jax.config.update("jax_disable_most_optimizations", False)
    return found


def judged(sides):
    return gate.run(sides, PROMPTS, TOKENS, True, lambda sentence: None)


def test_packed_weights_pass_and_a_broken_matrix_does_not(sides):
    record = judged(sides)
    assert record["right"] and record["problems"] == [], record
    assert record["positions"] == sum(map(len, PROMPTS)) + 2 * TOKENS
    assert 0 < max(record["noise"]["layers"]) < 0.1 and max(record["fused"]["layers"]) < 0.1
    assert json.loads(json.dumps(record, allow_nan=False)) == record

    packed = sides["fused"].params
    head = -packed.head
    broken = dataclasses.replace(sides["fused"], params=dataclasses.replace(packed, head=head))
    record = judged(sides | {"fused": broken})
    assert not record["right"]
    assert any(problem.startswith("law of the next token") for problem in record["problems"])
    assert not any(
        problem.startswith("layer") for problem in record["problems"]
    )  # layers end before the head


def test_a_broken_layer_is_named(sides):
    packed = sides["fused"].params
    first = packed.layers[0]
    floats = dataclasses.replace(first.floats, data=first.floats.data * 1.05)
    layers = (dataclasses.replace(first, floats=floats), *packed.layers[1:])
    broken = dataclasses.replace(
        sides["fused"], params=dataclasses.replace(packed, layers=type(packed.layers)(layers))
    )
    record = judged(sides | {"fused": broken})
    assert not record["right"] and record["problems"][0].startswith("layer 0: relative error")


def test_reading_and_saying_agree(sides):
    """Passes of 8 rows and of one give the same choices, whatever the length of the prompt."""
    reference = sides["reference"]
    for prompt in ([5], PROMPTS[0][:8], PROMPTS[1]):
        said = reference.greedy(prompt, 3)
        read = reference.read([*prompt, *said])
        assert read.logits.shape[0] == read.streams.shape[1] == len(prompt) + 3
        assert read.logits.argmax(1)[len(prompt) - 1 : -1].tolist() == said


def scripted(*rows, streams=1.0) -> Output:
    logits = np.asarray(rows, np.float32)
    return Output(logits, np.full((2, len(rows), 1, 2), streams, np.float32))


def test_distance():
    reference = scripted([0.0, 1.0, 3.0], [2.0, 0.0, 1.0], [0.0, 4.0, 3.5])
    found = scripted([0.0, 1.0, 3.0], [1.0, 0.0, 1.5], [0.0, 3.0, 3.5], streams=1.1)
    text = Text((9, 2, 0), 1)
    assert gate.first_other_token(Text((9, 2, 0), 1), found, reference) == (1, 1.0)
    assert gate.first_other_token(Text((9, 2), 1), found, reference) is None
    made = gate.distance([text], [found], [reference])
    assert made.flips == pytest.approx(2 / 3) and made.shift == 1.0
    assert made.layers == pytest.approx((0.1, 0.1))
    laws = np.exp(reference.logits) / np.exp(reference.logits).sum(1, keepdims=True)
    other = np.exp(found.logits) / np.exp(found.logits).sum(1, keepdims=True)
    divergences = (laws * np.log(laws / other)).sum(1)
    assert made.divergence == pytest.approx(divergences.mean(), rel=1e-5)
    assert made.worst == pytest.approx(divergences.max(), rel=1e-5)
    assert gate.distance([text], [reference], [reference]).divergence == 0
    broken = gate.distance([text], [scripted([np.nan] * 3, *found.logits[1:], streams=np.nan)], [reference])
    assert broken.divergence == np.inf and broken.layers == (np.inf, np.inf)


NOISE = Distance((1e-3, 2e-3), 1e-4, 1e-3, 0.01, 0.1, (None, None))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"layers": (3e-3, 7e-3)}, None),
        ({"layers": (1e-3, 9e-3)}, "layer 1: relative error 9.0e-03, noise 2.0e-03"),
        ({"layers": (float("inf"), float("inf"))}, "layer 0: relative error inf"),
        ({"divergence": 1.5e-3}, None),
        ({"divergence": 1.7e-3}, "law of the next token: divergence 1.7e-03"),
        ({"divergence": float("nan")}, "law of the next token"),
        ({"flips": 0.04}, None),
        ({"flips": 0.06}, "likeliest token: 6.0 % flipped, noise 1.0 %"),
        ({"texts": (None, (3, 0.7))}, None),
        ({"texts": (None, (3, 0.9))}, "text 1 is another from token 3 on: their logits are 0.9 apart"),
    ],
)
def test_what_is_too_far(changed, told):
    said = gate.problems(dataclasses.replace(NOISE, **changed), NOISE, gate.UNROUNDED)
    assert len(said) == (told is not None)
    assert told is None or said[0].startswith(told)


def test_rounded_models_may_flip_a_rounding_where_the_noise_has_none():
    quiet = dataclasses.replace(NOISE, layers=(1e-7, 1e-7), divergence=1e-14)
    flipped = dataclasses.replace(quiet, layers=(1e-3, 1e-3), divergence=5e-6)
    assert gate.problems(flipped, quiet, gate.ROUNDED) == []
    assert len(gate.problems(flipped, quiet, gate.UNROUNDED)) == 2


def test_jitter_moves_the_embedding_alone(sides):
    before, after = (
        dict(gate_sides.nnx.to_flat_state(sides[name].params)) for name in ("reference", "noise")
    )
    changed = [path for path in before if before[path].get_value() is not after[path].get_value()]
    assert changed == [gate_sides.EMBEDDING]
    embed, moved = (params[gate_sides.EMBEDDING].get_value() for params in (before, after))
    assert embed.dtype == jnp.float32
    np.testing.assert_allclose(moved, embed, rtol=1.1 * gate_sides.ROUNDED)
