"""Measures a checkpoint's drafter with the decoding engine, on held-out prompts of every class.

    python -m v4flash.training.acceptance --ckpt demo --corpus DIR --out demo/acceptance.json

Knows: how prompts are cut from held-out documents, decoding them, and the chance of acceptance computed apart
from the sampler. Does not know: what the figures mean (acceptance_figures.py) or training.

The exit code is 0 when every bar is cleared, 1 when one is not.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.engine.language_model import DTYPES, RULES, LanguageModel, load
from v4flash.engine.programs import new_stream
from v4flash.errors import UsageError, V4FlashError
from v4flash.fidelity.id_lists import rounded_context
from v4flash.fidelity.transcripts import digest
from v4flash.speculative.filters import SamplingParams, target_law
from v4flash.speculative.rejection import acceptance_probability, block_chances
from v4flash.speculative.step import draft
from v4flash.speculative.stream import Control, StepResult, Stream
from v4flash.text import Tokenizer
from v4flash.training.acceptance_figures import ALL, Decoded, Step, figures, gates, markdown
from v4flash.training.batches import TOKEN_DTYPE
from v4flash.training.corpus import CLASSES
from v4flash.training.trigram import Trigram

SCHEMA = 2
PROMPT_LENGTHS = 48, 96
SHORTEST_REST = 64  # tokens of a document behind its prompt, so that the prompt is no complete text
TEMPERATURES = 0.0, 1.0


def read_stream(folder: Path, split: str, kind: str) -> np.ndarray:
    """One token stream of the corpus, uint16 [N]. Raises UsageError when it is not there."""
    path = folder / f"{split}_{kind}.bin"
    if not path.is_file():
        raise UsageError(f"no {path.name} in {folder}; build the corpus first (docs/training.md)")
    return np.fromfile(path, TOKEN_DTYPE)


def documents(stream: np.ndarray, begin_id: int) -> list[list[int]]:
    """The documents of a stream, each from its begin mark on."""
    starts = np.flatnonzero(stream == begin_id)
    return [part.tolist() for part in np.split(stream, starts)[1:]]


def prompts_of(texts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The beginnings of `count` documents spread over `texts`, of 48 to 96 tokens."""
    lengths = np.linspace(*PROMPT_LENGTHS, count).astype(int)
    long_enough = [text for text in texts if len(text) >= PROMPT_LENGTHS[1] + SHORTEST_REST]
    return [text[:length] for text, length in zip(_spread(long_enough, count), lengths, strict=False)]


def chat_prompts_of(texts: Sequence[list[int]], assistant_id: int, count: int) -> list[list[int]]:
    """`count` conversations, each up to its first assistant header, the think mark included."""
    asked = [text for text in texts if assistant_id in text[:-2]]
    return [text[: text.index(assistant_id) + 2] for text in _spread(asked, count)]


def _spread(items: Sequence, count: int) -> list:
    """`count` items at even distances (all of them if there are fewer)."""
    places = np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))
    return [items[place] for place in places]


def make_chances(model: LanguageModel) -> Callable[[Any, Stream, Control], jax.Array]:
    """A jitted function (weights, stream at the start of a step, control) -> chances of its drafts, float32 [K].

    Entry j is the chance, given the drafts before j and that they stay, that draft j stays as well: the sum over v of
    min(s * p(v), q(v)) / s. q is the law of draft j, by the drafter that the step runs; p the target's law there,
    from a pass over anchor and drafts; s the share of the target's mass that the earlier drafts still stand for, 1
    when drafts are judged one by one.
    """
    rows, limit = model.programs.shapes.rows, model.draft_limit

    def chances(params: nnx.State, stream: Stream, control: Control) -> jax.Array:
        merged = model.programs.model(params)
        ids, laws, _, count = draft(merged, stream, control, limit, control.draft_length)
        tokens = jnp.zeros((rows,), jnp.int32).at[0].set(stream.anchor).at[1 : limit + 1].set(ids)
        trunk, _ = merged.backbone.trunk(tokens, stream.decode, count + 1)
        targets = target_law(merged.backbone.logits(trunk.hidden)[:limit], control.sampling)
        return chances_of(ids, laws, targets, count, control.blockwise)

    return model.programs.runner.jit(chances)


def chances_of(
    ids: jax.Array, laws: jax.Array, targets: jax.Array, live: jax.Array, blockwise: jax.Array
) -> jax.Array:
    """The chances [K] of drafts int32 [K] from their laws and the target's [K, V]; 0 where none can remain."""
    carried, _ = block_chances(ids, laws, targets, live)
    share = jnp.where(blockwise, carried[:-1], 1)
    stays = acceptance_probability(share[:, None] * targets, laws)
    return jnp.where(share > 0, stays / jnp.where(share > 0, share, 1), 0)


def decode(
    model: LanguageModel, prompt: list[int], k: int, temperature: float, seed: int, budget: int, rule: str
) -> Decoded:
    """Decodes up to `budget` tokens or the end mark, as any caller of the library would."""
    generation = model.generate(prompt, k=k, temperature=temperature, seed=seed, max_tokens=budget, rule=rule)
    records = list(generation)
    steps = [
        Step(
            record.position - len(prompt),
            len(record.tokens),
            record.accepted,
            len(record.drafts),
            tuple(record.confidence),
        )
        for record in records[1:]
    ]
    return Decoded(prompt, generation.tokens, steps, budget)


def with_chances(
    model: LanguageModel, chances: Callable, text: Decoded, k: int, temperature: float, seed: int, rule: str
) -> Decoded:
    """The same text with the chances of every step's drafts, found by taking all steps again.

    Raises V4FlashError when the second run emits other tokens: draws depend on seed and position only.
    """
    control = model.control(
        k=k,
        sampling=SamplingParams.make(temperature=temperature),
        seed=seed,
        stop_ids=(model.config.eos_token_id,),
        rule=rule,
    )
    session = model.session()
    session.tokens.extend(text.prompt)
    drawn, _ = session.prefill(control)
    ids, found = [int(drawn)], []
    shapes = model.programs.shapes
    stream = new_stream(session.state, [*text.prompt, *ids], text.budget - 1, control, shapes)
    while len(found) < len(text.steps):
        found.append(chances(model.params, stream, control))
        stream, words = model.programs.step(model.params, stream, control)
        result = StepResult.unpacked(jax.device_get(words))
        ids += result.tokens[: int(result.emitted)].tolist()
    if ids != text.ids:
        raise V4FlashError(
            f"two runs with seed {seed} emitted different tokens; expected the same ones, please report this"
        )
    values = [tuple(array.tolist()) for array in jax.device_get(found)]
    steps = [dataclasses.replace(step, chances=value) for step, value in zip(text.steps, values, strict=True)]
    return dataclasses.replace(text, steps=steps)


def measure(
    model: LanguageModel,
    prompts: dict[str, list[list[int]]],
    trigram: Trigram,
    k: int,
    budget: int,
    rule: str,
    say: Callable[[str], Any],
) -> list[dict[str, Any]]:
    """Rows of figures for every class and for all classes together, at temperatures 0 and 1."""
    chances, rows = make_chances(model), []
    for temperature in TEMPERATURES:
        everything: list[Decoded] = []
        for kind, class_prompts in prompts.items():
            texts = []
            for prompt in class_prompts:
                # A seed of its own: texts that draw alike at a position share their luck, and no error bar counts that.
                seed = len(everything) + len(texts)
                text = decode(model, prompt, k, temperature, seed, budget, rule)
                if temperature > 0:
                    text = with_chances(model, chances, text, k, temperature, seed, rule)
                texts.append(text)
            everything += texts
            rows.append({"class": kind, "temperature": temperature, **figures(texts, k, trigram)})
            say(f"{kind} at temperature {temperature:g}: {rows[-1]['tokens_per_step']} tokens per step")
        rows.append({"class": ALL, "temperature": temperature, **figures(everything, k, trigram)})
    return rows


def versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {"python": platform.python_version(), **found}


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, measures, writes the JSON and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m v4flash.training.acceptance", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the token streams")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--prompts-per-class", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each text at most")
    parser.add_argument("--k", type=int, default=5, help="drafts a step")
    parser.add_argument(
        "--rule", choices=RULES, default=RULES[0], help="how drafts are judged (default: %(default)s)"
    )
    parser.add_argument("--mode", choices=("exact", "qat"), help="default: what the checkpoint asks for")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, bfloat16 elsewhere"
    )
    options = parser.parse_args(arguments)

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    tokenizer = Tokenizer.from_dir(options.ckpt)
    prompts = {}
    for kind in CLASSES:
        texts = documents(read_stream(options.corpus, "heldout", kind), tokenizer.bos_id)
        chat = kind == "chat"
        prompts[kind] = (
            chat_prompts_of(texts, tokenizer.assistant_id, options.prompts_per_class)
            if chat
            else prompts_of(texts, options.prompts_per_class)
        )
    longest = max(len(prompt) for found in prompts.values() for prompt in found)
    say("counting trigrams")
    trigram = Trigram([read_stream(options.corpus, "train", kind) for kind in CLASSES], tokenizer.vocab_size)
    context = rounded_context([longest + options.tokens])
    model = load(options.ckpt, context=context, mode=options.mode, dtype=options.dtype, progress=say)
    rows = measure(model, prompts, trigram, options.k, options.tokens, options.rule, say)
    device = jax.devices()[0]
    document = {
        "schema": SCHEMA,
        "checkpoint": digest(options.ckpt),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions(),
        "mode": model.mode,
        "dtype": np.dtype(model.numerics.dtype).name,
        "rows": model.programs.shapes.rows,
        "k": options.k,
        "rule": options.rule,
        "prompts_per_class": options.prompts_per_class,
        "tokens": options.tokens,
        "figures": rows,
        "gates": gates(rows),
    }
    write_atomically(options.out, [json.dumps(document, indent=1).encode() + b"\n"])
    print(markdown(document))
    return 0 if all(document["gates"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
