"""Whole sweeps on free cores: one that is killed in the middle, and one of which a trial crashes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from torchrl_grpo.checkpoints.run_dir import complete_checkpoints
from torchrl_grpo.planning.cores import allowed_cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRIALS = [str(number) for number in range(4)]


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--multirun",
        "optimizer.lr=1e-2,1e-3",
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
        "reward.weights={closeness:1.0,bare_number:0.1}",
        "train.checkpoint_frequency=1",
        "train.total_dialog_turns=48",
        "eval.num_problems=6",
        "eval.frequency=2",
        "eval.reward=closeness",
        "logging.progress=false",
    ]


@contextlib.contextmanager
def started(repo_root: Path, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    script = repo_root / "sota-implementations/grpo/grpo.py"
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *words], cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until(process: subprocess.Popen[bytes], is_so: Callable[[], bool], output: Path) -> None:
    while not is_so():
        assert process.poll() is None, output.read_text()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)


def has_ended(trial: Path) -> bool:
    return (trial / "summary.json").exists()


def test_a_sweep_that_is_killed_in_the_middle_goes_on_and_ends_with_the_table(
    repo_root: Path, tmp_path: Path, words: list[str]
) -> None:
    sweep, output = tmp_path / "sweep", tmp_path / "output.txt"
    trials = [sweep / name for name in TRIALS]
    with started(repo_root, tmp_path, *words, "hydra.sweep.dir=sweep") as process:

        def in_the_middle() -> bool:
            begun = [trial for trial in trials if complete_checkpoints(trial) and not has_ended(trial)]
            return bool(begun) and any(map(has_ended, trials))

        wait_until(process, in_the_middle, output)
        below = psutil.Process(process.pid).children(recursive=True)
        running = [each for each in below if "resume=auto_or_new" in " ".join(each.cmdline())]
        assert 1 <= len(running) <= allowed_cores()
        # Ray would take priority from them.
        assert {each.nice() for each in running} == {psutil.Process(process.pid).nice()}
        process.kill()
        _, alive = psutil.wait_procs(running, timeout=60)
        assert not alive
    ended = {trial: (trial / "summary.json").stat().st_mtime_ns for trial in trials if has_ended(trial)}
    interrupted = [trial for trial in trials if complete_checkpoints(trial) and trial not in ended]
    assert ended and len(ended) < len(trials)
    with started(repo_root, tmp_path, *words, "sweep.resume=sweep") as process:
        assert process.wait() == 0, output.read_text()
    assert all((trial / "summary.json").stat().st_mtime_ns == written for trial, written in ended.items())
    for trial in interrupted:
        assert (trial / ".hydra/resume-1").is_dir(), "it went on from its checkpoint"
    entries = json.loads((sweep / "sweep.json").read_text())
    assert [entry["name"] for entry in entries["settings"]] == ["optimizer.lr=0.01", "optimizer.lr=0.001"]
    assert all(entry["seeds"] == [0, 1] and entry["interval"] for entry in entries["settings"])
    assert entries["settings"][1]["difference"]["problems"] == 6
    assert "Best: optimizer.lr=" in output.read_text()


def test_a_trial_that_crashes_ends_alone(repo_root: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "own.py").write_text(
        "import os, sys\n\n"
        "def reward(response: str, answer: str) -> float:\n"
        "    return float(len(response) % 5)\n\n"
        "if any('sweep/1' in word for word in sys.argv):\n"
        "    os._exit(7)\n"
    )
    own = ["reward.functions={mine:own.py:reward}", "reward.weights={mine:1.0}", "eval.reward=null"]
    kept = [word for word in words if not word.startswith(("sweep.seeds", "reward.", "eval.reward"))]
    kept += ["train.total_dialog_turns=8", "hydra.sweep.dir=sweep", *own]
    with started(repo_root, tmp_path, *kept) as process:
        assert process.wait() == 2
    output = (tmp_path / "output.txt").read_text()
    assert "error: 1 of 2 trials failed (1); trial 1 ended with code 7" in output, output
    assert has_ended(tmp_path / "sweep/0") and not has_ended(tmp_path / "sweep/1")
