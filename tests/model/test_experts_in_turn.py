"""Chosen experts one after the other: the contributions that gathering or running all of them gives."""

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import toy_json

from v4flash.config import ModelConfig
from v4flash.model.experts import NOWHERE, Experts, own_contributions
from v4flash.model.experts_in_turn import contributions_in_turn
from v4flash.model.numerics import Numerics

EXPERTS, ROWS, CHOSEN, BLOCK = 5, 6, 3, 32
CONFIG = ModelConfig.from_dict(toy_json("v4"))
# Sums in another order, then rounded to bfloat16, once between the products and once behind them.
TOLERANCE = 2 * 2.0**-7
FORMS = {
    "fp4": (Numerics(dtype=jnp.bfloat16, quantise=True), "fp4"),
    "fp8": (Numerics(dtype=jnp.bfloat16, quantise=True), "fp8"),
    "decoded": (Numerics(dtype=jnp.bfloat16, packed=False), "fp4"),
}


def stack(numerics: Numerics, storage: str) -> Experts:
    """Experts of random weights."""
    made = Experts(dataclasses.replace(CONFIG, expert_dtype=storage), numerics, EXPERTS)
    random = np.random.default_rng(2)
    for path, variable in nnx.to_flat_state(nnx.state(made)):
        shape, dtype = variable[...].shape, variable[...].dtype
        if path[-1] == "scale":
            value = random.integers(119, 123, shape)
        elif dtype == jnp.uint8:
            value = random.integers(0, 256, shape)
        else:
            value = random.normal(size=shape) * shape[-1] ** -0.5
        variable[...] = jnp.asarray(value, dtype)
    return made


def choices(seed: int, nowhere: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, different places of each with some of them NOWHERE, and weights."""
    random = np.random.default_rng(seed)
    places = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(ROWS)])
    places[random.random(places.shape) < nowhere] = NOWHERE
    x = random.normal(size=(ROWS, CONFIG.hidden_size))
    weights = random.uniform(0.1, 1, places.shape)
    return jnp.asarray(x, jnp.float32), jnp.asarray(places, jnp.int32), jnp.asarray(weights, jnp.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [None, BLOCK, 48])
def test_contributions_are_those_of_gathered_experts(form, rows):
    held = stack(*FORMS[form])
    x, places, weights = choices(3, 0.5)
    x = x.astype(jnp.bfloat16)
    made = contributions_in_turn(held, x, places, weights, every=False, rows=rows)
    expected = own_contributions(held, x, places, weights, every=False)
    assert made.dtype == jnp.float32 and made.shape == (ROWS, CHOSEN, CONFIG.hidden_size)
    np.testing.assert_allclose(made, expected, atol=TOLERANCE * float(jnp.abs(expected).max()))
    away = np.asarray(places) == NOWHERE
    assert away.any() and not away.all()
    assert not np.asarray(made)[away].any() and np.asarray(made)[~away].any(axis=-1).all()


def test_float32_has_the_bits_of_own_contributions():
    held = stack(Numerics(), "fp4")
    arguments = choices(4, 0.5)
    for every in (False, True):
        made = contributions_in_turn(held, *arguments, every=every, rows=BLOCK)
        np.testing.assert_array_equal(made, own_contributions(held, *arguments, every=every))


def test_an_expert_chosen_twice_by_a_row_counts_with_both_weights():
    held = stack(*FORMS["decoded"])
    x, _, weights = choices(5, 0.0)
    x, places = x.astype(jnp.bfloat16), jnp.full((ROWS, CHOSEN), 2, jnp.int32).at[:, 1].set(4)
    made = contributions_in_turn(held, x, places, weights, every=True)
    expected = own_contributions(held, x, places, weights, every=True)
    np.testing.assert_allclose(made, expected, atol=TOLERANCE * float(jnp.abs(expected).max()))
    assert not np.asarray(made)[:, 2].any() and np.asarray(made)[:, 0].any()


def test_nothing_chosen_is_nothing_computed():
    held = stack(*FORMS["fp4"])
    x, places, weights = choices(6, 1.1)
    assert not np.asarray(contributions_in_turn(held, x, places, weights, every=False)).any()


@pytest.mark.parametrize("form", FORMS)
def test_decoded_rows_are_rows_of_the_decoded_weight(form):
    weight = stack(*FORMS[form]).w2
    for start in (0, BLOCK):
        found = weight.decoded_rows(jnp.int32(3), jnp.int32(start), BLOCK)
        np.testing.assert_array_equal(found, weight.decoded()[3, start : start + BLOCK])
