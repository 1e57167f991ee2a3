"""The output projections as cases to check and to time."""

import jax.numpy as jnp

from pallas_kernels import bench_case, tuning
from pallas_kernels.attention_output import reference
from pallas_kernels.attention_output.specs import SPECS, OutputSpec
from pallas_kernels.bench_case import EXACT, ROUNDED, OperationCase, nudged, random_fp8, random_rows

# One step away from what is recorded, or from one tile a program.
TILES = (
    {"held": 0}, {"held": 2}, {"warps": 4}, {"warps": 8}, {"splits": None, "each": 1},
    {"second_splits": None, "second_each": 1}, {"splits": 4, "each": 2}, {"second_splits": 8, "second_each": 2},
)  # fmt: skip


def cases() -> tuple[OperationCase, ...]:
    """That of every model."""
    return tuple(_case(model, spec) for model, spec in SPECS.items())


def _case(model: str, spec: OutputSpec) -> OperationCase:
    first, second = spec.first, spec.second
    options = dict(groups=first.groups, round_block=first.block, dtype=jnp.dtype(first.dtype))

    def operands(calls):
        from pallas_kernels import device_barrier
        from pallas_kernels.attention_output import fused as launches

        counters = device_barrier.counters(launches.counter_lines(first.rows, first.block))
        matrices = [
            tuple(random_fp8(2 * call + i, one.matrix(), one.block) for i, one in enumerate((first, second)))
            for call in range(calls)
        ]
        return (random_rows(calls, first.input()), counters), matrices

    def fused(shared, matrices):
        from pallas_kernels.attention_output import fused as launches

        heads, counters = shared
        made, counters = launches.project(heads, *matrices, counters, scale_block=first.block, **options)
        return {"output": made.sum(0), "counters": counters}, (nudged(heads, made[0, :, :1]), counters)

    def definition(shared, matrices):
        heads, counters = shared
        return {"output": reference.project(heads, *matrices, **options)[0], "counters": counters}

    size = first.matrix().bytes + second.matrix().bytes
    return OperationCase(
        "attention_output", f"{model} output projection", ("output_projection",), size,
        bench_case.calls_for(size), operands, fused, definition, {"output": ROUNDED, "counters": EXACT},
        choices={tuning.by_shape(first.rows, second.rows): TILES},
    )  # fmt: skip
