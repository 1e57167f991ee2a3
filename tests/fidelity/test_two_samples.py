"""Sampled texts with and without drafts, compared as whole texts: of a small model, and of made-up laws."""

import functools

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import pytest
from mini_sessions import control, run, session
from toy_models import toy
from two_samples import same_law_chance

from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import LookupPolicy

# A sound decoder falls below it for one seed in a thousand, and seeds are fixed.
LEVEL = 1e-3
SAMPLING = SamplingParams.make(temperature=1.0, top_k=12)
TOKENS, PROMPT = 8, [7, 30, 52]
WAYS = {
    "block": {},
    "token": {"blockwise": False},
    "adaptive, copying": {
        "depth": DepthPolicy.make(adaptive=True, costs=(1.0, 1.05, 1.4, 1.7, 2.0), acceptance=(0.6,)),
        "lookup": LookupPolicy.make(on=True, shortest=1, agreement=0.02),
    },
}


def made_up(law: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """Texts whose next token depends on the one before."""
    random = np.random.default_rng(seed)
    texts = np.zeros((count, length), int)
    for text in texts:
        for at in range(1, length):
            text[at] = random.choice(len(law), p=law[text[at - 1]])
    return texts


def test_texts_of_one_law_pass_and_a_bent_law_is_found():
    law = np.random.default_rng(0).dirichlet(np.ones(10), 10)
    texts = made_up(law, 150, 12, 1)
    same = [
        same_law_chance([made_up(law, 40, 12, seed)], [made_up(law, 30, 12, seed + 50)], 200)
        for seed in range(2, 12)
    ]
    assert min(same) > 0.005 and max(same) > 0.5
    # Two tokens of every law are drawn too often, as if their refusals were forgotten.
    bent = law.copy()
    bent[:, 3:5] *= 2
    bent /= bent.sum(axis=1, keepdims=True)
    assert same_law_chance([texts], [made_up(bent, 150, 12, 2)], 999) < 0.002
    # The same tokens in the wrong order: single tokens say nothing, pairs do.
    assert same_law_chance([texts], [np.flip(made_up(law, 150, 12, 3), axis=1)], 999) < 0.002


@functools.cache
def soft_params() -> nnx.State:
    """Weights of the toy by which the newest token decides the law of the next, and the drafter nearly knows it."""
    random, tiny = np.random.default_rng(8), toy("mini")
    arrays = {path: np.array(value.get_value()) for path, value in nnx.to_flat_state(tiny.params)}
    for path, value in arrays.items():
        if path[-2] in ("wo_b", "w2"):
            value[:] = 0
        elif path[-2] == "norm":
            value[:] = 1
    vocabulary, width = arrays["backbone", "embed"].shape
    embed = random.normal(size=(vocabulary, width))
    embed *= np.sqrt(width) / np.linalg.norm(embed, axis=1, keepdims=True)
    # The noise token is nothing, so that behind its first row the drafter has its token bias alone.
    embed[tiny.config.draft.noise_token_id] = 0
    head = random.normal(size=(vocabulary, 12)) @ random.normal(size=(12, width)) * 0.06
    left, sizes, right = np.linalg.svd(embed @ head.T * 0.8, full_matrices=False)
    rank, stage = tiny.config.draft.markov_rank, ("drafter", "stages", 0, "markov_head")
    arrays |= {
        ("backbone", "embed"): embed,
        ("backbone", "head"): head,
        (*stage, "embed"): left[:, :rank] * sizes[:rank],
        (*stage, "head"): right[:rank].T,
    }
    return nnx.from_flat_state(
        [
            (path, variable.replace(jnp.asarray(arrays[path], jnp.float32)))
            for path, variable in nnx.to_flat_state(tiny.params)
        ]
    )


def sampled(k: int, seeds: range, **options) -> tuple[np.ndarray, float]:
    """Texts [n, TOKENS] behind one prompt, one for each seed, and the share of drafts accepted."""
    texts, accepted, drafted = [], 0, 0
    for seed in seeds:
        settings = control(k, sampling=SAMPLING, seed=seed, **options)
        tokens, statistics = run(session(soft_params()), PROMPT, TOKENS, settings)
        texts.append(tokens)
        accepted += sum(statistics.accepted) + statistics.copied_accepted
        drafted += sum(statistics.drafted) + statistics.copied
    return np.array(texts), accepted / max(drafted, 1)


def check(ways, count: int) -> None:
    plain, _ = sampled(0, range(count))
    for number, (name, options) in enumerate(ways.items(), 1):
        drafted, accepted = sampled(5, range(number * count, (number + 1) * count), **options)
        assert 0.2 < accepted < 0.95, f"{name}: drafts of {accepted} prove little"
        assert same_law_chance([plain], [drafted]) > LEVEL, name


def test_drafting_leaves_the_law_of_texts_alone():
    check({"block": WAYS["block"]}, 60)


@pytest.mark.slow
def test_drafting_leaves_the_law_of_many_texts_alone():
    check(WAYS, 1500)
