"""Prompts that a person keeps in files, and a model opened for them: what `advise` and `certify` share.

Knows: options, forms of prompt files, and where a result is written. Does not know: what is measured or compared.
"""

import argparse
from pathlib import Path
from typing import Any

from v4flash.cli import options as shared
from v4flash.cli.options import whole
from v4flash.cli.terminal import Messages
from v4flash.errors import UsageError

PROMPTS_NAME = "prompts.json"


def add_prompts(parser: argparse.ArgumentParser, count: int, tokens: int) -> None:
    """--prompts, --count and --tokens, with their defaults."""
    parser.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help="JSON list of objects with text, class and chat; any other file is one prompt of plain text, its name the "
        f"class; repeatable (default: {PROMPTS_NAME} beside the weights)",
    )
    parser.add_argument(
        "--count",
        type=whole(1),
        default=count,
        metavar="N",
        help=f"prompts taken at even distances of the list (default {count})",
    )
    parser.add_argument(
        "--tokens",
        type=whole(8),
        default=tokens,
        metavar="N",
        help=f"new tokens of each prompt at most (default {tokens})",
    )


def add_result(parser: argparse.ArgumentParser, what: str, name: str) -> None:
    """--out, --save and --overwrite."""
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--out", metavar="FILE", help=f"write {what} to a file")
    places.add_argument(
        "--save", action="store_true", help=f"write {what} beside the weights ({name}), where decode looks"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def result_file(options: argparse.Namespace, checkpoint: Path, name: str) -> Path | None:
    """Where the result goes, if anywhere. Raises UsageError where it may not go there."""
    from v4flash.fidelity.id_lists import check_output

    if not options.out and not options.save:
        return None
    path = Path(options.out) if options.out else checkpoint / name
    check_output(path, overwrite=options.overwrite)
    return path


def drafting_checkpoint(options: argparse.Namespace) -> Path:
    """The checkpoint's folder. Raises UsageError where it has no drafter."""
    from v4flash.config import ModelConfig

    path = shared.checkpoint_folder(options.ckpt)
    if ModelConfig.from_file(path).draft is None:
        raise UsageError(
            f"{path} has no drafter, so there are no draft lengths to compare; decode it with --k 0"
        )
    return path


def prompts(options: argparse.Namespace, checkpoint: Path) -> list[dict[str, Any]]:
    """The prompts asked for, as objects with text, class and chat. Raises UsageError where there are none."""
    from v4flash.fidelity.record_transcripts import read_prompts

    files = [Path(file) for file in options.prompts or ()]
    if not files:
        files = [checkpoint / PROMPTS_NAME]
        if not files[0].is_file():
            raise UsageError(f"no prompts given, and no {PROMPTS_NAME} in {checkpoint}; pass --prompts FILE")
    found = []
    for file in files:
        found += read_prompts(file) if file.suffix == ".json" else [_plain(file)]
    found = [prompt for prompt in found if prompt["text"]]
    if not found:
        raise UsageError(f"{', '.join(map(str, files))}: no prompts in there; give at least one")
    count = min(options.count, len(found))
    return [found[place * len(found) // count] for place in range(count)]


def _plain(file: Path) -> dict[str, Any]:
    try:
        return {"text": file.read_text(encoding="utf-8"), "class": file.stem, "chat": False}
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); give a file of prompts") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not valid UTF-8 (byte {error.start}); save it as UTF-8") from None


def load(options: argparse.Namespace, path: Path, texts: list[dict[str, Any]], rows: int, messages: Messages):
    """The model with a context that holds every prompt and its new tokens."""
    import jax

    from v4flash.engine import language_model
    from v4flash.fidelity.id_lists import rounded_context

    # A prompt has no more tokens than bytes, and the frame of a chat is short.
    longest = max(len(prompt["text"].encode()) for prompt in texts) + 32
    return language_model.load(
        path,
        context=rounded_context([longest + options.tokens]),
        rows=rows,
        mode=options.mode,
        dtype=options.dtype,
        backend=options.backend,
        **shared.expert_options(options),
        compile_cache=not options.no_compile_cache,
        progress=messages.progress,
        # On a CPU nobody expects fused launches, so that their absence is no news there.
        note=messages.progress if jax.default_backend() == "cpu" else messages.say,
    )
