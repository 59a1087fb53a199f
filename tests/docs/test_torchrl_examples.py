"""The examples that mix parts of TorchRL with parts of this project train a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_script
from safetensors.torch import load_file

RATE = 1e-3
REWARD = """
def length(completion, example):
    return len(completion)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrl_trainer", "torchrl_loss"])
def test_an_example_trains(name: str, tiny_model_dir: Path, repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        "env.num_envs=2",
        "env.repeats=4",
        "train.total_dialog_turns=16",
        f"optimizer.lr={RATE}",
        "reward.weights={}",
        "reward.functions={length: reward.py:length}",
        "inference_model.backend=transformers",
        "eval.num_problems=4",
    ]
    argv = [str(repo_root / f"examples/{name}.py"), str(tiny_model_dir), "trained", *words]
    result: subprocess.CompletedProcess[str]
    if name == "torchrl_trainer":
        # What it imports first matters.
        command = [sys.executable, *argv]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    else:
        result = run_script(argv, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model_dir, tmp_path / "trained"))
    # Adam moves weights by about its rate in each of two steps, and decay of weights alone by less.
    moved = [float((after[key] - tensor).abs().max()) for key, tensor in before.items()]
    assert all(RATE / 2 < value < 4 * RATE for value in moved), moved


def test_examples_are_short(repo_root: Path) -> None:
    for path in sorted((repo_root / "examples").glob("torchrl_*.py")):
        assert sum(bool(line.split("#")[0].strip()) for line in path.read_text().splitlines()) <= 60, path
