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
from v4flash.config import ModelConfig
from v4flash.model.drafter import Block
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.randomness import Purpose, seed_key, uniform
from v4flash.speculative.rejection import propose

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
TOKENS, ANCHOR, FIRST = 5, jnp.int32(17), 100
# Products of 16 terms summed in another order.
TOLERANCE = 1e-5


@pytest.mark.parametrize("temperature,min_p", [(0.0, 0.0), (1.0, 0.0), (1.7, 0.2)])
def test_tokens_and_logits_equal_the_drafters(temperature, min_p):
    toy = toy_models.toy("v4")
    config, drafter = toy.config, toy.model.drafter
    params, key = SamplingParams.make(temperature=temperature, min_p=min_p), seed_key(5)
    base = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, config.vocab_size)).astype(np.float32))

    def draw(j, logits):
        return propose(logits, params, key, FIRST + j).token, None

    def by_the_model(base):
        block = Block(jnp.zeros((TOKENS, config.hidden_size)), base, [], [])
        drafts = drafter.chain(block, ANCHOR, draw)[0]
        return drafts.ids, drafts.logits

    expected_ids, expected_logits = jax.jit(by_the_model)(base)
    markov = drafter.stages[-1].markov_head
    uniforms = uniform(key, FIRST + jnp.arange(TOKENS), Purpose.DRAFT, draws=(2,))
    found, logits = jax.jit(reference.chain, static_argnums=0)(
        ChainSpec(config.vocab_size, config.draft.markov_rank), base, ANCHOR, markov.embed[...],
        markov.head[...], jnp.int32(TOKENS), Draw(params.temperature, params.min_p, uniforms),
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected_ids)
    np.testing.assert_allclose(logits, expected_logits, rtol=TOLERANCE, atol=TOLERANCE)


def test_draws_follow_the_law():
    spec, draws = ChainSpec(40, 2), 4000
    logits = jnp.asarray(np.random.default_rng(1).normal(size=40).astype(np.float32)) * 2
    draw = Draw(jnp.float32(1.3), jnp.float32(0.05), jnp.zeros((1, 2)))
    uniforms = jax.random.uniform(jax.random.key(2), (draws, 2))
    tokens = jax.jit(jax.vmap(lambda pair: reference.drawn(spec, logits, draw, pair)))(uniforms)
    law = np.asarray(reference.weights(logits, draw))
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
