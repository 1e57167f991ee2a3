"""One speculative step whose experts lie in two memories, beside the same step with all of its experts on the device.

Knows: how hand-fused programs get routes, where misses are counted, and what is compared bit by bit before anything is
timed. Does not know: how routes are made up (cold_routes), or what is timed and recorded of them (cold_cells).

The router runs, but its choice is replaced by made-up routes: random weights would choose without regard to what is
hot.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_case import tree_bytes
from pallas_kernels.experts import early, reference
from pallas_kernels.experts.reference import Routes
from v4flash.bench import cold_routes, random_weights, real_step
from v4flash.bench.cold_cells import (
    CELLS,
    CHECKED_SHARE,
    GUESSES,
    ROWS,
    Request,
    Weights,
    measured_bandwidths,
    of_share,
    record,
    same_bits,
    timed_cell,
)
from v4flash.bench.cold_routes import ColdRoutes
from v4flash.config import ModelConfig
from v4flash.engine import backends, compiler_options
from v4flash.engine.programs import Shapes
from v4flash.model.fused import two_memories
from v4flash.model.fused.bodies import FusedBodies, ReferenceBodies
from v4flash.model.fused.model import FusedModel
from v4flash.model.fused.packing import PackedModel
from v4flash.profile.deviceless import REAL_NUMERICS, abstract_weights
from v4flash.speculative.step import draft_limit, speculative_step
from v4flash.speculative.stream import Control, StepResult, Stream

# What is kept, the stream, the position and the last result stay where they are, as in decoding (steady_step).
DONATED = (1, 2, 5, 6)
_WORDS = 64  # of the 256 bytes that parts of a plan start at, so that kernels read them where they are


def run(request: Request, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Times every cell; `say` hears one line of progress at a time. Returns the record, JSON-ready."""
    request = dataclasses.replace(request, config=random_weights.with_small_memory(request.config))
    config = request.config
    programs = Programs(request, say)
    bandwidth, link = measured_bandwidths(say)
    places = cold_routes.table(config, request.hot)
    started = time.perf_counter()
    experts = random_weights.popular_experts(config, config.n_routed_experts, request.draft_length + 1)
    params = random_weights.fill(programs.params, config, experts)
    params = jax.block_until_ready(dataclasses.replace(params, placement=jnp.asarray(places)))
    cold = sum(pack.experts.cold.nbytes for pack in params.layers)
    total = tree_bytes(params)
    say(f"{(total - cold) / 1e9:.1f} GB of weights on the device, {cold / 1e9:.1f} GB beside it, in "
        f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    weights = Weights(4 * params.layers[0].experts.cold.shape[1], total - cold, cold, bandwidth, link)
    bench = _Bench(request, programs, params, places, weights, say)
    rows = request.draft_length + 1
    checks = bench.checked(cold_routes.made_up(config, places, CHECKED_SHARE, rows, steps=1))
    say(", ".join(f"{name}: {'same bits' if same else 'OTHER BITS'}" for name, same in checks.items()))
    cells = []
    for share in request.shares:
        routes = cold_routes.made_up(config, places, share, rows, request.needed_steps)
        cells += bench.cells(share, routes)
        gc.collect()
    return record(request, config, programs.bodies.__name__, weights, checks, cells)


class Programs:
    """The step for two memories, the same that fetches guessed experts early, and the one that knows no cold experts,
    compiled beside each other.

    All are run(params, kept, stream, control, lists, position, spent) -> (kept, stream, next position, result), with
    None for what is kept in the last; spent is a result whose memory the new one takes. `params` and `empty` are the
    weights of the second, and what it keeps, as shapes; `blank` is a result to begin with.
    """

    def __init__(self, request: Request, say: Callable[[str], None]):
        config, started = request.config, time.perf_counter()
        self.shapes = Shapes(ROWS, ROWS, request.context + real_step.SLACK)
        self.bodies = FusedBodies if backends.can_launch() else ReferenceBodies
        params, _ = abstract_weights(config, REAL_NUMERICS, "fused")
        self.params = two_memories.shapes(params, request.hot)
        self.empty = jax.eval_shape(
            lambda: two_memories.nothing_fetched(self.params, request.slots, config.num_experts_per_tok)
        )
        stream = jax.eval_shape(lambda: real_step.empty_stream(config, self.shapes))
        control = jax.eval_shape(lambda: real_step.control_of(config, 0, ROWS))
        ids = jnp.zeros((config.num_hidden_layers, 1, config.num_experts_per_tok), jnp.int32)
        words = list_words(ids, ROWS * config.num_experts_per_tok, _no_guesses(ids))
        lists = jax.ShapeDtypeStruct((request.needed_steps, *words.shape), jnp.int32)
        position = jax.ShapeDtypeStruct((), jnp.int32)
        self.blank = StepResult.blank(draft_limit(ROWS) if config.draft else 0)
        step = planned_step(config, self.bodies)
        resident, late = without_cold(self.params), self.empty._replace(early=None)
        lowered = [
            jax.jit(step, donate_argnums=DONATED, keep_unused=True).lower(
                own, kept, stream, control, lists, position, self.blank
            )
            for own, kept in ((self.params, late), (self.params, self.empty), (resident, None))
        ]
        # Nothing in the others is there to run beside something else.
        options = [
            compiler_options.here(program, host_memory=True, beside_each_other=number == 1)
            for number, program in enumerate(lowered)
        ]
        with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
            compiled = pool.map(lambda program, own: program.compile(compiler_options=own), lowered, options)
            self.tiered, self.early, self.resident = compiled
        say(f"{self.bodies.__name__}: three programs compiled in {time.perf_counter() - started:.0f} s")


def planned_step(config: ModelConfig, bodies: type[ReferenceBodies]) -> Callable:
    """The step of `Programs`: its backbone takes the routes at one position of `lists` (`list_words`)."""
    entries, chosen = ROWS * config.num_experts_per_tok, config.num_experts_per_tok

    def step(
        params: PackedModel,
        kept,
        stream: Stream,
        control: Control,
        lists: jax.Array,
        position: jax.Array,
        spent: StepResult,
    ):
        del spent
        model, words = FusedModel(config, REAL_NUMERICS, params, bodies, kept), lists[position]
        layers = iter(words)

        class PlannedBodies(bodies):
            def guess(self, kept, tokens, length, count):
                named, kept = super().guess(kept, tokens, length, count)
                given = words[:, -named.shape[1] :]
                # No pass has more rows: the guess is made, for what that costs, and not used.
                return jnp.where(count > ROWS, named, given), kept

            def boundary_and_route(self, *arguments):
                made, own, ids = super().boundary_and_route(*arguments)
                given = _routes_of(next(layers), entries, chosen)
                # No number of experts is negative: what reads the list waits for the router, as it does in decoding.
                return made, given._replace(count=given.count + jnp.minimum(own.count, 0)), ids

        model.backbone.bodies = PlannedBodies
        stream, result = speculative_step(model, stream, control, ROWS)
        # In the order of the donated arguments: arrays of one shape and type take their memory in turn.
        return model.backbone.kept, stream, (position + 1) % lists.shape[0], result

    return step


@functools.partial(jax.jit, static_argnums=1)
def list_words(ids: jax.Array, entries: int, guesses: jax.Array) -> jax.Array:
    """The lists of experts of one step as int32 [L, X], for ids int32 [L, rows, K] and guesses int32 [L, G].

    One array for all steps, and a position in it on the device: arguments that lie elsewhere in every step would make
    the captured graph be written anew. Of a layer's words the first are the experts, then their number, then the slots;
    the last are guesses, ROWS K.
    """
    rows, chosen = ids.shape[1:]
    ids = jnp.pad(ids, ((0, 0), (0, ROWS - rows), (0, 0)))
    guesses = jnp.pad(guesses, ((0, 0), (0, ROWS * chosen - guesses.shape[1])))
    weights, live = jnp.zeros((ROWS, chosen)), jnp.arange(ROWS) < rows

    def words(own: jax.Array) -> jax.Array:
        routes = reference.routes(own, weights, live, entries)
        parts = routes.expert_ids, routes.count, routes.slot.reshape(-1)
        return jnp.concatenate([jnp.pad(part, (0, -part.size % _WORDS)) for part in parts])

    return jnp.concatenate([jax.lax.map(words, ids), guesses], axis=1)


def _no_guesses(ids: jax.Array) -> jax.Array:
    return jnp.zeros((ids.shape[0], 0), jnp.int32)


def _routes_of(words: jax.Array, entries: int, chosen: int) -> Routes:
    """One layer's list, every expert with the same weight."""
    count = -(-entries // _WORDS) * _WORDS
    slot = words[count + _WORDS :][: entries * ROWS].reshape(entries, ROWS)
    weight = jnp.full((entries, ROWS), 1 / chosen, jnp.float32)
    return Routes(words[:entries], words[count : count + 1], weight, slot)


def without_cold(params: PackedModel) -> PackedModel:
    """The model with its hot experts only, by their slots."""
    layers = tuple(dataclasses.replace(pack, experts=pack.experts.hot) for pack in params.layers)
    return dataclasses.replace(params, layers=layers, placement=None)


class _Bench:
    """Cells of one loaded model."""

    def __init__(self, request: Request, programs: Programs, params, places, weights: Weights, say):
        self.request, self.programs, self.say = request, programs, say
        self.params = {"tiered": params, "early": params, "resident": without_cold(params)}
        self.places, self.weights = places, weights
        config = request.config
        self.control = real_step.control_of(config, request.draft_length, ROWS)
        self.stream = real_step.noisy(real_step.empty_stream(config, programs.shapes))
        self.kept = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), programs.empty)
        self.spent = jax.device_put(programs.blank)

    def checked(self, routes: ColdRoutes) -> dict[str, bool]:
        """Whether what must be the same is, bit for bit: caches behind a step, and the slots of kept experts."""
        redirected = routes.redirected()
        lists = self._lists(routes)
        self.empty_slots()
        missed, hit = self._caches("tiered", lists), self._caches("tiered", lists)
        right = self._right_slots()
        self.empty_slots()
        guessed = [self._caches("early", self._lists(routes.guessed(0.5, 1.0, seed))) for seed in range(2)]
        right_early = self._right_slots()
        self.empty_slots()
        return {
            "resident and redirected": same_bits(
                self._caches("resident", self._lists(redirected, slots=True)),
                self._caches("tiered", self._lists(redirected)),
            ),
            "missed and kept": same_bits(missed, hit),
            "kept slots": right,
            "missed and guessed": all(same_bits(missed, found) for found in guessed),
            "guessed slots": right_early,
        }

    def cells(self, share: float, routes: ColdRoutes) -> list[dict[str, Any]]:
        """The cells of one cold share."""
        return of_share(self.request, share, routes, self._timed, self.say, (*CELLS, *GUESSES))

    def empty_slots(self) -> None:
        """Nothing is kept any more; what lies in the slots stays, and is nobody's."""
        empty = jax.tree.map(jnp.zeros_like, self.kept._replace(records=()))
        self.kept = empty._replace(records=self.kept.records)

    def _timed(self, program: str, routes: ColdRoutes) -> dict[str, Any]:
        request, lists = self.request, self._lists(routes, slots=program == "resident")
        self.empty_slots()
        self.stream = real_step.at_context(self.stream, request.context, request.config)
        self.position = jnp.int32(0)

        def loop(steps: int):
            for _ in range(steps):
                result = self._step(program, lists)
            return result

        def counted() -> np.ndarray:
            counts = np.asarray(self.kept.counts).sum(axis=0)
            if program != "early":
                return counts
            fetched, used = np.asarray(self.kept.early.counts).sum(axis=0)
            # What the last pass used would be counted by the next one.
            return np.append(counts, [fetched, used + np.asarray(early.used(self.kept)).sum()])

        return timed_cell(request, request.config, self.weights, routes.distinct, loop, counted)

    def _step(self, program: str, lists: jax.Array) -> StepResult:
        """One step; its result is readable until the next one."""
        fetched = self.kept.early
        kept = {"tiered": self.kept._replace(early=None), "early": self.kept, "resident": None}[program]
        run, params = getattr(self.programs, program), self.params[program]
        made = run(params, kept, self.stream, self.control, lists, self.position, self.spent)
        kept, self.stream, self.position, self.spent = made
        if kept is not None:
            self.kept = kept if program == "early" else kept._replace(early=fetched)
        return self.spent

    def _caches(self, program: str, lists: jax.Array) -> list[np.ndarray]:
        """The windows of all layers behind one step from the same state every time."""
        config = self.request.config
        self.stream = real_step.noisy(real_step.empty_stream(config, self.programs.shapes))
        self.stream = real_step.at_context(self.stream, self.request.context, config)
        self.position = jnp.int32(0)
        self._step(program, lists)
        return [np.asarray(window) for window in self.stream.decode.windows]

    def _right_slots(self) -> bool:
        """Whether some slots of three layers are used, and each of them holds the expert it should."""
        found = []
        for layer in sorted({0, len(self.places) // 2, len(self.places) - 1}):
            owners = np.asarray(self.kept.owners[layer])
            cold = np.asarray(self.params["tiered"].layers[layer].experts.cold)
            records, used = np.asarray(self.kept.records[layer]), np.flatnonzero(owners)
            homes = self.places[layer, owners[used] - 1, 1]
            found += [
                np.array_equal(records[slot], cold[home]) for slot, home in zip(used, homes, strict=True)
            ]
        return any(found) and all(found)

    def _lists(self, routes: ColdRoutes, slots: bool = False) -> jax.Array:
        """The words of as many steps as a program takes; of `slots` of hot experts instead of ids."""
        ids = routes.slots(self.places) if slots else routes.ids
        entries, guesses = ROWS * ids.shape[-1], routes.guesses
        if guesses is None:
            guesses = [_no_guesses(step) for step in ids]
        words = [
            np.asarray(list_words(jnp.asarray(step, jnp.int32), entries, jnp.asarray(own)))
            for step, own in zip(ids, guesses, strict=True)
        ]
        return jnp.asarray(np.resize(np.stack(words), (self.request.needed_steps, *words[0].shape)))
