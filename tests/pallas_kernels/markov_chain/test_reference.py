"""The meaning of the Markov chain against the model's drafter and the sampling laws."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from pallas_kernels.markov_chain import reference
from pallas_kernels.markov_chain.reference import Draw
from pallas_kernels.markov_chain.specs import SPECS, ChainSpec
from pallas_kernels.sampling_law.reference import Filters, weights
from v4flash.config import ModelConfig
from v4flash.model.drafter import Block
from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.randomness import Purpose, seed_key, uniform
from v4flash.speculative.rejection import propose

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
TOKENS, ANCHOR, FIRST = 5, jnp.int32(17), 100
# Products of 16 terms summed in another order.
TOLERANCE = 1e-5


OPTIONS = [
    {},
    {"temperature": 1.7, "min_p": 0.2},
    {"top_k": 9},
    {"temperature": 0.6, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.02},
]


def draw_of(params: SamplingParams, uniforms) -> Draw:
    return Draw(Filters.of(params), uniforms)


@pytest.mark.parametrize("options", [None, *OPTIONS], ids=str)
def test_tokens_and_what_they_come_from_equal_the_drafters(options):
    """Greedily (None) the logits, when drawn the laws."""
    toy = toy_models.toy("v4")
    config, drafter = toy.config, toy.model.drafter
    params = SamplingParams.make(**({"temperature": 0.0} if options is None else options))
    key = seed_key(5)
    base = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, config.vocab_size)).astype(np.float32))

    def draw(j, logits):
        return propose(logits, params, key, FIRST + j).token, target_law(logits, params)

    def by_the_model(base):
        block = Block(jnp.zeros((TOKENS, config.hidden_size)), base, [], [])
        drafts, laws = drafter.chain(block, ANCHOR, draw)
        return drafts.ids, drafts.logits if options is None else laws

    expected_ids, expected = jax.jit(by_the_model)(base)
    markov = drafter.stages[-1].markov_head
    uniforms = uniform(key, FIRST + jnp.arange(TOKENS), Purpose.DRAFT, draws=(2,))
    found, by = jax.jit(reference.chain, static_argnums=0)(
        ChainSpec(config.vocab_size, config.draft.markov_rank), base, ANCHOR, markov.embed[...],
        markov.head[...], jnp.int32(TOKENS), None if options is None else draw_of(params, uniforms),
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected_ids)
    np.testing.assert_allclose(by, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("values", [3, 1000])
def test_weights_are_the_sampling_law(options, values):
    """Also where most logits are equal, so that ids decide which of them stay."""
    random = np.random.default_rng(values)
    logits = jnp.asarray(random.integers(0, values, size=50).astype(np.float32)) / values * 4
    params = SamplingParams.make(**options)
    found = weights(logits, Filters.of(params))
    np.testing.assert_allclose(found / found.sum(), target_law(logits, params), rtol=TOLERANCE)


def test_draws_follow_the_law():
    spec, draws = ChainSpec(40, 2), 4000
    logits = jnp.asarray(np.random.default_rng(1).normal(size=40).astype(np.float32)) * 2
    masses = weights(logits, Filters.of(SamplingParams.make(temperature=1.3, top_p=0.95, min_p=0.05)))
    uniforms = jax.random.uniform(jax.random.key(2), (draws, 2))
    tokens = jax.jit(jax.vmap(lambda pair: reference.drawn(spec, masses, pair)))(uniforms)
    law = np.asarray(masses)
    law = law / law.sum()
    counts = np.bincount(tokens, minlength=40)
    assert not np.any(counts[law == 0])
    # Five standard deviations of a count; 40 of them are looked at.
    assert np.all(np.abs(counts - draws * law) <= 5 * np.sqrt(draws * law) + 1)


@pytest.mark.parametrize(
    "name,file",
    [("v4-flash", "v4-flash-0731"), ("v4.1-flash", "v4.1-flash"), ("demo", "demo"), ("twin", "twin")],
)
def test_specs_are_those_of_the_configurations(name, file):
    config = ModelConfig.from_file(CONFIGS / f"{file}.json")
    assert SPECS[name] == ChainSpec(config.vocab_size, config.draft.markov_rank)
