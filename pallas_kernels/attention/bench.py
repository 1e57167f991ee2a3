"""The attention core as cases to check and to time."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import reference
from pallas_kernels.attention.reference import Block, Chosen, FarKeys, Visible
from pallas_kernels.attention.specs import DEMO, V4_FLASH, V41_FLASH, AttentionSpec
from pallas_kernels.bench_case import EXACT, OperationCase, normal, nudged
from pallas_kernels.rows import Columns, turn_table

ROWS, RING, CALLS = 8, 136, 6
FREQUENCIES = 160000.0 ** -(np.arange(0, 64, 2) / 64)
# One step away from what is recorded, and tiles of 128 keys, of which only one at a time fits on a processor.
TILES = (
    {"keys": 32}, {"keys": 128}, {"splits": 2}, {"splits": 8}, {"tiles": 2}, {"tiles": 4}, {"warps": 4}, {"stages": 2},
    {"keys": 128, "tiles": 2, "stages": 2}, {"keys": 128, "splits": 5, "tiles": 1, "stages": 2},
)  # fmt: skip
# Weights of the softmax are rounded to the model's type before they meet the keys: half a step each.
TOLERANCES = {"bfloat16": 1e-2, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Which keys rows see beyond their window, behind how many positions, and how many rows are live.

    `keys` is 'window' (none beyond), 'chosen' (`number` entries of `ratio` positions each), 'visible' (all entries of
    a ratio) or 'block' (the drafter's).
    """

    model: str
    spec: AttentionSpec
    keys: str
    length: int = 65000
    live: int = ROWS
    ratio: int = 1
    number: int = 512

    def __str__(self) -> str:
        told = {
            "chosen": f"{self.number} chosen entries of {self.ratio}",
            "visible": f"all entries of {self.ratio}",
        }
        return f"{self.model} attention, {told.get(self.keys, self.keys)}"


KINDS = (
    Kind("v4-flash", V4_FLASH, "window", length=5000),
    Kind("v4-flash", V4_FLASH, "chosen", ratio=4),
    Kind("v4-flash", V4_FLASH, "visible", live=6, ratio=128),
    Kind("v4-flash", V4_FLASH, "block", length=5000, live=6),
    Kind("v4.1-flash", V41_FLASH, "window", length=5000),
    Kind("v4.1-flash", V41_FLASH, "chosen", ratio=1),
    Kind("v4.1-flash", V41_FLASH, "block", length=5000, live=6),
    Kind("demo", DEMO, "window", length=200),
    Kind("demo", DEMO, "chosen", length=400, live=6, ratio=2, number=64),
    Kind("demo", DEMO, "block", length=200, live=6),
)


def cases() -> tuple[OperationCase, ...]:
    """Every kind of keys that the models have."""
    return tuple(_case(kind) for kind in KINDS)


def _far(kind: Kind, keys, ids) -> FarKeys:
    if kind.keys == "chosen":
        return Chosen(keys, ids, jnp.full((ROWS,), kind.number, jnp.int32))
    if kind.keys == "visible":
        return Visible(keys, kind.ratio)
    return Block(keys) if kind.keys == "block" else None


def _case(kind: Kind) -> OperationCase:
    spec, columns = kind.spec, kind.spec.heads * kind.spec.width
    entries = ROWS if kind.keys == "block" else kind.length // kind.ratio + ROWS

    def operands(calls):
        from pallas_kernels import device_barrier
        from pallas_kernels.attention import kernels as launches

        random = np.random.default_rng(3)
        ids = None
        if kind.keys == "chosen":
            drawn = [random.permutation(kind.length // kind.ratio)[: kind.number] for _ in range(ROWS)]
            ids = jnp.asarray(np.sort(np.stack(drawn), axis=1).astype(np.int32))
        counters = device_barrier.counters(launches.counter_lines(ROWS, spec))
        shared = (normal(1, 1, ROWS, columns), normal(2, spec.heads), ids, counters)
        own = [
            (
                normal(100 + i, RING, spec.width, dtype=spec.type),
                None if kind.keys == "window" else normal(200 + i, entries, spec.width, dtype=spec.type),
            )
            for i in range(calls)
        ]
        return shared, own

    def given(shared, own):
        """The arguments of both bodies up to the far keys."""
        q, sink, ids, _ = shared
        ring, keys = own
        table = turn_table(kind.length + jnp.arange(ROWS), FREQUENCIES[: spec.rope // 2])
        far = _far(kind, keys, ids)
        return Columns(q, 0, columns), table, sink, ring, jnp.int32(kind.length), jnp.int32(kind.live), far

    def fused(shared, own):
        from pallas_kernels.attention import kernels as launches

        q, sink, ids, counters = shared
        made, counters = launches.attend(*given(shared, own), counters, spec)
        return {"output": made[: kind.live], "counters": counters}, (nudged(q, made), sink, ids, counters)

    def definition(shared, own):
        made = reference.attend(*given(shared, own), spec)
        return {"output": made[: kind.live], "counters": shared[3]}

    near, far = spec.window + ROWS - 1, {"chosen": ROWS * kind.number, "visible": entries, "block": ROWS}
    size = (near + far.get(kind.keys, 0)) * spec.width * spec.type.itemsize + 4 * ROWS * columns
    return OperationCase(
        "attention", str(kind), ("attention_core",), size, CALLS, operands, fused, definition,
        {"output": TOLERANCES[spec.dtype], "counters": EXACT}, interpreted=kind.model == "demo",
        choices={} if kind.model == "demo" else {{"window": "none"}.get(kind.keys, kind.keys): TILES},
    )  # fmt: skip
