"""Every notebook runs from top to bottom, and the copy with outputs belongs to its source."""

import importlib.util
from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
# The first cell compiles: under a minute on an idle CPU, several times that on a busy one.
SECONDS_PER_CELL = 300
LARGEST_COPY = 200_000

spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)
SOURCES = execute.sources([])


def test_there_are_notebooks():
    assert [path.stem for path in SOURCES][0] == "01_first_tokens"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_runs_on_a_cpu(source, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = execute.executed(source, timeout=SECONDS_PER_CELL)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_copy_with_outputs_has_the_same_cells(source):
    copy_file = source.with_suffix(".ipynb")
    copy = nbformat.read(copy_file, as_version=4)
    nbformat.validate(copy)
    assert [(cell.cell_type, cell.source) for cell in copy.cells] == [
        (cell.cell_type, cell.source) for cell in jupytext.read(source).cells
    ]
    assert copy_file.stat().st_size <= LARGEST_COPY


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_uses_public_names_only(source):
    lines = source.read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from ")) and "v4flash" in line]
    assert "import v4flash" in imports
    assert all(
        line == "import v4flash" or line.startswith("from v4flash.profile import ") for line in imports
    )
