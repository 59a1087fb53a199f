"""The notebooks of ``examples`` run from start to end, on a tiny model and few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

pytestmark = pytest.mark.slow


@pytest.fixture
def values(tiny_model_dir: Path) -> str:
    """Source of a cell in place of that with the parameters."""
    config = {
        "inference_model.backend": "transformers",
        "inference_model.dtype": "float32",
        "train_model.autocast": "no",
        "eval.num_problems": 4,
        "logging.progress": False,
    }
    return f"MODEL, ROUNDS, CONFIG = {str(tiny_model_dir)!r}, 1, {config!r}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, values: str, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = values
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    text = "\n".join(printed)
    expected = {"quickstart": "held-out accuracy: 0.000 before", "own_task": "[1."}
    assert expected[path.stem] in text or (path.stem == "own_task" and "[2." in text), text
    runs = list((tmp_path / "outputs").glob("*/*/summary.json"))
    assert len(runs) == {"quickstart": 1, "own_task": 2}[path.stem]


def test_notebooks_have_no_outputs_and_no_numbers_of_runs() -> None:
    import nbformat

    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells)
