"""A run that is asked to stop: it saves itself, and the resumed run is the run that was never stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cli_calls import SEEN, call, mistake, set_up, write_run
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.checkpoints import run_dir as run_folder
from torchrl_grpo.config import Config
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.runtime.interrupts import STOP_SIGNAL, StopRequested, stop_requested, stop_signal_blocked
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run


def test_the_signal_stays_pending_and_reaches_nobody() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with stop_signal_blocked():
        assert not stop_requested()
        # A child that is signaled as well, as a scheduler signals all processes of a job, lives on.
        script = f"import os, signal; os.kill(os.getpid(), {int(STOP_SIGNAL)}); print('alive')"
        child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert (child.returncode, child.stdout) == (0, "alive\n")
        signal.raise_signal(STOP_SIGNAL)
        assert stop_requested() and stop_requested()
    assert not stop_requested()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
@pytest.mark.float32
def test_a_stopped_run_is_resumed_as_if_nothing_had_happened(
    config: Config,
    train: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Two steps for each round, so that a run can stop in the middle of one.
    config.train.optim_batch_size = 8
    expected = train("whole")
    honest = BareNumberReward.__call__
    for answer in (17, 40):
        graded = count()

        def stop_at(
            self: BareNumberReward, text: str, example: Any, graded: count[int] = graded, answer: int = answer
        ) -> float:
            if next(graded) == answer:
                signal.raise_signal(STOP_SIGNAL)
            return honest(self, text, example)

        stopped = tmp_path / f"{answer}"
        with stop_signal_blocked():
            with monkeypatch.context() as patch, pytest.raises(StopRequested):
                patch.setattr(BareNumberReward, "__call__", stop_at)
                train(stopped.name, resume=None)
            assert "SIGUSR1: stopped; resume=" in capsys.readouterr().err
            # The step that was under way is finished, and no other begins.
            (saved,) = run_folder.complete_checkpoints(stopped)
            assert int(saved.name) == answer // 16 * 2 + 1
        assert train(stopped.name, resume="auto_or_new") == expected
        for name in ("rollouts.jsonl", "evaluations.jsonl"):
            assert read(stopped / name) == read(tmp_path / "whole" / name)


@pytest.mark.float32
def test_a_run_that_has_trained_nothing_stops_without_a_checkpoint(
    config: Config,
    tmp_path: Path,
) -> None:
    with stop_signal_blocked():
        signal.raise_signal(STOP_SIGNAL)
        with pytest.raises(StopRequested):
            run(config, tmp_path / "run")
    assert run_folder.complete_checkpoints(tmp_path / "run") == []


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, monkeypatch)


def test_auto_or_new_starts_a_run_and_then_continues_it(workplace: Path) -> None:
    words = ("resume=auto_or_new", "hydra.run.dir=run")
    assert call(*words) == 0
    # It was killed before its first checkpoint.
    (workplace / "run/metrics.jsonl").write_text('{"step": 0}\n')
    assert call(*words) == 0
    assert (workplace / "run.set-aside/metrics.jsonl").is_file()
    assert not (workplace / "run/metrics.jsonl").exists()
    write_run(workplace / "run", 4)
    assert call(*words) == 0
    assert [(cfg.resume, folder.name) for cfg, folder in SEEN] == [
        (None, "run"),
        (None, "run"),
        ("auto_or_new", "run"),
    ]
    assert (workplace / "run/.hydra/resume-1/overrides.yaml").is_file()
    # Whoever continues it by hand adds resume= to these words.
    for resumed in (False, True):
        command = run_folder.launch_command(workplace / "run", resumed=resumed)
        assert command == "grpo.py --config-name=grpo_gsm8k"


@pytest.mark.parametrize("more", [(), ("resume=run",), ("resume=auto_or_new",)])
def test_a_start_that_is_refused_leaves_the_record_of_the_run_that_goes_on(
    workplace: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    assert call("hydra.run.dir=run", "optimizer.lr=1e-5") == 0
    if more == ("resume=run",):
        write_run(workplace / "run", 4)
    record = workplace / "run/.hydra"
    before = {path: path.read_bytes() for path in record.rglob("*.yaml")}
    with run_folder.claimed(workplace / "run"):
        assert call("hydra.run.dir=run", "optimizer.lr=5e-3", *more) == 2
    assert "another process is writing to this run" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in record.rglob("*.yaml")}


def test_a_run_of_another_process_is_not_set_aside(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(workplace / "run")
    with run_folder.claimed(workplace / "run"):
        assert call("resume=auto_or_new", "hydra.run.dir=run") == 2
    assert "another process is writing to this run" in capsys.readouterr().err
    assert (workplace / "run/metrics.jsonl").is_file()


def test_auto_or_new_needs_the_folder(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "resume=auto_or_new: " in mistake(capsys, "resume=auto_or_new")


def test_a_command_that_was_stopped_says_so_with_its_exit_code(workplace: Path) -> None:
    from cli_calls import BEHAVE

    def stopped(cfg: Config, folder: Path) -> None:
        raise StopRequested

    BEHAVE["do"] = stopped
    assert call() == 75
