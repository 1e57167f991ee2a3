"""Toy laws over 8 tokens, and the exact law of what one speculative step emits for them.

Everything is enumerated in float64 from the shipped formulas. Law i depends on all tokens before it (row index:
those tokens in base 8, the first most significant).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from v4flash.speculative.rejection import accept_ratio, block_chances, residual

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "formats.safetensors"
V, K = 8, 3
# Float64 sums of at most 4096 terms.
EXACT = 1e-12
FILTERS = {
    "temperature": {"temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "min-p": {"temperature": 0.9, "min_p": 0.15},
}
PATHS = np.array(list(np.ndindex((V,) * K)))
POLICY = dict(
    costs=(1.0, 1.26, 1.7, 2.1, 2.25), acceptance=(0.7, 0.8, 0.8), slope=(0.8, 1.2, 1.0), bias=(0.2, -0.1)
)


def golden_laws():
    """(all golden arrays, target laws p_0..p_3, draft laws q_0..q_2), float64 and normalised."""
    golden = load_file(GOLDEN)
    p = [golden[f"law.p{i}"].astype(np.float64) for i in range(K + 1)]
    q = [golden[f"law.q{i}"].astype(np.float64) for i in range(K)]
    p, q = ([law / law.sum(axis=-1, keepdims=True) for law in side] for side in (p, q))
    return golden, p, q


def one_hot(laws):
    return [np.eye(V)[law.argmax(axis=-1)] for law in laws]


def emitted(p, q, is_live):
    """Laws of what one step emits: entry n [8**n, 8] holds P(exactly n + 1 tokens, and they are these).

    `is_live(i, prefix)` says whether draft i is verified after the accepted drafts `prefix`.
    """
    with jax.enable_x64(True):
        reach, laws = np.ones(1), []
        for i in range(K + 1):
            prefixes = [np.unravel_index(row, (V,) * i) if i else () for row in range(V**i)]
            live = np.array([i < K and is_live(i, prefix) for prefix in prefixes])[:, None]
            draft = np.where(live, q[i] if i < K else 0, 0)
            passed = np.asarray(accept_ratio(jnp.asarray(p[i]), jnp.asarray(draft))) * draft
            stop = reach * (1 - passed.sum(axis=-1))
            replacement = np.asarray(residual(jnp.asarray(p[i]), jnp.asarray(draft)))
            assert passed.dtype == replacement.dtype == np.float64
            laws.append(stop[:, None] * replacement)
            reach = (reach[:, None] * passed).ravel()
        return laws


def emitted_blockwise(p, q, depth):
    """The same for the block-wise rule, over all complete drafts.

    `depth(path)` is the number of live drafts for the drafts `path`; it must not anticipate.
    """
    paths = np.array(list(np.ndindex((V,) * K)))
    rows = [np.ravel_multi_index(paths[:, :i].T, (V,) * i) if i else 0 * paths[:, 0] for i in range(K + 1)]
    target = np.stack([p[i][rows[i]] for i in range(K + 1)], axis=1)
    draft = np.stack([q[i][rows[i]] for i in range(K)], axis=1)
    live = np.array([depth(path) for path in paths])
    chance = np.ones(len(paths))
    for i in range(K):
        chance = chance * draft[np.arange(len(paths)), i, paths[:, i]]
    laws = [np.zeros((V**i, V)) for i in range(K + 1)]
    with jax.enable_x64(True):
        carried, passes = (np.asarray(x) for x in jax.vmap(block_chances)(paths, draft, target, live))
        assert passes.dtype == np.float64
        undecided = chance
        for i in range(K, -1, -1):
            kept = undecided * (passes[:, i] if i else 1)
            undecided = undecided - kept
            refused = np.where((i < live)[:, None], draft[:, min(i, K - 1)], 0)
            law = np.asarray(residual(jnp.asarray(carried[:, i, None] * target[:, i]), jnp.asarray(refused)))
            np.add.at(laws[i], rows[i], kept[:, None] * law)
    return laws


def closed_form(p, q, depth):
    """The same without ratios: min(p, q) is the mass accepted and max(p - q, 0) the mass that replaces."""
    reach, laws = np.ones(1), []
    for i in range(depth + 1):
        draft = q[i] if i < depth else np.zeros_like(p[i])
        laws.append(reach[:, None] * np.maximum(p[i] - draft, 0))
        reach = (reach[:, None] * np.minimum(p[i], draft)).ravel()
    return laws + [np.zeros((V**i, V)) for i in range(depth + 1, K + 1)]


def joint(p, tokens):
    """Target law of the first `tokens` tokens, [8**tokens]."""
    law = np.ones(1)
    for i in range(tokens):
        law = (law[:, None] * p[i]).ravel()
    return law


def continued(laws, p, tokens):
    """Law of the first `tokens` tokens if later steps follow the target, [8**tokens]."""
    total = np.zeros(V**tokens)
    for i, law in enumerate(laws):
        text = law.ravel()
        for following in range(i + 1, tokens):
            text = (text[:, None] * p[following]).ravel()
        total += text.reshape(V**tokens, -1).sum(axis=-1)
    return total


def rows_of(i: int) -> np.ndarray:
    """Row of law i for every path."""
    return np.ravel_multi_index(PATHS[:, :i].T, (V,) * i) if i else np.zeros(len(PATHS), int)


def emitted_by(rule: str, p, q, live):
    """Emission laws when the drafts of PATHS[row] are verified `live[row]` deep."""
    if rule == "block":
        depth = dict(zip(map(tuple, PATHS.tolist()), live.tolist(), strict=True))
        return emitted_blockwise(p, q, lambda path: depth[tuple(int(token) for token in path)])
    # Whether draft i is live is the same for all paths that share the drafts before it and can be drawn.
    mass = np.ones(len(PATHS))
    for i in range(K):
        mass = mass * q[i][rows_of(i), PATHS[:, i]]
    path_of = {tuple(PATHS[row, :i].tolist()): row for i in range(K + 1) for row in np.argsort(mass)}
    return emitted(p, q, lambda i, prefix: live[path_of[tuple(int(token) for token in prefix)]] > i)


def error(emits, p):
    """Largest deviation of the first 1 to K + 1 tokens from the target's law, later steps following the target."""
    return max(np.abs(continued(emits, p, tokens) - joint(p, tokens)).max() for tokens in range(1, K + 2))
