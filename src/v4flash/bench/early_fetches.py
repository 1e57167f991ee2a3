"""Copies of cold experts by themselves, beside a row of expert launches, and in a cut step.

    python -m v4flash.bench.early_fetches [LAYERS]

Knows: what rate a copy of few programs reaches, whether it runs beside other launches by XLA's ways of ordering a
captured graph, and what either costs the other. Does not know: guesses of a real text. A GPU is needed.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.bench_case import nudged, random_rows
from pallas_kernels.experts import bench as expert_cases
from pallas_kernels.experts import early_fused, fused, tiers
from pallas_kernels.experts.specs import SPECS
from v4flash.bench import cold_cells, cold_step, random_weights
from v4flash.config import ModelConfig
from v4flash.engine import compiler_options
from v4flash.placement.host_memory import host_memory
from v4flash.profile import budget

SPEC = SPECS["v4-flash"]
RESIDENT, LISTED = 64, 25  # hot experts of the row, and how many of them a launch reads
COLD, SLOTS = 4, 4
FETCHES, LAYERS = 4, 16  # a fetch of one expert each; layers of the row
CALLS, REPEATS = 10, 3
MODES = ("SERIALIZE", "LHS", "CONCURRENT")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints three short tables."""
    parser = argparse.ArgumentParser(prog="python -m v4flash.bench.early_fetches")
    parser.add_argument(
        "layers",
        nargs="?",
        type=int,
        default=6,
        help="backbone layers of the cut step (default 6), 0 for no step",
    )
    options, started = parser.parse_args(arguments), time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {line}", flush=True)

    copies(say)
    if options.layers:
        step(options.layers, say)


def copies(say: Callable[[str], None]) -> None:
    """A fetch alone, and fetches beside a row of expert launches."""
    words = tiers.record_words(SPEC.routed())
    cold = jax.device_put(jnp.ones((COLD, words), jnp.int32), host_memory())
    table = jnp.stack([jnp.ones((COLD,), jnp.int32), jnp.arange(COLD, dtype=jnp.int32)], axis=1)[None]
    table = jnp.tile(table, (FETCHES, 1, 1))
    routed, shared = expert_cases.random_experts(SPEC, RESIDENT)
    routes = expert_cases.random_routes(SPEC, 0, LISTED, RESIDENT)
    weights = routed, shared, routes
    all_slots = jnp.tile(1 + jnp.arange(SLOTS, dtype=jnp.int32), (FETCHES, 1))
    one_slot = all_slots * (jnp.arange(SLOTS) == 0)
    for programs in (4, 8, 16, 32):
        program = functools.partial(together, programs=programs, fetched=1, row=0)
        took = timed(program, "CONCURRENT", cold, table, all_slots, weights)
        rate = 4 * words * SLOTS / took / 1e9
        say(f"a fetch of {SLOTS} experts by {programs:>2} programs: {1e3 * took:.2f} ms, {rate:.1f} GB/s")
    for fetched, row, programs, modes in (
        (FETCHES, 0, 16, MODES[2:]),
        (0, LAYERS, 16, MODES[2:]),
        (FETCHES, LAYERS, 16, MODES),
        (FETCHES, LAYERS, 8, MODES[2:]),
        (FETCHES, LAYERS, 32, MODES[2:]),
    ):
        for mode in modes:
            program = functools.partial(together, programs=programs, fetched=fetched, row=row)
            took = timed(program, mode, cold, table, one_slot, weights)
            say(f"{fetched} fetches of one expert by {programs:>2} programs, {row:>2} layers of experts, {mode}: "
                f"{1e3 * took:.2f} ms")  # fmt: skip


def together(cold, table, fetches, weights, x, turn, records, *, programs: int, fetched: int, row: int):
    """Fetches one behind the other, and layers of experts one behind the other; neither needs the other.

    Returns x, turn and records in place of what was given.
    """
    records = list(records)
    for layer in range(fetched):
        records[layer], turn = early_fused.fetch(
            jnp.int32(layer), cold, table, fetches, turn, records[layer], programs=programs
        )
    routed, shared, routes = weights
    options = dict(scale_block=SPEC.block, dtype=jnp.bfloat16)
    for _ in range(row):
        hidden = fused.gate_up(x, routed, shared, routes, limit=SPEC.limit, **options)
        made = fused.down(
            hidden, routed, shared, routes, chosen=SPEC.chosen, round_block=SPEC.block, **options
        )
        x = nudged(x, made[:1, -1, :1])
    return x, turn, tuple(records)


def timed(program: Callable, mode: str, cold, table, fetches, weights) -> float:
    """Seconds a call, the best of a few rounds."""
    x = random_rows(4, jax.ShapeDtypeStruct((tiles.ROWS, SPEC.width), jnp.float16), SPEC.block)
    turn = jnp.zeros((1,), jnp.int32)
    records = tuple(jnp.zeros((SLOTS, cold.shape[1]), jnp.int32) for _ in range(FETCHES))
    lowered = jax.jit(program, donate_argnums=(4, 5, 6), keep_unused=True).lower(
        cold, table, fetches, weights, x, turn, records
    )
    options = compiler_options.here(lowered, host_memory=True)
    options["xla_gpu_command_buffer_scheduling_mode"] = mode
    run, found = lowered.compile(compiler_options=options), []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            x, turn, records = run(cold, table, fetches, weights, x, turn, records)
        jax.block_until_ready((x, records))
        found.append((time.perf_counter() - began) / CALLS)
    return min(found[1:])


def step(layers: int, say: Callable[[str], None]) -> None:
    """The cells of `v4flash bench --experts host`, of the first layers only."""
    config = ModelConfig.from_file(budget.configuration("v4-flash-0731"))
    if layers < config.num_hidden_layers:
        config = random_weights.first_layers(config, layers)
    request = cold_cells.Request(config, 200, profile=False, repeats=3)
    record = cold_step.run(request, say)
    say("share  cell           ms/step  spread         cold  missed  fetched  used    GB  over resident")
    for cell in record["cells"]:
        low, high = cell["spread"]
        say(
            f"{100 * cell['asked_share']:>4g} % {cell['cell']:<13} {cell['milliseconds']:>8.3f}  {low:.3f}-{high:.3f} "
            f"{cell['cold_per_step']:>6.1f} {cell['missed_per_step']:>7.1f} {cell.get('fetched_per_step', 0):>8.1f} "
            f"{cell.get('used_per_step', 0):>5.1f} {cell['gigabytes_moved']:>6.3f} {cell['over_resident']:>7.3f}"
        )


if __name__ == "__main__":
    main()
