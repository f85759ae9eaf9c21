"""The notebooks of scripts/examples: their cells run, in plain Python and, if nbclient is installed, as a notebook."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from ranks import python_of_forks

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "scripts/examples").glob("*.ipynb"))


def named(path: Path) -> str:
    return path.stem


def cells(path: Path) -> list[str]:
    """Source of the code cells."""
    read = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in read if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_cells_run(path: Path, tmp_path: Path) -> None:
    """One after the other in one process, as -c: a new rank then finds no main program to run, as below a notebook."""
    program = []
    for cell in cells(path):
        if cell.startswith("%%writefile "):
            magic, _, text = cell.partition("\n")
            (tmp_path / magic.split()[1]).write_text(text)
        else:
            program.append(cell)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python_of_forks(), "-c", "\n".join(program)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "at the end" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    nbformat = pytest.importorskip("nbformat")
    (tmp_path / "site").mkdir()  # the package without the checkout's folder comm, which would hide Jupyter's package
    (tmp_path / "site" / "onebit").symlink_to(ROOT / "onebit")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("at the end" in text for text in said)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    read = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in read)


def test_there_is_one_for_one_rank_and_one_for_several() -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    assert len(NOTEBOOKS) == 2 and all(path.name in page for path in NOTEBOOKS)
