"""Records greedy transcripts of a prompt file with one checkpoint.

    python -m v4flash.fidelity.record_transcripts --ckpt demo --prompts demo/prompts.json --out FILE

Knows: the prompt file, and how its prompts are thinned out. Does not know: how transcripts are made or compared
(transcripts.py). The exit code is 1 when a draft length changed a text.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from v4flash.checkpoint.safetensors_file import write_atomically
from v4flash.engine.language_model import DTYPES, load
from v4flash.errors import UsageError
from v4flash.fidelity.id_lists import rounded_context
from v4flash.fidelity.transcripts import record


def read_prompts(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Prompts of a file (a JSON list of objects with `text`, `class`, `chat`), `count` of them at even distances.

    Raises UsageError when the file cannot be read or is of another shape.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); give a JSON file of prompts") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); expected a list of prompts") from None
    if not isinstance(prompts, list) or not all(
        isinstance(prompt, dict) and {"text", "class", "chat"} <= prompt.keys() for prompt in prompts
    ):
        raise UsageError(f"{path}: expected a list of objects with text, class and chat")
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[place * len(prompts) // count] for place in range(count)]


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, records and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m v4flash.fidelity.record_transcripts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of prompts")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--count", type=int, help="prompts at even distances of the file (default: all)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each prompt")
    parser.add_argument(
        "--draft-lengths", type=int, nargs="+", default=[0, 5], help="values of k, the reference first"
    )
    parser.add_argument("--mode", choices=("exact", "qat"), help="default: what the checkpoint asks for")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, bfloat16 elsewhere"
    )
    options = parser.parse_args(arguments)
    prompts = read_prompts(options.prompts, options.count)
    # A prompt has no more tokens than bytes, and the frame of a chat is short.
    longest = max(len(prompt["text"].encode()) for prompt in prompts) + 32
    model = load(
        options.ckpt,
        context=rounded_context([longest + options.tokens]),
        mode=options.mode,
        dtype=options.dtype,
        progress=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    document = record(model, prompts, options.draft_lengths, options.tokens)
    write_atomically(options.out, [json.dumps(document).encode() + b"\n"])
    changed = [index for index, entry in enumerate(document["entries"]) if entry["differs_for_k"]]
    print(f"{len(prompts)} prompts of {options.tokens} tokens, {model.mode}; changed by drafting: {changed}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
