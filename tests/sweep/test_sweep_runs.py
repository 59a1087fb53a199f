"""A whole sweep on free cores that is killed in the middle, goes on, and has trials that crash."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import TimeoutExpired

import forked_workers
import psutil
import pytest
from forked import ForkedPopen, server_address

from torchrl_grpo.checkpoints.run_dir import complete_checkpoints
from torchrl_grpo.planning.cores import allowed_cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRIALS = [str(number) for number in range(4)]
CRASHING = "optimizer.lr=1"
# A trial imports this, and so do the workers that call it. Trial 1 does not get through its second round
# before the file go_on is there, so the sweep is killed in the middle on any machine.
REWARD = f"""
import itertools, os, sys, threading

if {CRASHING!r} in sys.argv:
    os._exit(7)
if any(word.rstrip("'").endswith("/sweep/1") for word in sys.argv):
    os.environ["WAITS"] = "yes"
calls = itertools.count()

def reward(response, answer):
    if "WAITS" in os.environ and not os.path.exists("go_on") and next(calls) >= 8:
        threading.Event().wait()
    return float(len(response) % 5)
"""


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(REWARD)
    return [
        "--multirun",
        # The fewest that have an interval.
        "sweep.seeds=2",
        "sweep.devices=1",
        "env.dataset=jsonl",
        "env.data_path=sums.jsonl",
        "env.answer_format=plain",
        "env.num_envs=2",
        "env.repeats=4",
        f"model.name={tiny_model_dir}",
        "inference_model.backend=transformers",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=8",
        "reward.functions={mine:own.py:reward}",
        "reward.weights={closeness:1.0,mine:0.1}",
        "reward.workers=1",
        "reward.timeout_s=600",
        "train.checkpoint_frequency=1",
        "train.total_dialog_turns=16",
        "eval.num_problems=6",
        "eval.frequency=2",
        "eval.reward=closeness",
        "logging.progress=false",
    ]


# A sweep as if it had been started by `python forked_workers.py grpo.py`, so its trials are started so, too.
# Each of those would import for six seconds of a core otherwise.
FORKS_TRIALS = """
import runpy, sys

sys.orig_argv = [sys.executable, {fork!r}, {program!r}]
runpy.run_path({program!r}, run_name="__main__")
"""


@contextlib.contextmanager
def started(script: Path, folder: Path, *words: str) -> Iterator[ForkedPopen]:
    """Start a sweep. Its trials are new processes, as Ray starts them, unless the script forks them."""
    with (folder / "output.txt").open("wb") as output:
        process = ForkedPopen([sys.executable, str(script), *words], cwd=folder, stdout=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until(process: ForkedPopen, is_so: Callable[[], bool], output: Path) -> None:
    while not is_so():
        assert process.poll() is None, output.read_text()
        with contextlib.suppress(TimeoutExpired):
            process.wait(timeout=0.1)


def has_ended(trial: Path) -> bool:
    return (trial / "summary.json").exists()


def written_at(trials: list[Path]) -> dict[Path, int]:
    return {trial: (trial / "summary.json").stat().st_mtime_ns for trial in trials if has_ended(trial)}


def test_a_sweep_that_is_killed_goes_on_past_trials_that_crash_and_ends_with_the_table(
    repo_root: Path, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, forks = repo_root / "sota-implementations/grpo/grpo.py", tmp_path / "forks_trials.py"
    sweep, output = tmp_path / "sweep", tmp_path / "output.txt"
    trials = [sweep / name for name in TRIALS]
    rates = f"optimizer.lr=1e-2,1e-3,{CRASHING.partition('=')[2]}"
    with started(program, tmp_path, *words, rates, "hydra.sweep.dir=sweep") as process:
        wait_until(process, lambda: has_ended(trials[0]) and bool(complete_checkpoints(trials[1])), output)
        running: dict[psutil.Process, int] = {}
        for each in psutil.Process(process.pid).children(recursive=True):
            # Trial 0 may be about to end.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resume=auto_or_new" in " ".join(each.cmdline()):
                    running[each] = each.nice()
        assert 1 <= len(running) <= allowed_cores()
        # Ray would take priority from them.
        assert set(running.values()) == {psutil.Process(process.pid).nice()}
        process.kill()
        _, alive = psutil.wait_procs(list(running), timeout=60)
        assert not alive
    ended = written_at(trials)
    interrupted = [trial for trial in trials if complete_checkpoints(trial) and trial not in ended]
    assert trials[0] in ended and trials[1] in interrupted
    (tmp_path / "go_on").touch()
    forks.write_text(FORKS_TRIALS.format(fork=forked_workers.__file__, program=str(program)))
    monkeypatch.setenv(forked_workers.VARIABLE, server_address())
    with started(forks, tmp_path, *words, rates, "sweep.resume=sweep") as process:
        assert process.wait() == 2
    failure = "error: 2 of 6 trials failed (4, 5); trial 4 ended with code 7"
    assert failure in output.read_text(), output.read_text()
    assert all(map(has_ended, trials)) and not has_ended(sweep / "4")
    assert written_at(list(ended)) == ended
    for trial in interrupted:
        assert (trial / ".hydra/resume-1").is_dir(), "it went on from its checkpoint"
    ended = written_at(trials)
    with started(forks, tmp_path, *words, "optimizer.lr=1e-2,1e-3", "sweep.resume=sweep") as process:
        assert process.wait() == 0, output.read_text()
    assert written_at(trials) == ended
    entries = json.loads((sweep / "sweep.json").read_text())
    assert [entry["name"] for entry in entries["settings"]] == ["optimizer.lr=0.01", "optimizer.lr=0.001"]
    assert all(entry["seeds"] == [0, 1] and entry["interval"] for entry in entries["settings"])
    assert entries["settings"][1]["difference"]["problems"] == 6
    assert "Best: optimizer.lr=" in output.read_text()
