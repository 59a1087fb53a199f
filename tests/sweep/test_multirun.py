"""A sweep ends with the comparison of its trials, whatever launcher has run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import BEHAVE, call, set_up
from run_files import write_lines

from torchrl_grpo.config import Config
from torchrl_grpo.errors import DataError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, monkeypatch)


def train(cfg: Config, run_dir: Path) -> None:
    """Write what a run would: the larger learning rate solves more problems."""
    if cfg.policy.kl_coef > 0.5:
        raise DataError("bad rows")
    right = 60 if cfg.optimizer.lr > 5e-5 else 30
    grades = [float((problem * 37 + cfg.seed * 3) % 100 < right) for problem in range(100)]
    write_lines(run_dir / "metrics.jsonl", [{"step": 4, "eval/accuracy": sum(grades) / 100}])
    rows = [{"step": 4, "id": str(id), "grade": grade} for id, grade in enumerate(grades)]
    write_lines(run_dir / "evaluations.jsonl", rows)
    (run_dir / "summary.json").write_text('{"steps": 4}')


def test_a_sweep_ends_with_a_table_and_a_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BEHAVE["do"] = train
    assert call("--multirun", "optimizer.lr=1e-5,1e-4", "seed=0,1", "hydra.sweep.dir=sweep") == 0
    assert "Best: optimizer.lr=0.0001. It is better than the baseline" in capsys.readouterr().out
    entries = json.loads((workplace / "sweep/sweep.json").read_text())
    assert [entry["seeds"] for entry in entries["settings"]] == [[0, 1], [0, 1]]


def test_trials_that_ended_are_compared_if_another_failed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BEHAVE["do"] = train
    assert call("--multirun", "policy.kl_coef=0.1,1", "seed=0,1") == 2
    assert "Best: (one setting), the baseline" in capsys.readouterr().out


def test_a_sweep_of_runs_that_wrote_nothing_ends_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--multirun", "seed=0,1") == 0
    assert "Best" not in capsys.readouterr().out
