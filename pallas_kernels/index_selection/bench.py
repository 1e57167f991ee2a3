"""The index selection as cases to check and to time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.bench_case import EXACT, OperationCase, Outputs, normal, nudged
from pallas_kernels.index_selection import reference, specs
from pallas_kernels.index_selection.reference import INDEX_BLOCK, Listed
from pallas_kernels.index_selection.specs import IndexSpec
from pallas_kernels.rows import Columns, turn_table

ROWS, SPLITS, BESIDE, CALLS = 8, 4, 64, 6
# One step away from what is recorded.
TILES = ({"keys": 64}, {"keys": 256}, {"programs": 64}, {"warps": 4}, {"stages": 2})
SHORT_TILES = ({"columns": 128}, {"keys": 64, "warps": 4}, {"keys": 64})
FREQUENCIES = 160000.0 ** -(np.arange(0, 64, 2) / 64)
# Of the chosen entries, one in a hundred may be another whose score is nearly equal.
CHOICE, SCORES = 0.1, 1e-3
TOLERANCES = {
    "counts": EXACT, "chosen": CHOICE, "scores": SCORES, "block counts": EXACT, "blocks": CHOICE
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer's index behind `length` positions, `live` rows."""

    name: str
    spec: IndexSpec
    length: int
    live: int = ROWS


KINDS = (
    Kind("v4-flash index at 65,000", specs.V4_FLASH, 65000),
    Kind("v4-flash index at 8,000", specs.V4_FLASH, 8000),
    Kind("v4-flash index at 2,080", specs.V4_FLASH, 2080),
    Kind("v4.1-flash index of ratio 2 at 65,000", specs.V41_RATIO_2, 65000),
    Kind("v4.1-flash index source at 65,000", specs.V41_SOURCE, 65000),
    Kind("v4.1-flash index member at 65,000", specs.V41_MEMBER, 65000),
    Kind("demo index of ratio 2 at 400", specs.DEMO_RATIO_2, 400, live=6),
    Kind("demo index source at 400", specs.DEMO_SOURCE, 400, live=6),
    Kind("demo index member at 400", specs.DEMO_MEMBER, 400, live=6),
)


def cases() -> tuple[OperationCase, ...]:
    """Scores and choice of every kind of index."""
    return tuple(_case(kind) for kind in KINDS)


def random_candidates(spec: IndexSpec, length: int, live: int) -> Listed:
    """Blocks as a source might publish them: random ones, the newest always among them."""
    random = np.random.default_rng(0)
    ids, counts = np.full((ROWS, spec.kept), -1, np.int32), np.zeros(ROWS, np.int32)
    for row in range(live):
        there = -(-((length + row + 1) // spec.ratio) // spec.block)
        counts[row] = min(there, spec.kept)
        older = random.permutation(there - 1)[: counts[row] - 1]
        ids[row, : counts[row]] = np.sort(np.append(older, there - 1))
    return Listed(jnp.asarray(ids), jnp.asarray(counts))


def _marked(listed: Listed, size: int, live: int) -> jax.Array:
    """bool [live, size]: the listed numbers."""
    rows = jnp.arange(live)[:, None]
    return jnp.zeros((live, size + 1), bool).at[rows, listed.ids[:live]].set(True)[:, :size]


def _case(kind: Kind) -> OperationCase:
    spec, columns = kind.spec, kind.spec.heads * kind.spec.width
    entries = kind.length // spec.ratio + ROWS
    blocks = -(-entries // spec.block)
    choices = {"short scores": SHORT_TILES} if entries <= 1024 else {"scores": TILES}

    def operands(calls):
        keys = [normal(100 + i, entries, spec.width, dtype=spec.type) for i in range(calls)]
        if spec.quantise:
            keys = [_rounded(own) for own in keys]
        candidates = random_candidates(spec, kind.length, kind.live) if spec.role == "member" else None
        return (normal(1, 1, ROWS, columns), normal(2, SPLITS, ROWS, BESIDE + spec.heads), candidates), keys

    def given(shared):
        q, weights, _ = shared
        table = turn_table(kind.length + jnp.arange(ROWS), FREQUENCIES[: spec.rope // 2])
        return Columns(q, 0, columns), Columns(weights, BESIDE, spec.heads), table

    def outputs(shared, keys, choice: Listed, published: Listed | None) -> Outputs:
        chosen = _marked(choice, entries, kind.live)
        scores = jnp.where(chosen, reference.scores(*given(shared), keys, spec)[: kind.live], -jnp.inf)
        scores = jnp.sort(scores, axis=1)[:, -spec.topk :]
        made = {
            "counts": choice.counts,
            "chosen": chosen,
            "scores": jnp.where(jnp.isfinite(scores), scores, 0),
        }
        if spec.role == "source":
            made |= {"block counts": published.counts, "blocks": _marked(published, blocks, kind.live)}
        return made

    def fused(shared, keys):
        from pallas_kernels.index_selection import fused as launches

        q, weights, candidates = shared
        length, live = jnp.int32(kind.length), jnp.int32(kind.live)
        made = launches.choose(*given(shared), keys, length, live, spec, candidates)
        return outputs(shared, keys, *made), (nudged(q, made[0].counts[0]), weights, candidates)

    def definition(shared, keys):
        length, live = jnp.int32(kind.length), jnp.int32(kind.live)
        return outputs(shared, keys, *reference.choose(*given(shared), keys, length, live, spec, shared[2]))

    seen = entries if spec.role != "member" else min(entries, ROWS * spec.kept * spec.block)
    return OperationCase(
        "index_selection", kind.name, ("index_scores", "index_choice"),
        seen * spec.width * spec.type.itemsize + 4 * ROWS * (columns + SPLITS * spec.heads), CALLS, operands, fused,
        definition,
        TOLERANCES,
        interpreted=bool(spec.type == jnp.float32),
        choices={} if kind.name.startswith("demo") else choices,
    )  # fmt: skip


@jax.jit
def _rounded(keys: jax.Array) -> jax.Array:
    return formats.fp4_index_round_trip(keys, INDEX_BLOCK)
