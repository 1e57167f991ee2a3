"""Trains a small model of either family, target and drafter, in one resumable command.

    python -m v4flash.training.train --config configs/models/demo.json --corpus DIR --out DIR

Knows: the order of stages (target, samples, drafter, export), their budgets, logging and saving. Does not
know: losses or models; those are the modules beside it. Started again with the same arguments it goes on
where it stopped.
"""

import argparse
import dataclasses
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from v4flash.checkpoint.engram_map import engram_token_map
from v4flash.config import ModelConfig
from v4flash.training import drafter as drafting
from v4flash.training import target as targeting
from v4flash.training.batches import Streams, draw
from v4flash.training.corpus import CLASSES
from v4flash.training.evaluate import make_measure, summarised
from v4flash.training.initialise import drafter_from_target, initial_weights
from v4flash.training.model_card import model_card
from v4flash.training.optimise import TrainingState, adamw
from v4flash.training.sampler import make_sampler
from v4flash.training.saving import RunFolder, load_weights, save_checkpoint, tokenizer_files
from v4flash.training.schedule import Budget, Phase, phase_at, rate_share, target_phases
from v4flash.training.stored_weights import Skeleton, of_room, with_open_selection

PROMPT_LENGTH = 32
SAMPLE_TEMPERATURES = (1.0, 0.6, 1.0, 0.3)
OWN_SHARE = 0.7  # of the drafter's sequences are the target's own text, which is what it will draft
WARM_UP = 0.03


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and budgets of a run; minutes hold where the matching number of steps is None."""

    minutes_target: float = 2.2
    minutes_samples: float = 2.0
    minutes_draft: float = 5.5
    steps_target: int | None = None
    rounds_samples: int | None = 20
    steps_draft: int | None = None
    lengths: tuple[int, int, int] = (512, 512, 1024)
    tokens_per_step: int = 32768
    tokens_per_microbatch: int = 16384
    rate_target: float = 2.5e-3
    rate_draft: float = 1.5e-3
    balance_rate: float = 3e-3
    sample_streams: int = 1024
    sample_tokens: int = 480
    draft_sequences: int = 20
    anchors: int = 96
    evaluation_sequences: int = 16
    log_every: int = 50
    evaluate_every: int = 500
    save_seconds: float = 120.0
    dtype: str = "bfloat16"
    seed: int = 20261129

    @property
    def sample_length(self) -> int:
        return PROMPT_LENGTH + self.sample_tokens


SMOKE = Settings(
    steps_target=6,
    rounds_samples=1,
    steps_draft=4,
    lengths=(32, 64, 128),
    tokens_per_step=256,
    tokens_per_microbatch=128,
    sample_streams=4,
    sample_tokens=16,
    draft_sequences=4,
    anchors=4,
    evaluation_sequences=2,
    log_every=1,
    evaluate_every=3,
    dtype="float32",
)


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
        self.target_folder = start_target or out / "target"
        longest = max(*settings.lengths, settings.sample_length) + 1
        begin = self.config.bos_token_id
        self.streams = Streams.read(corpus, "train", longest, begin)
        self.heldout = Streams.read(corpus, "heldout", longest, begin)
        self.sources = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))

    def say(self, stage: str, entry: dict) -> None:
        """Prints one line and adds it to the log."""
        shown = " ".join(f"{name} {_brief(value)}" for name, value in entry.items())
        print(f"[{stage}] {shown}", flush=True)
        self.folder.record(stage, entry)

    def heldout_batch(self, kind: int, length: int) -> jax.Array:
        """The same held-out crops of a class at every call."""
        count = self.settings.evaluation_sequences
        return draw(self.heldout, jax.random.key(kind), count, length, kind)

    def fresh_weights(self):
        token_map = None
        if self.config.engram:
            tokenizer = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
            pad = self.config.engram.pad_token_id
            token_map = engram_token_map(tokenizer, self.config.vocab_size, pad)
        return initial_weights(self.skeleton, jax.random.key(self.settings.seed), token_map)

    def train_target(self) -> None:
        """Stage 1: leaves a published checkpoint in `target_folder`."""
        if (self.target_folder / "config.json").exists():
            return
        settings, optimiser = self.settings, adamw(targeting.WEIGHT_DECAY)
        budget = Budget(settings.minutes_target * 60, settings.steps_target)
        weights = self.fresh_weights()
        drafter = of_room(weights, "drafter")
        state = TrainingState.create(of_room(weights, "backbone"), optimiser)
        state, budget.spent = self.folder.load_state("target", state)
        phases = target_phases(settings.lengths)
        first = phase_at(phases, budget.progress(int(state.step)))
        arguments = (state, self.streams, drafter, jnp.float32(0), jnp.float32(0))
        shapes = jax.tree.map(_shape, arguments)
        crop = _shape(self.heldout_batch(0, settings.lengths[1] + 1))
        with ThreadPoolExecutor(max_workers=2) as compiler:
            # Later phases and the evaluation compile while the current phase runs.
            steps: list[Future | None] = [None] * len(phases)
            for index in range(first, len(phases)):
                make = self.target_step(phases[index], optimiser)
                label = f"target step, length {phases[index].length}"
                steps[index] = compiler.submit(_compiled, label, make, *shapes)
            loss = targeting.make_loss(self.skeleton)
            evaluate = compiler.submit(_compiled, "target loss", loss, shapes[0].weights | shapes[2], crop)
            steps[first].result()
            budget.start()
            state = self._run_target(state, drafter, budget, phases, steps, evaluate)
        weights = state.weights | drafter
        weights |= drafter_from_target(self.skeleton, weights, jax.random.key(settings.seed + 1))
        files = tokenizer_files(self.tokenizer)
        size = save_checkpoint(self.target_folder, self.skeleton, weights, self.config_json, files)
        print(f"[target] wrote {self.target_folder} ({size / 1e6:.1f} MB)", flush=True)
        self.folder.drop_state("target")

    def batch_shape(self, length: int) -> targeting.BatchShape:
        """Microbatches whose attention scores take the memory of the set tokens at length 1024."""
        settings = self.settings
        scores = settings.tokens_per_microbatch * 1024
        sequences = max(min(scores // length**2, settings.tokens_per_step // length), 1)
        passes = max(round(settings.tokens_per_step / (sequences * length)), 1)
        return targeting.BatchShape(passes, sequences, length)

    def target_step(self, phase: Phase, optimiser):
        """The jitted step of a phase."""
        config = with_open_selection(self.config, phase.length) if phase.open_selection else self.config
        skeleton = Skeleton.create(config, self.skeleton.numerics.dtype)
        return targeting.make_step(skeleton, self.batch_shape(phase.length), optimiser, self.settings.seed)

    def _run_target(self, state, drafter, budget: Budget, phases, steps: list, evaluate: Future):
        settings, step = self.settings, int(state.step)
        current = phase_at(phases, budget.progress(step))
        saved = logged = time.monotonic()
        seen, previous = 0, None
        while (progress := budget.progress(step)) < 1:
            wanted = phase_at(phases, progress)
            if wanted > current and (steps[wanted].done() or settings.steps_target):
                current = wanted
            share = rate_share(progress, WARM_UP)
            rates = jnp.float32(settings.rate_target * share), jnp.float32(settings.balance_rate * share)
            state, metrics = steps[current].result()(state, self.streams, drafter, *rates)
            step, seen = step + 1, seen + self.batch_shape(phases[current].length).tokens
            if previous is not None:  # one step behind, so that the device never waits for the host
                previous["loss"].block_until_ready()
            previous = metrics
            last = budget.progress(step) >= 1
            if step % settings.log_every == 0 or last:
                entry = _measured(step, budget, metrics, seen / (time.monotonic() - logged))
                if last or (step % settings.evaluate_every == 0 and evaluate.done()):
                    for kind, name in enumerate(CLASSES):
                        crop = self.heldout_batch(kind, settings.lengths[1] + 1)
                        entry[f"heldout_{name}"] = float(evaluate.result()(state.weights | drafter, crop))
                self.say("target", entry | {"length": phases[current].length})
                logged, seen = time.monotonic(), 0
            if time.monotonic() - saved > settings.save_seconds:
                self.folder.save_state("target", state, budget.elapsed)
                saved = time.monotonic()
        self.folder.save_state("target", state, budget.elapsed)
        return state

    def draw_samples(self) -> None:
        """Stage 2: leaves `samples.npy`, the target's own text behind corpus prompts."""
        path = self.folder.path / "samples.npy"
        if path.exists():
            return
        settings, stored = (
            self.settings,
            self.skeleton.stored(load_weights(self.target_folder, self.skeleton)),
        )
        budget = Budget(settings.minutes_samples * 60, settings.rounds_samples)
        sample = make_sampler(self.skeleton, settings.sample_tokens)
        temperature = jnp.asarray(np.resize(SAMPLE_TEMPERATURES, settings.sample_streams), jnp.float32)
        prompts = draw(self.streams, jax.random.key(0), settings.sample_streams, PROMPT_LENGTH)
        sample = _compiled("sampler", sample, stored, jax.random.key(0), prompts, temperature)
        budget.start()
        rounds = []
        while budget.progress(len(rounds)) < 1:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed + 2), len(rounds)))
            prompts = draw(self.streams, keys[0], settings.sample_streams, PROMPT_LENGTH)
            rounds.append(np.asarray(sample(stored, keys[1], prompts, temperature)).astype(np.uint16))
            print(f"[samples] round {len(rounds)} seconds {budget.elapsed:.0f}", flush=True)
        with open(path.with_suffix(".partial"), "wb") as file:
            np.save(file, np.concatenate(rounds))
        path.with_suffix(".partial").rename(path)
        self.say("samples", {"step": len(rounds), "tokens": int(sum(part.size for part in rounds))})

    def train_drafter(self) -> None:
        """Stage 3: leaves the finished checkpoint in `model/`."""
        settings, optimiser = self.settings, adamw(drafting.WEIGHT_DECAY)
        if (self.folder.path / "model" / "config.json").exists():
            return
        budget = Budget(settings.minutes_draft * 60, settings.steps_draft)
        weights = load_weights(self.target_folder, self.skeleton)
        target = self.skeleton.stored(of_room(weights, "backbone"))
        own = jnp.asarray(np.load(self.folder.path / "samples.npy").astype(np.int32))
        train_own, heldout_own = own[settings.evaluation_sequences :], own[: settings.evaluation_sequences]
        state = TrainingState.create(of_room(weights, "drafter"), optimiser)
        state, budget.spent = self.folder.load_state("draft", state)

        def mixed(data, key):
            """The target's own text beside corpus text."""
            keys, count = jax.random.split(key), round(OWN_SHARE * settings.draft_sequences)
            written = draw(data[0], keys[0], settings.draft_sequences - count, settings.sample_length)
            chosen = jax.random.randint(keys[1], (count,), 0, data[1].shape[0])
            return jnp.concatenate([written, data[1][chosen]])

        data = self.streams, train_own
        step = drafting.make_step(self.skeleton, settings.anchors, mixed, optimiser, settings.seed + 3)
        crops = {name: self.heldout_batch(kind, settings.sample_length) for kind, name in enumerate(CLASSES)}
        crops["own"] = heldout_own
        rows = self.config.draft.block_size
        places = drafting.draw_anchors(
            jax.random.key(settings.seed),
            settings.evaluation_sequences,
            settings.anchors,
            settings.sample_length,
            rows,
        )
        stored = target | jax.eval_shape(self.skeleton.stored, state.weights)
        shapes = jax.tree.map(_shape, (stored, heldout_own, places))
        with ThreadPoolExecutor(max_workers=1) as compiler:
            run_step = _compiled("draft step", step, state, target, data, jnp.float32(0), jnp.float32(0))
            measure = compiler.submit(_compiled, "draft estimates", make_measure(self.skeleton), *shapes)
            budget.start()
            state = self._run_drafter(state, target, data, budget, run_step, measure, crops, places)
        self.export(weights | state.weights)
        self.folder.drop_state("draft")

    def _run_drafter(self, state, target, data, budget, run_step, measure: Future, crops: dict, places):
        settings, step = self.settings, int(state.step)
        rows = settings.draft_sequences * settings.anchors * self.config.draft.block_size
        saved = logged = time.monotonic()
        seen, previous = 0, None
        while (progress := budget.progress(step)) < 1:
            share = rate_share(progress, WARM_UP)
            rates = jnp.float32(settings.rate_draft * share), jnp.float32(settings.balance_rate * share)
            state, metrics = run_step(state, target, data, *rates)
            step, seen = step + 1, seen + rows
            if previous is not None:
                previous["loss"].block_until_ready()
            previous = metrics
            last = budget.progress(step) >= 1
            if step % settings.log_every == 0 or last:
                entry = _measured(step, budget, metrics, seen / (time.monotonic() - logged))
                if last or (step % settings.evaluate_every == 0 and measure.done()):
                    stored = target | self.skeleton.stored(state.weights)
                    for name, tokens in crops.items():
                        figures = summarised(measure.result()(stored, tokens, places))
                        entry[name] = dataclasses.asdict(figures)
                self.say("draft", entry)
                logged, seen = time.monotonic(), 0
            if time.monotonic() - saved > settings.save_seconds:
                self.folder.save_state("draft", state, budget.elapsed)
                saved = time.monotonic()
        self.folder.save_state("draft", state, budget.elapsed)
        return state

    def export(self, weights) -> None:
        """Stage 4: the published checkpoint, with tokenizer files and model card."""
        files = tokenizer_files(self.tokenizer)
        files["losses.json"] = json.dumps(self.folder.records, indent=1).encode()
        files["README.md"] = model_card(self.config, self.sources, self.folder.records).encode()
        folder = self.folder.path / "model"
        size = save_checkpoint(folder, self.skeleton, weights, self.config_json, files)
        print(f"[export] wrote {folder} ({size / 1e6:.1f} MB)", flush=True)


def _brief(value) -> str:
    """One value of a log line; of an estimate, tokens per step and acceptance per position."""
    if isinstance(value, dict):
        return f"{value['tau']:.2f} {value['accepted']}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _compiled(label: str, function, *arguments):
    """A jitted function compiled for the shapes of its arguments; prints how long it took and its memory."""
    began = time.monotonic()
    made = function.lower(*jax.tree.map(_shape, arguments)).compile()
    analysis = made.memory_analysis()
    size = (
        f"{(analysis.temp_size_in_bytes + analysis.argument_size_in_bytes) / 2**30:.1f} GiB"
        if analysis
        else ""
    )
    print(f"[compile] {label}: {time.monotonic() - began:.0f} s {size}", flush=True)
    return made


def _shape(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


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
    run.draw_samples()
    run.train_drafter()
    return 0


if __name__ == "__main__":
    sys.exit(main())
