"""Options that several commands share, and how their values are found.

Knows: command line over environment over default, and the checks that need no checkpoint. Does not know: any
command. Every option that the environment can set says so in its help.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from v4flash.errors import CheckpointError, UsageError

DTYPES = ("float32", "bfloat16")
MODES = ("exact", "qat")
BACKENDS = ("auto", "xla", "fused")
EXPERTS = ("resident", "peer", "host", "sidecar")
DEVICES = ("cpu", "gpu")
RULES = ("block", "token")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence with exit code 2, like every other usage error."""

    def __init__(self, **settings: Any):
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> None:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def add(
    parser: argparse.ArgumentParser,
    flag: str,
    *,
    help: str,
    default: Any = None,
    env: bool = True,
    **settings: Any,
) -> None:
    """Adds an option whose default may come from V4FLASH_<NAME>."""
    name = "V4FLASH_" + flag.lstrip("-").replace("-", "_").upper()
    shown = "" if default is None else f" (default {default})"
    if env:
        # argparse runs a default that is text through `type`, so the environment gets the same checks.
        default = os.environ.get(name) or default
        shown += f" [{name}]"
    parser.add_argument(flag, default=default, help=(help + shown).replace("%", "%%"), **settings)


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, which `profile.budget.configuration` turns into a file."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="CONFIG",
        help="config.json, checkpoint folder, or the name of a file in configs/models (v4-flash-0731)",
    )


def one_of(*values: str) -> dict[str, Any]:
    """Settings of an option that takes one of a few words, on the command line and in the environment."""

    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(values)}")
        return text

    return {"type": check, "metavar": "|".join(values)}


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A type for whole numbers in a range."""
    legal = f"a whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")

    def check(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum or (maximum is not None and number > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return number

    return check


def number(text: str) -> float:
    """A type for numbers; what range they must lie in is known where they are used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def add_checkpoint(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """--ckpt; without a default it must be given."""
    add(parser, "--ckpt", help="checkpoint folder", default=default, metavar="DIR")


def add_numbers(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    """--mode and --dtype."""
    add(
        parser,
        "--mode",
        help="exact: no rounding of activations; qat: simulated quantisation (default: what the checkpoint asks)",
        **one_of(*MODES),
    )
    chosen = "" if dtype else " (default: float32 on a CPU, bfloat16 elsewhere)"
    add(parser, "--dtype", help=f"type of activations and caches{chosen}", default=dtype, **one_of(*DTYPES))


def add_backend(parser: argparse.ArgumentParser) -> None:
    """--backend."""
    add(
        parser,
        "--backend",
        help="xla: plain JAX; fused: hand-fused launches on packed weights; auto: fused where it can run",
        default="auto",
        **one_of(*BACKENDS),
    )


def add_experts(parser: argparse.ArgumentParser) -> None:
    """--experts, --hot-experts and --expert-stats, which `expert_options` reads."""
    add(
        parser,
        "--experts",
        help="where routed experts live. resident: all on the first device; peer: some on a second GPU; host: some in "
        "the host's memory; sidecar: some on any second device",
        default=EXPERTS[0],
        **one_of(*EXPERTS),
    )
    add(
        parser,
        "--hot-experts",
        help="experts of each layer that stay on the first device, where not all do",
        type=whole(0),
        metavar="N",
    )
    add(
        parser,
        "--expert-stats",
        help="file of `v4flash experts profile --out` that says which they are (default: the first ones)",
        metavar="FILE",
    )


def expert_options(options: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_experts` as `v4flash.load` takes them."""
    return {
        "experts": options.experts,
        "hot_experts": options.hot_experts,
        "expert_stats": options.expert_stats,
    }


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device and --no-compile-cache."""
    add(parser, "--device", help="where to run (default: what JAX finds)", **one_of(*DEVICES))
    parser.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="compile anew, and keep nothing (folder: [V4FLASH_CACHE])",
    )


def checkpoint_folder(given: str | None) -> Path:
    """The folder that --ckpt names, known to look like a checkpoint.

    Raises UsageError when none was given and CheckpointError when there is nothing to load at the place.
    """
    if given is None:
        raise UsageError("no checkpoint given; pass --ckpt DIR or set V4FLASH_CKPT")
    from v4flash.checkpoint import orbax_store
    from v4flash.checkpoint.shards import CheckpointFiles

    path = Path(given).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights")
    if not orbax_store.is_store(path):
        CheckpointFiles.open(path)
    return path
