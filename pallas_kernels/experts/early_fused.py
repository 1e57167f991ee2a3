"""Fetching before a pass asks for it as Triton launches: one that plans for all layers, then a copy a layer.

Knows: shapes, grids and constants. Does not know: the bodies (`early_kernels`), or what is guessed.

A copy has few programs, so that it leaves the multiprocessors to the launches that it runs beside.
"""

import jax
import jax.numpy as jnp
import triton

from pallas_kernels import launch
from pallas_kernels.experts import early_kernels as kernels
from pallas_kernels.experts.tiers import Kept

PROGRAMS, WARPS = 16, 8
WORDS = 32 * 32 * WARPS  # 128 bytes a thread, all asked for before the first arrives


def plan(table: jax.Array, named: jax.Array, kept: Kept) -> Kept:
    """`early.plan`; what it changes is updated in place."""
    layers, slots = kept.owners.shape
    if table.ndim != 3 or table.shape[::2] != (layers, 2) or named.ndim != 2 or named.shape[0] != layers:
        raise ValueError(
            f"table {table.shape} and guesses {named.shape}, expected ({layers}, experts, 2) and ({layers}, guesses)"
        )
    state = [kept.owners, kept.ages, kept.early.fetches, kept.early.counts]
    owners, ages, fetches, counts = launch.call(
        kernels.plan_fetches,
        table,
        named,
        *state,
        grid=(layers,),
        outputs=[jax.ShapeDtypeStruct(part.shape, jnp.int32) for part in state],
        aliases={2 + place: place for place in range(len(state))},
        num_warps=4,
        EXPERTS=table.shape[1],
        NAMED=named.shape[1],
        SLOTS=slots,
        WIDE_EXPERTS=triton.next_power_of_2(table.shape[1]),
        WIDE_SLOTS=triton.next_power_of_2(slots),
    )
    return kept._replace(owners=owners, ages=ages, early=kept.early._replace(fetches=fetches, counts=counts))


def fetch(
    layer: jax.Array,
    cold: jax.Array,
    table: jax.Array,
    fetches: jax.Array,
    turn: jax.Array,
    records: jax.Array,
    *,
    programs: int = PROGRAMS,
) -> tuple[jax.Array, jax.Array]:
    """`early.fetch`; records are updated in place."""
    slots, words = records.shape
    if cold.ndim != 2 or cold.shape[1] != words or fetches.shape[1] != slots:
        raise ValueError(
            f"cold experts {cold.shape} and fetches {fetches.shape}, expected (experts, {words}) and (layers, {slots})"
        )
    turn, records = launch.call(
        kernels.fetch_experts,
        layer.reshape(1),
        cold,
        table,
        fetches,
        turn,
        records,
        grid=(programs,),
        outputs=[jax.ShapeDtypeStruct(part.shape, jnp.int32) for part in (turn, records)],
        aliases={4: 0, 5: 1},
        num_warps=WARPS,
        EXPERTS=table.shape[1],
        SLOTS=slots,
        RECORD=words,
        PROGRAMS=programs,
        WORDS=WORDS,
    )
    return records, turn
