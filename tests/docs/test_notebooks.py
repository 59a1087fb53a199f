"""The notebooks of ``examples`` run from start to end, on a tiny model and few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest


@pytest.mark.slow
def test_notebooks_run(repo_root: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    config = {
        "inference_model.backend": "transformers",
        "inference_model.dtype": "float32",
        "train_model.autocast": "no",
        "eval.num_problems": 4,
        "logging.progress": False,
    }
    paths = sorted((repo_root / "examples").glob("*.ipynb"))
    notebooks: dict[str, Any] = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    for notebook in notebooks.values():
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in code)
        (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
        parameters.source = f"MODEL, ROUNDS, CONFIG = {str(tiny_model_dir)!r}, 1, {config!r}"
        # One kernel, which imports once, runs all of them. It knows no name of the one before.
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        for cell in notebook.cells:
            cell.id = uuid4().hex
    whole = nbformat.v4.new_notebook(cells=[cell for each in notebooks.values() for cell in each.cells])
    NotebookClient(whole, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = {
        name: "\n".join(
            output.get("text") or output.get("data", {}).get("text/plain", "")
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
        )
        for name, notebook in notebooks.items()
    }
    assert texts.keys() == {"quickstart", "own_task"}
    assert "held-out accuracy: 0.000 before" in texts["quickstart"], texts
    assert "[1." in texts["own_task"] or "[2." in texts["own_task"], texts
    # Of each trainer in them.
    assert len(list((tmp_path / "outputs").glob("*/*/summary.json"))) == 3
