"""The example notebook runs, also with each cell run twice, and its reports are shown as pictures and tables."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.command import ROOT, environment
from tests.support.patience import HANG

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def outputs(cell: Any) -> str:
    """All that a cell shows, as text and as HTML."""
    found = [one.get("text", "") + "".join(map(str, one.get("data", {}).values())) for one in cell["outputs"]]
    return "".join(found)


@pytest.mark.slow
def test_the_notebook_runs_with_each_later_cell_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # it is kept without outputs
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    again = [copy.deepcopy(cell) for cell in cells[2:] for _ in range(2)]  # a launch and engines do not mix
    for number, cell in enumerate(again):
        cell["id"] = f"again-{number}"
    notebook.cells = [*cells[:2], *again]
    nbclient.NotebookClient(notebook, timeout=HANG, kernel_name="python3").execute()
    assert "step 40  loss" in outputs(notebook.cells[1])
    assert "<svg" in outputs(notebook.cells[4])
    assert "<svg" in outputs(notebook.cells[5])
    assert "<td" in outputs(notebook.cells[6])
    assert "Block" in outputs(notebook.cells[6])
    assert "memory on this rank" in outputs(notebook.cells[8])
    assert "largest parts of a step:" in outputs(notebook.cells[10])
