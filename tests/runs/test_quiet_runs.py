"""What the start and the end of a run tell, and what of it outlives a resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.observe import stats
from torchrl_grpo.rewards.text import BareNumberReward

pytestmark = pytest.mark.slow

WARNING = "warning: in every group all responses had the same reward"


def test_each_phase_before_the_first_step_is_told(
    train: Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("run", logging__progress=True, train__total_dialog_turns=16)
    lines = capsys.readouterr().err.splitlines()
    phases = ["loading the model", "starting the engine", "verifying that weights reach the engine"]
    last = "measuring accuracy before training"
    assert [line for line in lines if line in (*phases, last)] == [*phases, last]
    assert lines.index(last) < lines.index(next(line for line in lines if line.startswith("step 0/1")))


def test_a_run_without_any_signal_says_so_and_one_with_it_does_not(
    train: Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"train__total_dialog_turns": 32, "train__checkpoint_frequency": 1, "checkpoint__keep": 9}
    train("signal", **settings)
    assert WARNING not in capsys.readouterr().out
    monkeypatch.setattr(BareNumberReward, "__call__", lambda self, text, example: 0.5)
    train("signal", resume=str(tmp_path / "signal/checkpoints/1"))
    assert WARNING not in capsys.readouterr().out, "there was a signal before the resumption"
    train("none", resume=None, **settings)
    assert WARNING in capsys.readouterr().out
    train("none", resume=str(tmp_path / "none/checkpoints/1"))
    assert WARNING in capsys.readouterr().out


def test_peak_memory_is_that_of_the_whole_run(
    train: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"train__total_dialog_turns": 32, "train__checkpoint_frequency": 1, "checkpoint__keep": 9}
    monkeypatch.setattr(stats, "peak_memory_gib", lambda: 5.0)
    monkeypatch.setattr(stats, "peak_cuda_gib", lambda: 7.0)
    train("run", **settings)
    monkeypatch.setattr(stats, "peak_memory_gib", lambda: 2.0)
    monkeypatch.setattr(stats, "peak_cuda_gib", lambda: 3.0)
    train("run", resume=str(tmp_path / "run/checkpoints/1"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["peak_memory_gib"] == 5.0 and summary["peak_cuda_memory_gib"] == 7.0
