"""The held-out value chooses the checkpoint that is kept, and ends a run; a resumed run does the same."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.errors import ConfigError, TrainingStopped, WorkersLost
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.evaluator import Evaluation, Evaluator
from torchrl_grpo.training.session import Session
from torchrl_grpo.training.state import Counters

# Held-out values of steps 0, 2, 4 and so on.
VALUES = (0.1, 0.3, 0.5, 0.4, 0.5, 0.45, 0.9, 0.2)
STEPS = 12


@pytest.fixture(autouse=True)
def held_out_values(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluations measure ``VALUES``, whatever the model answers."""
    config.inference_model.max_new_tokens = config.eval.num_problems = 2
    evaluate, measure = Session.evaluate, Evaluator.__call__
    step = 0

    def evaluating(self: Session) -> dict[str, float]:
        nonlocal step
        step = self.counters.step
        return evaluate(self)

    def measuring(self: Evaluator, *arguments: Any) -> Evaluation:
        value = VALUES[step // 2]
        near = {"eval/accuracy": value, "eval/accuracy_low": value - 0.5, "eval/accuracy_high": value + 0.5}
        evaluation = measure(self, *arguments)
        evaluation.metrics.update(near)
        return evaluation

    monkeypatch.setattr(Session, "evaluate", evaluating)
    monkeypatch.setattr(Evaluator, "__call__", measuring)


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal())


def summary_of(run_dir: Path, names: Sequence[str] = ("steps", "best_step", "ended_by")) -> list[Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return [summary[name] for name in names]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_beside_the_newest(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__total_dialog_turns": 160, "train__checkpoint_frequency": 3, "checkpoint__keep": 1}
    plain = train("plain", **settings)
    assert kept(tmp_path / "plain") == [10] and summary_of(tmp_path / "plain") == [10, 4, None]
    assert "best held-out" not in capsys.readouterr().out
    # Writing more checkpoints changes no number.
    assert train("best", train__keep_best=True) == plain
    assert kept(tmp_path / "best") == [4, 10]
    assert "best held-out      0.500   at step 4, kept in checkpoints/4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_that_is_resumed_keeps_and_ends_like_the_uninterrupted_one(
    train: Runner, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object] = {
        "train__total_dialog_turns": STEPS * 16,
        "train__checkpoint_frequency": 3,
        "checkpoint__keep": 1,
        "train__keep_best": True,
        "train__patience": 3,
    }
    whole = train("whole", **settings)
    # The value of step 8 equals that of step 4, and is not better.
    assert whole[-1]["step"] == 10 and kept(tmp_path / "whole") == [4, 10]
    assert summary_of(tmp_path / "whole") == [10, 4, "train.patience=3"]
    log, folder = Session.log, tmp_path / "killed"
    # What a kill has done wrong remains in the lines before the next one, and in what is kept.
    for last, checkpoints in ((3, [2]), (5, [4]), (8, [4, 6]), (10, [4, 9])):

        def dying(self: Session, metrics: dict[str, float], last: int = last) -> None:
            log(self, metrics)
            if self.counters.step == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, "log", dying)
            train("killed", resume="auto" if last > 3 else None)
        assert read(folder / "metrics.jsonl") == whole[: last + 1]
        assert kept(folder) == checkpoints
    assert train("killed", resume="auto") == whole
    assert kept(folder) == [4, 10] and summary_of(folder) == summary_of(tmp_path / "whole")


def patient(train: Runner) -> list[dict[str, Any]]:
    """Run until patience ends, at step 10; the best value is that of step 4."""
    return train(
        "whole",
        train__total_dialog_turns=STEPS * 16,
        train__checkpoint_frequency=9,
        checkpoint__keep=1,
        train__keep_best=True,
        train__patience=3,
    )


@pytest.mark.slow
def test_an_evaluation_counts_once_after_lost_workers_or_a_deleted_folder(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, folder = patient(train), tmp_path / "run"
    evaluate, log = Session.evaluate, Session.log
    for last in (4, 6):

        def losing(self: Session, last: int = last) -> dict[str, float]:
            if self.counters.step == last:
                raise WorkersLost("device lost")
            return evaluate(self)

        def dying(self: Session, metrics: dict[str, float], last: int = last) -> None:
            log(self, metrics)
            if self.counters.step == last + 1:
                raise KeyboardInterrupt

        lost = tmp_path / f"lost {last}"
        with monkeypatch.context() as patch, pytest.raises(WorkersLost):
            patch.setattr(Session, "evaluate", losing)
            train(lost.name, resume=None)
        # However often the run is resumed.
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, "log", dying)
            train(lost.name, resume="auto")
        assert train(lost.name, resume="auto") == whole
        assert kept(lost) == [4, 10] and summary_of(lost) == summary_of(tmp_path / "whole")

    def deleting(self: Session) -> dict[str, float]:
        if self.counters.step == 6:
            # Not while a checkpoint is written or an older one is removed.
            self.checkpoints.writer.finish()
            shutil.rmtree(folder)
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "evaluate", deleting)
        with pytest.raises(TrainingStopped, match="what was trained is now in"):
            train("run", resume=None)
    capsys.readouterr()
    assert train("run", resume="auto") == [line for line in whole if line["step"] >= 6]
    assert summary_of(folder) == summary_of(tmp_path / "whole")
    # The checkpoint of the best value was deleted too.
    assert "best held-out      0.500   at step 4, whose checkpoint is not there" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_good_enough_before_training_ends_with_its_model(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert [line["step"] for line in train("run", train__stop_at=0.1)] == [0]
    assert summary_of(folder) == [0, 0, "train.stop_at=0.1"]
    assert (folder / "checkpoints/0/model/config.json").is_file()
    capsys.readouterr()
    train("run", resume="auto")
    assert "after step 0 of 0; it has already ended" in capsys.readouterr().err
    assert [line["step"] for line in train("run", train__stop_at=0.3)] == [0, 1, 2]


def test_a_run_that_has_taken_all_its_steps_was_not_ended_by_a_setting(train: Runner, tmp_path: Path) -> None:
    train("run", train__stop_at=0.5, train__patience=1)
    assert summary_of(tmp_path / "run") == [4, 4, None]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_no_number_is_never_the_best(value: float) -> None:
    counters = Counters()
    best = []
    for step, measured in enumerate((value, -3.0, value, -2.0)):
        counters.step = step
        counters.take_held_out(measured)
        best.append((counters.best_value, counters.best_step, counters.evaluations_since_best))
    assert best == [(None, 0, 1), (-3.0, 1, 0), (-3.0, 1, 1), (-2.0, 3, 0)]


@pytest.mark.slow
def test_a_run_ends_with_a_value_that_is_good_enough_and_goes_on_for_a_better_one(
    train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = train("longest", train__total_dialog_turns=(STEPS + 2) * 16)
    assert train("run", train__stop_at=0.5) == longest[:5]
    assert "4   in 0 min" in (end := capsys.readouterr().out) and "; train.stop_at=0.5 ended the run" in end
    assert summary_of(tmp_path / "run") == [4, 4, "train.stop_at=0.5"]
    folder = tmp_path / "run"
    before = (folder / "summary.json").read_bytes()
    assert train("run", resume="auto") == longest[:5]
    assert (folder / "summary.json").read_bytes() == before, "it has ended"
    # Where it ends may change, as it changes no step.
    resumed = train("run", resume="auto", train__stop_at=0.9)
    assert resumed == longest[:13]
    assert summary_of(tmp_path / "run") == [12, 12, "train.stop_at=0.9"]


@pytest.mark.parametrize("key", ["num_problems", "frequency"])
@pytest.mark.parametrize(("name", "value"), [("keep_best", True), ("stop_at", 0.5), ("patience", 2)])
def test_without_evaluations_there_is_nothing_to_choose_by(
    config: Config, key: str, name: str, value: object
) -> None:
    setattr(config.train, name, value)
    validate(config)
    setattr(config.eval, key, 0)
    with pytest.raises(ConfigError, match=rf"train\.{name}=.*eval\.{key}=0.*write eval\.{key}="):
        validate(config)
