"""The notebook of the examples runs from its first cell to its last, in a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.house.documents import ROOT

NOTEBOOK = ROOT / "examples" / "train_in_a_notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reward rises, in a kernel with a running event loop, and the trained model answers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    before, after = (float(value) for value in re.findall(r"reward ([\d.]+) → ([\d.]+)", "".join(printed))[0])
    assert before < 0.5 and after > 2.0, printed
    assert re.search(r"3\d\d", printed[-1]), printed[-1]


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
