"""The expert kernels, instruction by instruction, against their reference. Run by test_interpreted.py."""

import dataclasses
import functools

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from pallas_kernels import tuning
from pallas_kernels.experts import fused, reference
from pallas_kernels.experts.specs import DEMO, TWIN, ExpertSpec

ptx_emulator.teach_interpreter()

# float32 sums of the same products in another order.
SUM_TOLERANCE = 1e-5
# One step of the kept fp16 rows (2^-10): rounded to odd, they show the last bit of the sum.
HIDDEN_TOLERANCE = 2.0**-10
# One step of bfloat16: a sum near a tie rounds the other way.
BFLOAT16_STEP = 2.0**-7

# One and several turns of the loops, tails for some warps only, and rows that end inside a chunk.
CASES = {
    "demo": (dataclasses.replace(DEMO, experts=4), 8),
    "twin": (dataclasses.replace(TWIN, experts=4), 1),
    "one chunk": (ExpertSpec(128, 32, 2, 1, 32, limit=0.5, dtype="float32"), 8),
    "long hidden rows": (ExpertSpec(32, 1152, 2, 1, 128), 1),
}
WIDE = ExpertSpec(2208, 32, 2, 1, 32)  # eight warps, two turns and a tail for gate and up


@functools.partial(jax.jit, static_argnums=0)
def _reference_gate_up(spec, x, routed, shared, routes):
    return reference.gate_up(x, routed, shared, routes, limit=spec.limit, dtype=jnp.dtype(spec.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _reference_down(spec, hidden, routed, shared, routes):
    return reference.down(
        hidden, routed, shared, routes,
        chosen=spec.chosen, round_block=spec.block, dtype=jnp.dtype(spec.dtype),
    )  # fmt: skip


def _gate_up(spec, x, routed, shared, routes):
    return fused.gate_up(
        x, routed, shared, routes, limit=spec.limit, scale_block=spec.block, dtype=jnp.dtype(spec.dtype)
    )


def _down(spec, hidden, routed, shared, routes):
    return fused.down(
        hidden, routed, shared, routes,
        chosen=spec.chosen, round_block=spec.block, scale_block=spec.block, dtype=jnp.dtype(spec.dtype),
    )  # fmt: skip


def _used(routes) -> np.ndarray:
    """bool [1 + NE, R]: rows of entries that are computed."""
    return np.concatenate([np.ones((1, 8), bool), np.asarray(routes.slot) >= 0])


def _close(found, expected, tolerance: float) -> None:
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def _untouched(array) -> bool:
    """Whether every byte is still the poison that outputs start with."""
    return bool((np.ascontiguousarray(array).view(np.uint8) == 0x7F).all())


@pytest.mark.parametrize("name", CASES)
def test_both_launches(name):
    spec, live = CASES[name]
    routed, shared = expert_cases.packed(spec, 0)
    routes = expert_cases.random_routes(spec, 1, live, entries=spec.experts + 1)
    x = expert_cases.rounded_rows(spec, 2)
    expected = _reference_gate_up(spec, x, routed, shared, routes)
    found = _gate_up(spec, x, routed, shared, routes)
    used = _used(routes)
    step = SUM_TOLERANCE if spec.dtype == "float32" else BFLOAT16_STEP
    _close(np.asarray(found.rows)[used], np.asarray(expected.rows)[used], max(HIDDEN_TOLERANCE, step))
    _close(np.asarray(found.peaks)[used], np.asarray(expected.peaks)[used], max(HIDDEN_TOLERANCE, step))
    assert _untouched(np.asarray(found.rows)[~used])

    poisoned = jax.tree.map(lambda a: jnp.where(used[..., None], a, jnp.nan), expected)
    expected = _reference_down(spec, expected, routed, shared, routes)
    found = _down(spec, poisoned, routed, shared, routes)
    _close(np.asarray(found)[:live], np.asarray(expected)[:live], step)
    assert _untouched(np.asarray(found)[live:, : spec.chosen])


def test_eight_warps():
    routed, shared = expert_cases.packed(WIDE, 0)
    routes = expert_cases.random_routes(WIDE, 1, 1, entries=1)
    x = expert_cases.rounded_rows(WIDE, 2)
    expected = _reference_gate_up(WIDE, x, routed, shared, routes)
    found = _gate_up(WIDE, x, routed, shared, routes)
    used = _used(routes)
    _close(np.asarray(found.rows)[used], np.asarray(expected.rows)[used], BFLOAT16_STEP)


WALKED = ExpertSpec(128, 512, 4, 2, 128)  # four tiles an expert


@pytest.mark.parametrize(
    ("programs", "live", "rounded"),
    [
        (5, 8, True),  # programs that begin and end inside experts
        (3, 1, True),  # one has all tiles, of two experts
        (40, 8, True),  # more programs than tiles: some have none
        (5, 8, False),
    ],
)
def test_programs_that_walk_over_tiles(programs, live, rounded):
    """Down by few programs has the bits of down by one program a tile."""
    routed, shared = expert_cases.packed(WALKED, 0)
    routes = expert_cases.random_routes(WALKED, 1, live, entries=WALKED.experts + 1)
    x = expert_cases.rounded_rows(WALKED, 2)
    hidden = reference.gate_up(x, routed, shared, routes, limit=WALKED.limit, rounded=rounded)
    poisoned = jax.tree.map(lambda a: jnp.where(_used(routes)[..., None], a, jnp.nan), hidden)
    options = dict(chosen=WALKED.chosen, round_block=128 if rounded else 0, scale_block=128)
    expected = np.asarray(fused.down(poisoned, routed, shared, routes, **options))
    with tuning.trying("experts", "walking down 128x512", {"programs": programs, "shared": 2, "warps": 4}):
        assert fused.walking_tile(128, 512)
        found = np.asarray(fused.down(poisoned, routed, shared, routes, **options))
    assert _untouched(found[live:, : WALKED.chosen])
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_programs_that_walk_over_no_tiles():
    """No expert listed: only the shared one is computed."""
    routed, shared = expert_cases.packed(WALKED, 0)
    routes = expert_cases.random_routes(WALKED, 5, 8, entries=2)._replace(count=jnp.zeros(1, jnp.int32))
    hidden = reference.gate_up(
        expert_cases.rounded_rows(WALKED, 6), routed, shared, routes, limit=WALKED.limit
    )
    options = dict(chosen=WALKED.chosen, round_block=128)
    with tuning.trying("experts", "walking down 128x512", {"programs": 3, "shared": 2, "warps": 4}):
        found = fused.down(hidden, routed, shared, routes, scale_block=128, **options)
    expected = reference.down(hidden, routed, shared, routes, **options)
    _close(found[:, -1], expected[:, -1], BFLOAT16_STEP)
    assert _untouched(np.asarray(found)[:, : WALKED.chosen])


def test_rows_do_not_see_each_other():
    """A row's bits are the same alone and among seven others, one of which is not a number."""
    spec = CASES["one chunk"][0]
    routed, shared = expert_cases.packed(spec, 0)
    routes = expert_cases.random_routes(spec, 3, 2, entries=spec.experts)
    x = expert_cases.rounded_rows(spec, 4)
    outputs = []
    for rows in (x, x.at[1].set(0).at[5].set(jnp.nan)):
        hidden = _gate_up(spec, rows, routed, shared, routes)
        outputs.append(_down(spec, hidden, routed, shared, routes))
    first, second = (np.asarray(output)[0] for output in outputs)
    assert np.array_equal(first, second) and np.isfinite(first).all()


def test_empty_list():
    """No expert listed: only the shared one is computed, though the ids past the count name experts."""
    spec = CASES["one chunk"][0]
    routed, shared = expert_cases.packed(spec, 0)
    routes = expert_cases.random_routes(spec, 5, 8, entries=2)._replace(count=jnp.zeros(1, jnp.int32))
    x = expert_cases.rounded_rows(spec, 6)
    found = _gate_up(spec, x, routed, shared, routes)
    expected = _reference_gate_up(spec, x, routed, shared, routes)
    _close(found.rows[0], expected.rows[0], HIDDEN_TOLERANCE)
    assert _untouched(np.asarray(found.rows)[1:])


def test_unrounded_hidden_rows():
    spec = dataclasses.replace(CASES["one chunk"][0], dtype="bfloat16")
    routed, shared = expert_cases.packed(spec, 0)
    routes = expert_cases.random_routes(spec, 7, 1, entries=2)
    x = expert_cases.rounded_rows(spec, 8)
    hidden = reference.gate_up(x, routed, shared, routes, limit=spec.limit, rounded=False)
    options = dict(chosen=spec.chosen, round_block=0)
    found = fused.down(hidden, routed, shared, routes, scale_block=spec.block, **options)
    expected = reference.down(hidden, routed, shared, routes, **options)
    _close(found[:1], expected[:1], BFLOAT16_STEP)


def test_shapes_are_checked():
    spec = CASES["demo"][0]
    routed, shared = expert_cases.packed(spec, 0)
    routes = expert_cases.random_routes(spec, 1)
    options = dict(limit=10.0, scale_block=32)
    with pytest.raises(ValueError, match="expected 8 of float16"):
        fused.gate_up(jnp.zeros((8, 256), jnp.float32), routed, shared, routes, **options)
    with pytest.raises(ValueError, match="routed gate_up words have shape"):
        fused.gate_up(jnp.zeros((8, 512), jnp.float16), routed, shared, routes, **options)
    with pytest.raises(ValueError, match="routes have shapes"):
        fused.gate_up(
            jnp.zeros((8, 256), jnp.float16), routed, shared, routes._replace(count=jnp.int32(1)), **options
        )
