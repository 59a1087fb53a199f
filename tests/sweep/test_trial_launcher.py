"""The launcher's parts without Ray: which trials are hopeless, what is shown, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweep_files import write_trial

from torchrl_grpo.cli import multirun
from torchrl_grpo.config.schema import SweepConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.cores import allowed_cores
from torchrl_grpo.rollout.workers import ray_pool
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware
from torchrl_grpo.runtime.interrupts import (
    STOP_SIGNAL,
    StopRequested,
    Terminated,
    raise_terminations,
    stop_signal_blocked,
)
from torchrl_grpo.sweep.hopeless import hopeless
from torchrl_grpo.sweep.launcher import TrialOptions, _failure, _last_words, _Run, _Trial
from torchrl_grpo.sweep.table import FAILED, RUNNING, WAITING, Row, StateTable
from torchrl_grpo.sweep.trials import ENDED, STOPPED, STOPPED_EARLY, Trial

OPTIONS = TrialOptions(
    ["python", "grpo.py"], ["hydra/job_logging=none"], {"optimizer.lr", "seed"}, 1, 0, None
)


def evaluated(name: str, seed: int, *values: float, state: str = "unfinished") -> Trial:
    steps = list(range(0, 10 * len(values), 10))
    bounds = [(value - 0.1, value + 0.1) for value in values]
    return Trial(name, {}, seed, state, "eval/accuracy", steps, list(values), bounds)


def test_a_trial_is_hopeless_if_it_was_below_another_of_its_seed_often_enough() -> None:
    good, bad = evaluated("good", 0, 0.1, 0.5, 0.6, state=ENDED), evaluated("bad", 0, 0.1, 0.2, 0.3)
    close, other_seed = evaluated("close", 0, 0.1, 0.2, 0.45), evaluated("other seed", 1, 0.1, 0.2, 0.3)
    trials = [good, bad, close, other_seed]
    assert hopeless(trials, 2) == [bad] and hopeless(trials, 1) == [bad]
    assert hopeless(trials, 3) == [], "all were alike at the start"
    assert hopeless([good, evaluated("ended", 0, 0.1, 0.2, 0.3, state=ENDED)], 1) == []
    other_metric = replace(bad, metric="eval/loss")
    assert hopeless([good, other_metric], 1) == []
    assert hopeless([evaluated("ahead", 0, 0.1, 0.2, 0.3, 0.4), good], 1) == [], "no other has come so far"


def test_a_hopeless_trial_is_asked_to_save_itself_and_is_not_run_again(tmp_path: Path) -> None:
    sent: list[int] = []
    write_trial(tmp_path / "0", 0, "optimizer.lr=1", grades=[1.0] * 6)
    write_trial(tmp_path / "1", 0, "optimizer.lr=2", grades=[0.0] * 6, ended=False)
    options = replace(OPTIONS, hopeless_after=1)
    good, bad = (_Trial(tmp_path, name, [], options) for name in ("0", "1"))
    bad.actor, bad.row.state = SimpleNamespace(stop=SimpleNamespace(remote=sent.append)), RUNNING
    _Run(tmp_path, [good, bad], options)._end_hopeless([bad])
    assert sent == [STOP_SIGNAL] and (good.row.state, bad.row.state) == (ENDED, STOPPED_EARLY)
    bad.end(75)
    assert _failure(tmp_path, [good, bad]) is None
    assert _Trial(tmp_path, "1", [], options).row.state == STOPPED_EARLY


class Interrupted(_Run):
    """A run of trials without Ray: the first trial runs when a signal comes, and ends at the next look."""

    def __init__(self, folder: Path, trials: list[_Trial], come: Callable[[], None]) -> None:
        super().__init__(folder, trials, OPTIONS)
        self.come = come
        self.sent: list[tuple[str, str, int]] = []
        self.looks = 0

    def _start(self, trial: _Trial) -> object:
        return trial.row.name

    def _stop(self, trial: _Trial, number: int) -> None:
        self.sent.append((trial.row.name, trial.row.state, number))

    def _wait(self, refs: dict[Any, _Trial]) -> None:
        self.looks += 1
        if self.looks == 1:
            refs["0"].row.state = RUNNING
            self.come()
        else:
            assert [*refs] == ["0"]
            refs.clear()


def ask_to_end() -> None:
    # As Ray does, whose handler swallows what the program's own raises.
    with contextlib.suppress(Terminated):
        signal.raise_signal(signal.SIGTERM)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("come", "number", "raised"),
    [
        (ask_to_end, signal.SIGTERM, Terminated),
        (lambda: signal.raise_signal(signal.SIGINT), signal.SIGTERM, KeyboardInterrupt),
        (lambda: signal.raise_signal(STOP_SIGNAL), STOP_SIGNAL, StopRequested),
    ],
    ids=["SIGTERM", "SIGINT", "SIGUSR1"],
)
def test_trials_that_run_save_themselves_when_the_sweep_is_asked_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    come: Callable[[], None],
    number: int,
    raised: type[BaseException],
) -> None:
    monkeypatch.setattr(ray_pool, "local_cluster", lambda *_: nullcontext())
    trials = [_Trial(tmp_path, name, [], OPTIONS) for name in ("0", "1")]
    run = Interrupted(tmp_path, trials, come)
    with stop_signal_blocked(), raise_terminations(), pytest.raises(raised):
        run.run()
    assert run.sent == [("0", RUNNING, number), ("1", WAITING, number)] and run.looks == 2
    assert f"goes on with the same command and sweep.resume={tmp_path}" in capsys.readouterr().out


def test_a_trial_is_an_ordinary_command_in_its_own_folder(tmp_path: Path) -> None:
    trial = _Trial(tmp_path / "my sweep", "3", ["optimizer.lr=1e-4", "env=gsm8k", "seed=1"], OPTIONS)
    assert trial.command == [
        *("python", "grpo.py", "optimizer.lr=1e-4", "env=gsm8k", "seed=1", "hydra/job_logging=none"),
        *(f"hydra.run.dir='{tmp_path}/my sweep/3'", "resume=auto_or_new"),
    ]
    assert trial.row == Row("3", "optimizer.lr=1e-4 seed=1", WAITING)


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    words = ["optimizer.lr=1"]
    write_trial(tmp_path / "0", 0, *words, grades=[1.0])
    write_trial(tmp_path / "1", 0, *words, grades=[1.0], ended=False)
    write_trial(tmp_path / "2", 0, *words, grades=[1.0], ended=False)
    (tmp_path / "2" / STOPPED).write_text("{}")
    trials = [_Trial(tmp_path, str(number), words, OPTIONS) for number in range(4)]
    assert [trial.row.state for trial in trials] == [ENDED, WAITING, STOPPED_EARLY, WAITING]
    assert [trial.is_over for trial in trials] == [True, False, True, False]
    assert trials[0].result(None).return_value == 1.0


def test_another_trials_folder_is_refused(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", 0, "optimizer.lr=1", grades=[1.0])
    _Trial(tmp_path, "0", ["optimizer.lr=1", "seed=0"], OPTIONS).check()
    with pytest.raises(ConfigError, match=r"trial 0 was run without optimizer.lr=2; write the command as"):
        _Trial(tmp_path, "0", ["optimizer.lr=2", "seed=0"], OPTIONS).check()


def test_the_error_of_a_failed_trial_names_cause_log_and_fix(tmp_path: Path) -> None:
    good, bad = (_Trial(tmp_path, name, ["optimizer.lr=1"], OPTIONS) for name in ("0", "1"))
    write_trial(tmp_path / "0", 0, "optimizer.lr=1", grades=[1.0])
    (tmp_path / "1.log").write_text("loading\nerror: gsm8k: row 17 has no answer\nclosing\n")
    good.end(0)
    bad.end(2)
    assert (good.row.state, bad.row.state) == (ENDED, FAILED)
    failure = _failure(tmp_path, [good, bad])
    assert failure is not None and bad.result(failure)._return_value is failure
    for part in ("1 of 2 trials failed (1)", "code 2", "row 17", f"{tmp_path}/1.log", "sweep.resume="):
        assert part in str(failure)
    assert _failure(tmp_path, [good]) is None


def test_a_damaged_record_of_a_trial_refuses_nothing(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", 0, "optimizer.lr=1", grades=[1.0], ended=False)
    for text in ("[a", "3", "[1, 2"):
        (tmp_path / "0/.hydra/overrides.yaml").write_text(text)
        _Trial(tmp_path, "0", ["optimizer.lr=1"], OPTIONS).check()


def test_files_of_a_trial_that_cannot_be_read_do_not_end_the_sweep(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", 0, "optimizer.lr=1", grades=[1.0], ended=False)
    trial = _Trial(tmp_path, "0", ["optimizer.lr=1"], OPTIONS)
    before = trial.row.trial
    assert before is not None and before.steps == [0, 10]
    overrides = tmp_path / "0/.hydra/overrides.yaml"
    overrides.unlink()
    overrides.mkdir()
    trial.read()
    assert trial.row.trial is before and trial.row.state == WAITING


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    with log.open("w") as file:
        file.write("error: long ago\n")
        file.truncate(2**36)
        file.seek(0, os.SEEK_END)
        file.write("\nerror: row 17 has no answer\nclosing\n")
    assert _last_words(log) == " (error: row 17 has no answer)"


def test_changes_of_state_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("0", "optimizer.lr=1"), Row("1", "optimizer.lr=2")]
    with StateTable() as table:
        table.show(rows)
        rows[0].state = RUNNING
        table.show(rows)
        table.show(rows)
        rows[0].state, rows[0].trial = ENDED, evaluated("0", 0, 0.1, 0.5)
        table.show(rows)
    assert capsys.readouterr().out == (
        "trial 0 (optimizer.lr=1): running\ntrial 0 (optimizer.lr=1): ended, 0.500\n"
    )


def test_options_stand_for_seeds_and_reach_no_trial() -> None:
    words = ["optimizer.lr=1,2", "sweep.devices=1", "++sweep.seeds=3"]
    assert multirun.without_options(words, SweepConfig(devices=1, seeds=3)) == [
        "optimizer.lr=1,2",
        "seed=0,1,2",
    ]
    with pytest.raises(ConfigError, match=r"seed is set too; write one of the two"):
        multirun.without_options(["seed=4"], SweepConfig(seeds=3))
    with pytest.raises(ConfigError, match=r"write --multirun sweep.devices=1 instead"):
        multirun.refuse_options(words)


def test_placements_that_are_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = allowed_cores()
    with pytest.raises(ConfigError, match=rf"CPU cores, and this machine has {cores}; write sweep.devices="):
        multirun.Trials.of(SweepConfig(devices=cores + 1))
    monkeypatch.setattr(hardware, "present", lambda: Hardware(gpus=(80.0, 80.0)))
    with pytest.raises(ConfigError, match=r"so many GPUs, and this machine has 2"):
        multirun.Trials.of(SweepConfig(devices=3))
    trials = multirun.Trials.of(SweepConfig(devices=1))
    assert trials is not None and trials.num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with trials.devices_visible():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    with pytest.raises(ConfigError, match=r"hydra/launcher=joblib: sweep.devices=1 starts the trials by"):
        trials.launcher([], ["hydra/launcher=joblib"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"write the command without the launcher"):
        multirun.Trials.of(SweepConfig(devices=1))


def test_a_folder_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no multirun.yaml, so it is no folder of a sweep; write a folder"):
        multirun.folder_to_resume(str(tmp_path), None)
    (tmp_path / "multirun.yaml").write_text(json.dumps({}))
    assert multirun.folder_to_resume(str(tmp_path), None) == tmp_path
    with pytest.raises(ConfigError, match=r"goes on in its folder; write sweep.resume alone"):
        multirun.folder_to_resume(str(tmp_path), tmp_path / "other")
