"""A sweep ends with the comparison of its trials, whatever launcher has run them."""

from __future__ import annotations

import json
import subprocess
import sys
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
    assert all(entry["interval"] for entry in entries["settings"])


def test_trials_that_ended_are_compared_if_another_failed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BEHAVE["do"] = train
    assert call("--multirun", "policy.kl_coef=0.1,1", "seed=0,1") == 2
    assert "Best: (one setting), the baseline" in capsys.readouterr().out


def test_a_sweep_of_runs_that_wrote_nothing_ends_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--multirun", "seed=0,1") == 0
    assert "Best" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
    ],
)
def test_other_launchers_of_hydra(words: list[str], tmp_path: Path) -> None:
    """They run each job in a thread or a process of their own."""
    (tmp_path / "calls.py").write_text(
        "import json, sys\n"
        "from torchrl_grpo.cli import main\n\n"
        "def run(cfg, run_dir):\n"
        "    line = {'step': 1, 'eval/accuracy': cfg.optimizer.lr}\n"
        "    (run_dir / 'metrics.jsonl').write_text(json.dumps(line) + '\\n')\n"
        "    (run_dir / 'summary.json').write_text('{\"steps\": 1}')\n"
        "    return {}\n\n"
        "if __name__ == '__main__':\n"
        "    main.check_installed = lambda cfg: None\n"
        "    main.main(main.Command('calls:run'), sys.argv[1:])\n"
    )
    sweep = ["--multirun", "optimizer.lr=1e-1,1e-2", "hydra.sweep.dir=sweep", *words]
    done = subprocess.run(
        [sys.executable, "calls.py", *sweep], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Best: optimizer.lr=0.1" in done.stdout
