"""Trains a small model of either family, target and drafter, in one resumable command.

    python -m v4flash.training.train --config configs/models/demo.json --corpus DIR --out DIR

Knows: the order of stages (target, joint, samples, drafter, export), their budgets, logging and saving. Does not
know: losses or models; those are the modules beside it. Started again with the same arguments it goes on
where it stopped.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from v4flash.checkpoint.engram_map import engram_token_map
from v4flash.config import ModelConfig
from v4flash.training import drafter as drafting
from v4flash.training.batches import Streams, draw
from v4flash.training.corpus import CLASSES
from v4flash.training.evaluate import summarised
from v4flash.training.initialise import drafter_from_target, initial_weights
from v4flash.training.joint import JointState
from v4flash.training.model_card import model_card
from v4flash.training.optimise import TrainingState
from v4flash.training.programs import (
    DRAFT_OPTIMISER,
    TARGET_OPTIMISER,
    Programs,
    batch_shape,
    joint_shape,
)
from v4flash.training.saving import RunFolder, load_weights, save_checkpoint, tokenizer_files
from v4flash.training.schedule import (
    Budget,
    Phase,
    joint_phases,
    phase_at,
    rate_share,
    seconds_until,
    target_phases,
)
from v4flash.training.settings import PROMPT_LENGTH, SMOKE, Settings
from v4flash.training.stored_weights import Skeleton, Weights, of_room

STAGES = ("target", "joint", "samples", "draft")
# Greedy decoding is judged too, and its text is like that of a low temperature.
SAMPLE_TEMPERATURES = (1.0, 1.0, 1.0, 0.3)
# Of each training stream, left to the sampler: what the target writes behind text it has learnt is easier to foresee
# than what it writes behind the prompt of a user.
PROMPT_SHARE = 0.08
WARM_UP = 0.03
HANDED_OVER_RATE = 0.5  # of the peak: joint training goes on from there
EXPORT_SECONDS = 40


class Run:
    """One training run: its configuration, data and folder."""

    def __init__(
        self,
        config_path: Path,
        corpus: Path,
        tokenizer: Path,
        out: Path,
        settings: Settings,
        start_target=None,
    ):
        self.settings, self.tokenizer = settings, tokenizer
        self.config_json = json.loads(config_path.read_text(encoding="utf-8"))
        self.config = ModelConfig.from_dict(self.config_json)
        self.skeleton = Skeleton.create(self.config, jnp.dtype(settings.dtype))
        self.folder = RunFolder(out)
        self.start_target = start_target
        longest = max(*settings.lengths, settings.sample_length) + 1
        begin = self.config.bos_token_id
        self.streams = Streams.read(corpus, "train", longest, begin, (0.0, 1 - PROMPT_SHARE))
        self.unlearnt = Streams.read(corpus, "train", longest, begin, (1 - PROMPT_SHARE, 1.0))
        self.heldout = Streams.read(corpus, "heldout", longest, begin)
        self.sources = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
        self.programs = Programs(self.skeleton, settings, self.streams)

    @property
    def target_folder(self) -> Path:
        """The checkpoint that writes the samples and that drafter training starts from."""
        return self.start_target or self.folder.path / "joint"

    def say(self, stage: str, entry: dict) -> None:
        """Prints one line and adds it to the log."""
        shown = " ".join(f"{name} {_brief(value)}" for name, value in entry.items())
        print(f"[{stage}] {shown}", flush=True)
        self.folder.record(stage, entry)

    def heldout_batch(self, kind: int, length: int) -> jax.Array:
        """The same held-out crops of a class at every call."""
        count = self.settings.evaluation_sequences
        return draw(self.heldout, jax.random.key(kind), count, length, kind)

    def places(self) -> jax.Array:
        """The same anchors on held-out crops at every call."""
        settings, rows = self.settings, self.config.draft.block_size
        key, count = jax.random.key(settings.seed), settings.evaluation_sequences
        return drafting.draw_anchors(key, count, settings.anchors, settings.sample_length, rows)

    def fresh_weights(self) -> Weights:
        token_map = None
        if self.config.engram:
            tokenizer = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
            pad = self.config.engram.pad_token_id
            token_map = engram_token_map(tokenizer, self.config.vocab_size, pad)
        return initial_weights(self.skeleton, jax.random.key(self.settings.seed), token_map)

    def budget(self, stage: str) -> Budget:
        """A stage's budget from now on: its steps, or its minutes, or its share of the time until the deadline."""
        settings, name = self.settings, f"steps_{stage}"
        planned = [60 * getattr(settings, f"minutes_{other}") for other in STAGES[STAGES.index(stage) :]]
        deadline = settings.deadline and settings.deadline - EXPORT_SECONDS
        return Budget(seconds_until(deadline, planned), getattr(settings, name, None))

    def train_target(self) -> None:
        """Stage 1: leaves a published checkpoint in `target/`, with a drafter that has not learnt."""
        folder = self.folder.path / "target"
        if self.start_target or _finished(folder) or _finished(self.target_folder):
            return
        self.programs.of_target()
        settings, weights = self.settings, self.fresh_weights()
        drafter = of_room(weights, "drafter")
        state = TrainingState.create(of_room(weights, "backbone"), TARGET_OPTIMISER)
        phases, steps = target_phases(settings.lengths), self.programs.target_steps
        steps[0].result()

        def advance(state, phase: int, share: float):
            rates = self.rates(settings.rate_target, share)
            made = steps[phase].result()(state, self.streams, drafter, *rates)
            return *made, batch_shape(settings, phases[phase].length).tokens

        def evaluate(state) -> dict:
            return self.heldout_losses(state.weights | drafter)

        loss = self.programs.target_loss
        state = self.train("target", state, phases, steps, advance, evaluate, [loss], HANDED_OVER_RATE)
        weights = state.weights | drafter
        weights |= drafter_from_target(self.skeleton, weights, jax.random.key(settings.seed + 1))
        self.save("target", weights)

    def train_joint(self) -> None:
        """Stage 2: leaves a published checkpoint in `joint/`."""
        if self.start_target or _finished(self.target_folder):
            return
        self.programs.of_joint()
        settings, weights = self.settings, load_weights(self.folder.path / "target", self.skeleton)
        state = JointState(
            TrainingState.create(of_room(weights, "backbone"), TARGET_OPTIMISER),
            TrainingState.create(of_room(weights, "drafter"), DRAFT_OPTIMISER),
        )
        phases, steps = joint_phases(settings.lengths), self.programs.joint_steps
        crops = {name: self.heldout_batch(kind, settings.sample_length) for kind, name in enumerate(CLASSES)}
        steps[0].result()

        def advance(state, phase: int, share: float):
            rates = self.rates(settings.rate_joint, share)
            shape = joint_shape(settings, phases[phase].length)
            return *steps[phase].result()(state, self.streams, *rates), shape.sequences * shape.length

        def evaluate(state) -> dict:
            stored = self.skeleton.stored(state.weights)
            return self.heldout_losses(state.weights) | self.estimates(stored, crops)

        needed = [self.programs.target_loss, self.programs.measure]
        state = self.train("joint", state, phases, steps, advance, evaluate, needed)
        self.save("joint", state.weights)

    def draw_samples(self) -> None:
        """Stage 3: leaves `samples.npy`, the target's own text behind prompts that it has not learnt, and
        `heldout_samples.npy`, at temperature 1 behind held-out prompts.
        """
        path = self.folder.path / "samples.npy"
        if path.exists():
            return
        self.programs.of_drafter()
        settings, stored = (
            self.settings,
            self.skeleton.stored(load_weights(self.target_folder, self.skeleton)),
        )
        sample, budget = self.programs.sampler.result(), self.budget("samples")
        temperature = np.resize(SAMPLE_TEMPERATURES, settings.sample_streams).astype(np.float32)
        key = jax.random.key(settings.seed + 2)

        def written(streams: Streams, key: jax.Array) -> np.ndarray:
            keys = jax.random.split(key)
            tokens = sample(stored, keys[1], self.prompts(streams, keys[0]), jnp.asarray(temperature))
            return np.asarray(tokens).astype(np.uint16)

        warm = np.flatnonzero(temperature == 1.0)
        chosen = warm[np.linspace(0, len(warm) - 1, settings.evaluation_sequences).astype(int)]
        np.save(
            self.folder.path / "heldout_samples.npy",
            written(self.heldout, jax.random.fold_in(key, settings.rounds_samples))[chosen],
        )
        budget.start()
        rounds: list[np.ndarray] = []
        while len(rounds) < settings.rounds_samples and (not rounds or budget.progress(0) < 1):
            rounds.append(written(self.unlearnt, jax.random.fold_in(key, len(rounds))))
            print(f"[samples] round {len(rounds)} seconds {budget.elapsed:.0f}", flush=True)
        with open(path.with_suffix(".partial"), "wb") as file:
            np.save(file, np.concatenate(rounds))
        path.with_suffix(".partial").rename(path)
        self.say("samples", {"step": len(rounds), "tokens": int(sum(part.size for part in rounds))})

    def prompts(self, streams: Streams, key: jax.Array) -> jax.Array:
        """Beginnings of samples, as many of each class: acceptance is measured on equal parts too."""
        each = self.settings.sample_streams // len(CLASSES)
        return jnp.concatenate(
            [
                draw(streams, jax.random.fold_in(key, kind), each, PROMPT_LENGTH, kind)
                for kind in range(len(CLASSES))
            ]
        )

    def train_drafter(self) -> None:
        """Stage 4: leaves the finished checkpoint in `model/`."""
        if _finished(self.folder.path / "model"):
            return
        self.programs.of_drafter()
        settings, weights = self.settings, load_weights(self.target_folder, self.skeleton)
        target = self.skeleton.stored(of_room(weights, "backbone"))
        own = np.load(self.folder.path / "samples.npy").astype(np.int32)
        missing = settings.rounds_samples * settings.sample_streams - len(own)
        data = self.streams, jnp.asarray(np.pad(own, ((0, missing), (0, 0)))), jnp.int32(len(own))
        state = TrainingState.create(of_room(weights, "drafter"), DRAFT_OPTIMISER)
        crops = {name: self.heldout_batch(kind, settings.sample_length) for kind, name in enumerate(CLASSES)}
        crops["own"] = jnp.asarray(np.load(self.folder.path / "heldout_samples.npy").astype(np.int32))
        step = self.programs.draft_step.result()
        rows = settings.draft_sequences * settings.anchors * self.config.draft.block_size

        def advance(state, phase: int, share: float):
            return *step(state, target, data, *self.rates(settings.rate_draft, share)), rows

        def evaluate(state) -> dict:
            return self.estimates(target | self.skeleton.stored(state.weights), crops)

        phases = (Phase(0.0, settings.sample_length, False),)
        needed = [self.programs.measure]
        state = self.train("draft", state, phases, [self.programs.draft_step], advance, evaluate, needed)
        self.save("draft", weights | state.weights)

    def rates(self, peak: float, share: float) -> tuple[jax.Array, jax.Array]:
        """Rates of weights and selection biases."""
        return jnp.float32(peak * share), jnp.float32(self.settings.balance_rate * share)

    def heldout_losses(self, weights: Weights) -> dict[str, float]:
        """Nats a token on held-out crops of each class."""
        loss, length = self.programs.target_loss.result(), self.settings.lengths[1] + 1
        return {
            f"heldout_{name}": float(loss(weights, self.heldout_batch(kind, length)))
            for kind, name in enumerate(CLASSES)
        }

    def estimates(self, stored: Weights, crops: dict[str, jax.Array]) -> dict[str, dict]:
        """Teacher-forced figures of the drafter on each set of crops."""
        measure, places = self.programs.measure.result(), self.places()
        return {
            name: dataclasses.asdict(summarised(measure(stored, tokens, places)))
            for name, tokens in crops.items()
        }

    def train(
        self,
        stage: str,
        state,
        phases: tuple[Phase, ...],
        steps: list[Future],
        advance: Callable,
        evaluate: Callable,
        needed: list[Future],
        *final: float,
    ):
        """Makes steps until the stage's budget is used, from where it stopped; logs, evaluates and saves on the way.

        Args: advance, (state, phase, share of the peak rate) -> (state, metrics, tokens seen); evaluate, state ->
        figures, once the `needed` programs are there; final, the share of the peak rate that the stage ends with.
        """
        settings, budget = self.settings, self.budget(stage)
        state, budget.spent = self.folder.load_state(stage, state)
        if settings.deadline:
            budget.seconds += budget.spent  # what is left until the deadline comes on top
        budget.start()
        step = int(state.step)
        current = 0 if step == 0 else phase_at(phases, budget.progress(step))
        saved = logged = evaluated = time.monotonic()
        seen, previous = 0, None
        while (progress := budget.progress(step)) < 1:
            wanted = phase_at(phases, progress)
            if wanted > current and (steps[wanted].done() or getattr(settings, f"steps_{stage}")):
                current = wanted
            state, metrics, items = advance(state, current, rate_share(progress, WARM_UP, *final))
            step, seen = step + 1, seen + items
            if previous is not None:  # one step behind, so that the device never waits for the host
                previous["loss"].block_until_ready()
            previous, now, last = metrics, time.monotonic(), budget.progress(step) >= 1
            if now - logged >= settings.log_seconds or last:
                entry = _measured(step, budget, metrics, seen / (time.monotonic() - logged))
                due = now - evaluated >= settings.evaluate_seconds and all(made.done() for made in needed)
                if due or last:
                    entry |= evaluate(state)
                    evaluated = now
                self.say(stage, entry | {"length": phases[current].length})
                logged, seen = time.monotonic(), 0
            if now - saved > settings.save_seconds:
                self.folder.save_state(stage, state, budget.elapsed)
                saved = time.monotonic()
        self.folder.save_state(stage, state, budget.elapsed)
        return state

    def save(self, stage: str, weights: Weights) -> None:
        """The published checkpoint of a finished stage, with tokenizer files; the last one has a model card."""
        files = tokenizer_files(self.tokenizer)
        if stage == "draft":
            files["losses.json"] = json.dumps(self.folder.records, indent=1).encode()
            files["README.md"] = model_card(self.config, self.sources, self.folder.records).encode()
        folder = self.folder.path / ("model" if stage == "draft" else stage)
        size = save_checkpoint(folder, self.skeleton, weights, self.config_json, files)
        print(f"[{stage}] wrote {folder} ({size / 1e6:.1f} MB)", flush=True)
        self.folder.drop_state(stage)


def _finished(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _brief(value) -> str:
    """One value of a log line; of an estimate, tokens per step, ranking and acceptance per position."""
    if isinstance(value, dict):
        return f"{value['tau']:.2f} auc {value['auc']:.3f}/{value['auc_of_chance']:.3f} {value['accepted']}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _measured(step: int, budget: Budget, metrics: dict, rate: float) -> dict:
    entry = {"step": step, "seconds": round(budget.elapsed, 1)}
    for name, value in metrics.items():
        entry[name] = float(value) if value.ndim == 0 else [round(float(v), 4) for v in value]
    return entry | {"tokens_per_second": float(rate)}


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs every stage that is not finished yet."""
    parser = argparse.ArgumentParser(
        prog="python -m v4flash.training.train", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model to train")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.bin files and manifest.json")
    parser.add_argument("--tokenizer", type=Path, default=Path("demo"), help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of this run; resumed if it exists")
    parser.add_argument("--target", type=Path, help="published checkpoint to use instead of training one")
    parser.add_argument("--smoke", action="store_true", help="sizes that finish on a CPU in minutes")
    for field in dataclasses.fields(Settings):
        kind = {"lengths": int, "dtype": str}.get(field.name) or (float if "." in str(field.default) else int)
        count = {"nargs": 3} if field.name == "lengths" else {}
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, **count)
    options = vars(parser.parse_args(arguments))
    base = SMOKE if options.pop("smoke") else Settings()
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: options[name] for name in names if options[name] is not None}
    if "lengths" in given:
        given["lengths"] = tuple(given["lengths"])
    settings = dataclasses.replace(base, **given)
    run = Run(
        options["config"],
        options["corpus"],
        options["tokenizer"],
        options["out"],
        settings,
        options["target"],
    )
    print(f"[run] {jax.devices()[0].device_kind} {settings}", flush=True)
    run.train_target()
    run.train_joint()
    run.draw_samples()
    run.train_drafter()
    return 0


if __name__ == "__main__":
    sys.exit(main())
