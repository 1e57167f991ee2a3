"""Selection at the published models' sizes, window visibility and norms, against exact results."""

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v4flash.model.attention import window_mask
from v4flash.model.indexer import candidate_blocks, top_entries, top_mask
from v4flash.model.numerics import rms_norm

BLOCK, BLOCKS, CHOSEN = 8, 2048, 512
# A mean of 64 squares, a reciprocal root and two products in float32.
NORM = 2e-6
# The squares of this row are subnormal in float32, or flushed to zero.
TINY_ROW = 5


@pytest.fixture(scope="module")
def pieces():
    return golden.read("pieces")


@pytest.fixture(scope="module")
def visible(pieces):
    return np.arange(pieces["select.scores"].shape[1]) < pieces["select.visible"][:, None]


@pytest.fixture(scope="module")
def candidates(pieces, visible):
    return jax.jit(candidate_blocks, static_argnums=(2, 3))(pieces["select.scores"], visible, BLOCK, BLOCKS)


def listed(mask) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.asarray(mask)]


def test_candidate_blocks(pieces, visible, candidates):
    expected = np.zeros(visible.shape, bool)
    for row, blocks in enumerate(pieces["select.blocks"]):
        entries = blocks[:, None] * BLOCK + np.arange(BLOCK)
        expected[row, entries[entries < expected.shape[1]]] = True
    np.testing.assert_array_equal(candidates, expected)


@pytest.mark.parametrize("restricted", [False, True])
def test_the_best_entries(pieces, visible, candidates, restricted):
    scores = pieces["select.scores2"]
    allowed = visible & np.asarray(candidates) if restricted else visible
    expected = pieces["select.top512_in_candidates" if restricted else "select.top512_unmasked"].tolist()
    assert listed(jax.jit(top_mask, static_argnums=2)(scores, allowed, CHOSEN)) == expected
    ids, valid = (
        np.asarray(part)
        for part in jax.jit(lambda *a: (lambda s: (s.ids, s.valid))(top_entries(*a, CHOSEN)))(scores, allowed)
    )
    assert valid.all()
    assert np.sort(ids, axis=1).tolist() == expected


def test_every_number_of_visible_entries(pieces):
    scores = pieces["select_small.scores"]
    visible = np.arange(scores.shape[1]) < np.arange(len(scores))[:, None]
    kept = candidate_blocks(jnp.asarray(scores), jnp.asarray(visible), 4, 4)
    np.testing.assert_array_equal(kept, pieces["select_small.mask"].astype(bool))
    assert not np.asarray(kept)[0].any()


@pytest.mark.parametrize("window", [32, 128])
def test_what_the_sliding_window_shows(pieces, window):
    expected = pieces[f"window{window}.visible"].astype(bool)
    positions = jnp.arange(len(expected))
    np.testing.assert_array_equal(window_mask(positions, positions, window), expected)


@pytest.mark.parametrize("eps", ["1e-6", "1e-20"])
def test_norms_of_rows_of_every_size(pieces, eps):
    x, expected = pieces["rms.x"], pieces[f"rms.y_eps{eps}"]
    found = np.asarray(jax.jit(rms_norm, static_argnums=2)(x, pieces["rms.weight"], float(eps)))
    rows = np.delete(np.arange(len(x)), TINY_ROW)
    np.testing.assert_allclose(found[rows], expected[rows], rtol=NORM, atol=0)
    zero = np.flatnonzero(~x.any(axis=1))
    assert zero.size
    assert not found[zero].any()
