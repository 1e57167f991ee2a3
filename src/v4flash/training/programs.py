"""The compiled programs of a training run, made in the background before a stage needs them.

Knows: which programs there are, and the shapes they are compiled for. Does not know: weights, data, budgets.
"""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp

from v4flash.training import drafter as drafting
from v4flash.training import joint
from v4flash.training import target as targeting
from v4flash.training.batches import Streams, draw
from v4flash.training.evaluate import make_measure
from v4flash.training.optimise import TrainingState, adamw
from v4flash.training.sampler import make_sampler
from v4flash.training.schedule import Phase, joint_phases, target_phases
from v4flash.training.settings import PROMPT_LENGTH, Settings
from v4flash.training.stored_weights import Skeleton, of_room, with_open_selection

WORKERS = 4
OWN_SHARE = 0.85  # of the drafter's sequences are the target's own text, which is what it will draft
TARGET_OPTIMISER, DRAFT_OPTIMISER = adamw(targeting.WEIGHT_DECAY), adamw(drafting.WEIGHT_DECAY)


class Programs:
    """One future for each program, or a list with one for each phase; asking for it starts its compilation."""

    def __init__(self, skeleton: Skeleton, settings: Settings, streams: Streams):
        self.skeleton, self.settings = skeleton, settings
        self._streams = jax.tree.map(_shape, streams)
        self._rate = jax.ShapeDtypeStruct((), jnp.float32)
        self._weights = skeleton.abstract()
        self._pool = ThreadPoolExecutor(max_workers=WORKERS)
        self._tracing = threading.Lock()

    def of_target(self) -> None:
        """Starts what target training needs, first things first, and all that follows it."""
        _ = self.target_steps, self.target_loss
        self.of_joint()

    def of_joint(self) -> None:
        """Starts what joint training needs, and all that follows it."""
        _ = self.joint_steps, self.measure, self.target_loss
        self.of_drafter()

    def of_drafter(self) -> None:
        """Starts the sampler and what drafter training needs."""
        _ = self.sampler, self.draft_step, self.measure

    @functools.cached_property
    def target_steps(self) -> list[Future]:
        drafter = of_room(self._weights, "drafter")
        arguments = self.state("backbone"), self._streams, drafter, self._rate, self._rate
        return [
            self._compiled(f"target step, length {phase.length}", self._target_step(phase), *arguments)
            for phase in target_phases(self.settings.lengths)
        ]

    def _target_step(self, phase: Phase) -> Callable:
        config = self.skeleton.config
        config = with_open_selection(config, phase.length) if phase.open_selection else config
        skeleton = Skeleton.create(config, self.skeleton.numerics.dtype)
        shape = batch_shape(self.settings, phase.length)
        return targeting.make_step(skeleton, shape, TARGET_OPTIMISER, self.settings.seed)

    @functools.cached_property
    def target_loss(self) -> Future:
        count, length = self.settings.evaluation_sequences, self.settings.lengths[1]
        crop = jax.ShapeDtypeStruct((count, length + 1), jnp.int32)
        return self._compiled("target loss", targeting.make_loss(self.skeleton), self._weights, crop)

    @functools.cached_property
    def joint_steps(self) -> list[Future]:
        state = joint.JointState(self.state("backbone"), self.state("drafter"))
        optimisers, seed = (TARGET_OPTIMISER, DRAFT_OPTIMISER), self.settings.seed + 4
        return [
            self._compiled(
                f"joint step, length {phase.length}",
                joint.make_step(self.skeleton, joint_shape(self.settings, phase.length), optimisers, seed),
                state,
                self._streams,
                self._rate,
                self._rate,
            )
            for phase in joint_phases(self.settings.lengths)
        ]

    @functools.cached_property
    def sampler(self) -> Future:
        settings, streams = self.settings, self.settings.sample_streams
        return self._compiled(
            "sampler",
            make_sampler(self.skeleton, settings.sample_tokens),
            jax.eval_shape(self.skeleton.stored, self._weights),
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((streams, PROMPT_LENGTH), jnp.int32),
            jax.ShapeDtypeStruct((streams,), jnp.float32),
        )

    @functools.cached_property
    def draft_step(self) -> Future:
        settings = self.settings
        target = jax.eval_shape(self.skeleton.stored, of_room(self._weights, "backbone"))
        rows = settings.rounds_samples * settings.sample_streams
        own = jax.ShapeDtypeStruct((rows, settings.sample_length), jnp.int32)
        written = jax.ShapeDtypeStruct((), jnp.int32)
        step = drafting.make_step(
            self.skeleton, settings.anchors, self._mixed, DRAFT_OPTIMISER, settings.seed + 3
        )
        data = self._streams, own, written
        return self._compiled("draft step", step, self.state("drafter"), target, data, self._rate, self._rate)

    def _mixed(self, data: tuple[Streams, jax.Array, jax.Array], key: jax.Array) -> jax.Array:
        """Corpus text beside the target's own, of which the first `data[2]` rows are there."""
        settings, (streams, own, written) = self.settings, data
        keys, count = jax.random.split(key), round(OWN_SHARE * self.settings.draft_sequences)
        text = draw(streams, keys[0], settings.draft_sequences - count, settings.sample_length)
        return jnp.concatenate([text, own[jax.random.randint(keys[1], (count,), 0, written)]])

    @functools.cached_property
    def measure(self) -> Future:
        """`make_measure`'s function for crops of the samples' length."""
        settings, count = self.settings, self.settings.evaluation_sequences
        return self._compiled(
            "draft estimates",
            make_measure(self.skeleton),
            jax.eval_shape(self.skeleton.stored, self._weights),
            jax.ShapeDtypeStruct((count, settings.sample_length), jnp.int32),
            jax.ShapeDtypeStruct((count, settings.anchors), jnp.int32),
        )

    def state(self, room: str) -> TrainingState:
        """Shapes of a room's training state."""
        optimiser = TARGET_OPTIMISER if room == "backbone" else DRAFT_OPTIMISER
        return jax.eval_shape(lambda own: TrainingState.create(own, optimiser), of_room(self._weights, room))

    def _compiled(self, label: str, function: Callable, *arguments) -> Future:
        return self._pool.submit(self._compile, label, function, *arguments)

    def _compile(self, label: str, function: Callable, *arguments):
        """A jitted function compiled for shapes; prints how long it took and its memory."""
        # Tracing holds Python's lock, compiling does not: one after another, the first program is there soonest.
        with self._tracing:
            began = time.monotonic()
            lowered = function.lower(*arguments)
        traced = time.monotonic()
        made = lowered.compile()
        size, analysis = "", made.memory_analysis()
        if analysis:
            size = f"{(analysis.temp_size_in_bytes + analysis.argument_size_in_bytes) / 2**30:.1f} GiB"
        done = time.monotonic()
        print(f"[compile] {label}: {traced - began:.0f} + {done - traced:.0f} s {size}", flush=True)
        return made


def batch_shape(settings: Settings, length: int) -> targeting.BatchShape:
    """Microbatches whose attention scores take the memory of the set tokens at length 1024."""
    scores = settings.tokens_per_microbatch * 1024
    sequences = max(min(scores // length**2, settings.tokens_per_step // length), 1)
    passes = max(round(settings.tokens_per_step / (sequences * length)), 1)
    return targeting.BatchShape(passes, sequences, length)


def joint_shape(settings: Settings, length: int) -> joint.JointShape:
    """The set tokens and blocks in crops of a length."""
    sequences = max(settings.joint_tokens // length, 1)
    return joint.JointShape(sequences, length, settings.joint_blocks // sequences)


def _shape(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
