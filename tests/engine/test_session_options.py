"""What a session may be told about speculation, the repetition watchdog, and what it says of non-finite logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from mini_sessions import SHAPES, changed, compiled, control, prompt, run, session
from toy_models import assert_same_state, toy

from v4flash.engine.session import Session
from v4flash.engine.visible_state import visible_state, without_stale_rows
from v4flash.errors import V4FlashError
from v4flash.speculative.depth import DepthPolicy
from v4flash.speculative.filters import SamplingParams
from v4flash.speculative.lookup import LookupPolicy

LAYER = ("backbone", "layers", 0)
ADAPTIVE = DepthPolicy.make(adaptive=True, costs=(1.0, 1.2, 1.25, 1.5, 1.75))
COPYING = LookupPolicy.make(on=True, shortest=1, agreement=0.0)


def test_every_option_gives_the_same_greedy_text_and_state():
    plain = session()
    reference, _ = run(plain, prompt(30), 50, control(0))
    for options in ({}, {"blockwise": False}, {"depth": ADAPTIVE}, {"lookup": COPYING}):
        found = session()
        tokens, statistics = run(found, prompt(30), 50, control(4, **options))
        assert tokens == reference and statistics.generated == 50
        assert_same_state(toy("mini").config, found.state, plain.state, 0.0)


def test_copied_drafts_are_counted_apart():
    # A text that begins again: what follows was said before.
    _, statistics = run(session(), prompt(20) * 3, 40, control(4, lookup=COPYING))
    assert statistics.copied >= statistics.copied_accepted > 0
    assert statistics.to_json()["copied"] == statistics.copied
    drafter_steps = statistics.drafted[0] if statistics.drafted else 0
    assert drafter_steps < statistics.steps
    _, plain = run(session(), prompt(20) * 3, 40, control(4))
    assert plain.copied == 0


def test_seed_repeats_for_every_rule_and_k():
    warm = SamplingParams.make(temperature=1.0)
    for k, blockwise in ((0, True), (3, True), (3, False)):
        texts = [
            run(session(), prompt(9), 20, control(k, sampling=warm, seed=seed, blockwise=blockwise))[0]
            for seed in (4, 4, 5)
        ]
        assert texts[0] == texts[1] != texts[2]


def repeating() -> Session:
    """A session whose model always says token 0: all of its logits are equal."""
    return session(changed(("backbone", "head"), jnp.zeros_like))


@pytest.mark.parametrize("limit", [2, 3, 7, 8, 20])
@pytest.mark.parametrize("k", [0, 5])
def test_one_token_too_often_ends_the_text(limit, k):
    tokens, statistics = run(repeating(), prompt(6), 30, control(k, repeat_limit=limit))
    assert tokens == [0] * limit
    assert statistics.finish == "repeated" and statistics.generated == limit


def test_repetition_is_not_watched_unless_asked():
    tokens, statistics = run(repeating(), prompt(6), 30)
    assert tokens == [0] * 30 and statistics.finish == "length"
    tokens, statistics = run(repeating(), prompt(6), 5, control(repeat_limit=5))
    assert statistics.finish == "repeated", "the watchdog speaks first where both end at the same token"
    tokens, statistics = run(repeating(), prompt(6), 5, control(repeat_limit=6))
    assert statistics.finish == "length"


def with_nan(array):
    return array.reshape(-1).at[3].set(jnp.nan).reshape(array.shape)


BROKEN = [
    ((*LAYER, "attn", "wkv", "weight"), "layer 0", "layers.0.attn.wkv.weight"),
    ((*LAYER, "ffn", "shared_experts", "w1", "weight"), "layer 0", "layers.0.ffn.shared_experts.w1.weight"),
    (("backbone", "norm", "weight"), "the head", "norm.weight"),
    (("backbone", "head"), "the head", "head.weight"),
]


@pytest.mark.parametrize(("path", "layer", "tensor"), BROKEN)
def test_bad_weights_are_named(path, layer, tensor):
    with pytest.raises(V4FlashError, match="non-finite logits at token") as failure:
        run(session(changed(path, with_nan)), prompt(40), 5)
    assert f"first bad layer: {layer}, tensor {tensor};" in str(failure.value)
    assert failure.value.exit_code == 1


def test_a_bad_embedding_row_is_met_where_its_token_is():
    text = prompt(40)
    token = text[35]
    params = changed(("backbone", "embed"), lambda rows: rows.at[token, 2].set(jnp.inf))
    with pytest.raises(V4FlashError) as failure:
        run(session(params), text, 5)
    assert f"at token {text.index(token)}, first bad layer: the embedding, tensor embed.weight" in str(
        failure.value
    )


def test_overflow_without_bad_weights_is_said():
    params = changed((*LAYER, "ffn", "shared_experts", "w2", "weight"), lambda x: x * 1e38 * 1e3)
    finite = changed((*LAYER, "ffn", "shared_experts", "w2", "weight"), lambda x: jnp.sign(x) * 3e38)
    with pytest.raises(V4FlashError, match="tensor layers.0.ffn.shared_experts.w2.weight"):
        run(session(params), prompt(12), 5)
    with pytest.raises(V4FlashError, match="layer 0, no bad weight or cache.*float32"):
        run(session(finite), prompt(12), 5)


def test_a_damaged_cache_is_named_and_found_by_the_failing_pass_alone():
    found = session()
    run(found, prompt(20), 4, control(0))
    ring = found.state.windows[0]
    spoilt = ring.at[(int(found.state.length) - 2) % ring.shape[0], 0].set(jnp.nan)
    committed = int(found.state.length)
    found._state = found.state.replace(windows=(spoilt,))
    with pytest.raises(V4FlashError, match="cache 'window 0'; start a new session") as failure:
        run(found, [], 5, control(3))
    assert f"at token {committed}" in str(failure.value)


def test_nothing_is_diagnosed_without_a_fault():
    run(session(), prompt(25), 20)
    assert compiled().diagnosis.of_text(toy("mini").params, session().state, prompt(70), SHAPES.chunk) is None


def test_stale_rows_do_not_count():
    found = session()
    run(found, prompt(33), 12, control(5))
    config = toy("mini").config
    cleaned = without_stale_rows(config, found.state)
    assert_same_state(config, cleaned, found.state, 0.0)
    length = int(found.state.length)
    spoilt = dataclasses.replace(
        found.state,
        windows=tuple(ring.at[length % ring.shape[0]].set(jnp.nan) for ring in found.state.windows),
    )
    assert not np.isfinite(np.asarray(spoilt.windows[0])).all()
    assert all(np.isfinite(rows).all() for rows in visible_state(config, spoilt).values())
    assert np.isfinite(np.asarray(without_stale_rows(config, spoilt).windows[0])).all()
