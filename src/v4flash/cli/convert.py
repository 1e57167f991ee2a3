"""`v4flash convert`: a published checkpoint into a folder that loads without re-assembly.

Knows: printing. Does not know: file formats (checkpoint).
"""

import argparse
import sys
import time

from v4flash.cli.terminal import amount

NAME = "convert"
HELP = "store a published checkpoint as a converted folder that loads faster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument("destination", metavar="DST", help="new folder")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")


def run(options: argparse.Namespace) -> int:
    """Converts; DST appears only when it is complete."""
    from v4flash.checkpoint.orbax_store import convert

    started = time.perf_counter()
    stored = convert(options.source, options.destination, overwrite=options.overwrite)
    seconds = time.perf_counter() - started
    print(f"stored {amount(stored)} in {options.destination} ({seconds:.1f} s)", file=sys.stderr)
    return 0
