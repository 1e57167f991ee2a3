"""Executes the notebooks of this folder and writes each as an .ipynb with its outputs.

    python notebooks/execute.py [NAME ...]

Knows: the pairing of NN_name.py (percent format, the source) with NN_name.ipynb (what a reader opens). Does not know:
what the notebooks show. Identifiers are numbered and times left out, so that only changed outputs change a file.
"""

import argparse
import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def executed(source: Path, timeout: int = 600) -> nbformat.NotebookNode:
    """The notebook of a percent-format file, run in this folder. Raises CellExecutionError where a cell fails."""
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook, timeout=timeout, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute()
    # The interpreter's patch version is the executing machine's, not the notebook's.
    notebook.metadata.pop("language_info", None)
    return notebook


def sources(names: list[str]) -> list[Path]:
    """The notebooks' percent-format files, all of them or those named (with or without an ending)."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    if names:
        found = [path for path in found if path.stem in {Path(name).stem for name in names}]
    return found


def main() -> int:
    """Executes and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks to execute (default: all)")
    chosen = sources(parser.parse_args().names)
    if not chosen:
        parser.error("no notebook of that name")
    # The environment that runs this file is the one whose kernel must be used.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for source in chosen:
        target = source.with_suffix(".ipynb")
        target.write_text(nbformat.writes(executed(source)) + "\n", encoding="utf-8")
        print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
