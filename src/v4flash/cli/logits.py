"""`v4flash logits`: the target's logits for given token ids, as a file that other implementations can check.

Knows: options and the names in the output file. Does not know: how logits are computed (fidelity).
"""

import argparse

from v4flash.cli import options as shared
from v4flash.cli.options import whole
from v4flash.cli.terminal import Messages

NAME = "logits"
HELP = "write the target's logits for token ids to a safetensors file"


def add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `logits` and `draft` share."""
    shared.add_checkpoint(parser)
    parser.add_argument(
        "--ids", required=True, metavar="FILE.json", help="one list of token ids, or a list of such lists"
    )
    parser.add_argument("--out", required=True, metavar="FILE.safetensors", help="where the arrays go")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    parser.add_argument(
        "--chunk", type=whole(1), default=128, metavar="N", help="ids in one pass (default 128)"
    )
    shared.add_numbers(parser, "float32")
    shared.add_device(parser)
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error but warnings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parity_arguments(parser)
    parser.add_argument(
        "--streams", action="store_true", help="also the residual streams after every layer [L, N, S, D]"
    )


def run(options: argparse.Namespace) -> int:
    """Writes `logits` [N, V] (and `streams`) of each list, float32."""
    from v4flash.fidelity import id_lists

    lists = id_lists.read_id_lists(options.ids)
    lists.check_lengths(1, "there is nothing to compute for an empty list")
    id_lists.check_output(options.out, overwrite=options.overwrite)
    messages = Messages(options.quiet)
    loaded, cache = load(options, lists, messages, drafter=False)
    from v4flash.fidelity.logits import TargetPass

    messages.progress("compiling")
    target = TargetPass(
        loaded,
        context=id_lists.rounded_context(map(len, lists.lists)),
        chunk=options.chunk,
        streams=options.streams,
        cache=cache,
    )
    arrays = {}
    for index, ids in enumerate(lists.lists):
        messages.progress(f"list {index + 1} of {len(lists.lists)}")
        found = target(ids)
        arrays[lists.name("logits", index)] = found.logits
        if found.streams is not None:
            arrays[lists.name("streams", index)] = found.streams
    write(options, loaded, arrays, messages)
    return 0


def load(options: argparse.Namespace, lists, messages: Messages, *, drafter: bool):
    """The checkpoint for a parity command, its ids checked, and the folder of compiled programs (or None)."""
    from v4flash.cli import device as devices
    from v4flash.errors import CapacityError

    path = shared.checkpoint_folder(options.ckpt)
    device = devices.choose(options.device)
    from v4flash.checkpoint import loading
    from v4flash.config import ModelConfig
    from v4flash.engine import programs
    from v4flash.engine.language_model import choose_numerics

    config = ModelConfig.from_file(path)
    lists.check_vocabulary(config.vocab_size)
    longest = max(map(len, lists.lists))
    if longest > config.max_position_embeddings:
        raise CapacityError(
            f"{lists.where} has a list of {longest:,} ids, this checkpoint takes {config.max_position_embeddings:,}"
        )
    numerics = choose_numerics(path, config, options.mode, options.dtype)
    mode = "qat" if numerics.quantise else "exact"
    messages.say(f"{path}: {config.family}, {numerics.dtype.__name__}, {mode} | {device}")
    messages.progress("loading")
    loaded = loading.load(path, numerics, drafter=drafter)
    return loaded, None if options.no_compile_cache else programs.cache_folder()


def write(options: argparse.Namespace, loaded, arrays: dict, messages: Messages) -> None:
    """Writes the arrays with what they were computed with, and says so."""
    from v4flash.fidelity.id_lists import write_arrays

    facts = {
        "command": options.command,
        "mode": "qat" if loaded.numerics.quantise else "exact",
        "dtype": loaded.numerics.dtype.__name__,
        "family": loaded.config.family,
        "chunk": str(options.chunk),
    }
    size = write_arrays(options.out, arrays, facts)
    messages.say(f"wrote {len(arrays)} arrays, {size:,} bytes, to {options.out}")
