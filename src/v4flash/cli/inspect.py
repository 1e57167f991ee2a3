"""`v4flash inspect`: what a checkpoint or a configuration holds, read from headers alone.

Knows: printing. Does not know: file formats (checkpoint).
"""

import argparse
import json

from v4flash.errors import CheckpointError

NAME = "inspect"
HELP = "say what a checkpoint folder, a .safetensors file or a config.json holds, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint folder, .safetensors file, or configuration")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints the facts; exit code 3 where loading would refuse the checkpoint."""
    from v4flash.checkpoint.inspection import inspect

    found = inspect(options.path)
    if options.json:
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=1))
    else:
        print(found.as_text())
    faults = len(found.missing) + len(found.unexpected) + len(found.mismatched)
    return CheckpointError.exit_code if faults else 0
