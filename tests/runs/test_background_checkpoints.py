"""Runs that train while their checkpoints are written."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.checkpoints import checkpoint, manifest
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.checkpoints.run_dir import complete_checkpoints
from torchrl_grpo.errors import CheckpointError, TrainingStopped, WorkersLost
from torchrl_grpo.runtime import screen
from torchrl_grpo.training.optimizer_step import OptimizerStep

pytestmark = pytest.mark.slow

# Entries of the state without clocks and sizes of memory.
EXACT = ("optimise", "collector", "buffer", "publisher", "random")


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


@pytest.mark.float32
def test_a_checkpoint_written_during_the_next_step_is_the_one_written_at_once(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, fill, accumulate = BackgroundWriter.start, checkpoint._fill, OptimizerStep.accumulate
    changes = {"train__checkpoint_frequency": 1, "train__total_dialog_turns": 48, "checkpoint__keep": 9}
    with monkeypatch.context() as patch:

        def start_and_wait(writer: BackgroundWriter, step: int, write: Any) -> None:
            start(writer, step, write)
            writer.finish()

        patch.setattr(BackgroundWriter, "start", start_and_wait)
        expected = train("at once", **changes)

    begun, overlapped = [threading.Event() for _ in range(4)], list[int]()

    def fill_later(tmp_dir: Path, step: int, *rest: Any) -> None:
        # Of the last checkpoint there is no next step.
        if step < 3:
            begun[step].wait()
            overlapped.append(step)
        fill(tmp_dir, step, *rest)

    steps = iter(range(3))

    def accumulate_and_say(self: OptimizerStep, *part: Any) -> dict[str, float]:
        sums = accumulate(self, *part)
        # Gradients of the next step are there, and its update waits.
        begun[next(steps)].set()
        return sums

    monkeypatch.setattr(checkpoint, "_fill", fill_later)
    monkeypatch.setattr(OptimizerStep, "accumulate", accumulate_and_say)
    assert train("beside", **changes) == expected
    assert overlapped == [1, 2]
    pairs = [complete_checkpoints(tmp_path / name) for name in ("at once", "beside")]
    assert [len(folders) for folders in pairs] == [3, 3]
    for first, other in zip(*pairs, strict=True):
        for name in ("model/model.safetensors", "model/README.md", "model/config.json"):
            texts = [
                (folder / name).read_bytes().replace(folder.parents[1].name.encode(), b"")
                for folder in (first, other)
            ]
            assert texts[0] == texts[1], name
        states = [checkpoint.load_state(folder) for folder in (first, other)]
        assert list(states[0]) == list(states[1])
        for entry in EXACT:
            assert same(states[0][entry], states[1][entry]), entry


def test_a_disk_that_is_full_stops_the_run_after_the_next_step(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_fill", full)
    with pytest.raises(
        CheckpointError, match=r"checkpoints/1: the checkpoint could not be written .*No space"
    ):
        train("run", train__checkpoint_frequency=1)
    # The error is raised between two steps. The write has begun before the second.
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) in (2, 3)
    with pytest.raises(CheckpointError, match=r"checkpoints/1: .*No space"):
        train("short", train__total_dialog_turns=16)


def test_a_run_whose_workers_are_lost_is_saved_after_a_write_that_failed(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, accumulate = checkpoint._fill, OptimizerStep.accumulate
    writes, lost = list[int](), threading.Event()

    def fail_once(tmp_dir: Path, step: int, *rest: Any) -> None:
        writes.append(step)
        if len(writes) == 1:
            lost.wait()
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(tmp_dir, step, *rest)

    def lose(self: OptimizerStep, *part: Any) -> dict[str, float]:
        if self.scheduler.last_epoch == 1:
            lost.set()
            raise WorkersLost("they are gone")
        return accumulate(self, *part)

    monkeypatch.setattr(checkpoint, "_fill", fail_once)
    monkeypatch.setattr(OptimizerStep, "accumulate", lose)
    with pytest.raises(WorkersLost, match=r"^they are gone$"):
        train("run", train__checkpoint_frequency=1)
    (folder,) = complete_checkpoints(tmp_path / "run")
    assert folder.name == "1" and writes == [1, 1]


def test_a_run_whose_checkpoint_misses_its_folder_is_saved_again(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, check, writes = checkpoint._fill, BackgroundWriter.check, list[int]()

    def delete_once(tmp_dir: Path, step: int, *rest: Any) -> None:
        writes.append(step)
        if len(writes) == 1:
            shutil.rmtree(tmp_path / "run")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_dir))
        fill(tmp_dir, step, *rest)

    def check_at_the_end(writer: BackgroundWriter) -> None:
        if writer._write is not None:
            writer._write.exception()
        check(writer)

    monkeypatch.setattr(checkpoint, "_fill", delete_once)
    monkeypatch.setattr(BackgroundWriter, "check", check_at_the_end)
    text = r"\.writing-1 was deleted or moved .*; what was trained is now in .*/checkpoints/1: "
    with pytest.raises(TrainingStopped, match=text):
        train("run", train__checkpoint_frequency=1)
    (folder,) = complete_checkpoints(tmp_path / "run")
    assert folder.name == "1" and writes == [1, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupted_run_waits_for_its_checkpoint(
    fails: bool,
    train: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted, fill, messages = threading.Event(), checkpoint._fill, list[str]()

    def fill_later(*content: Any) -> None:
        interrupted.wait()
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(*content)

    def say(text: str) -> None:
        messages.append(text)
        interrupted.set()

    def interrupt(self: OptimizerStep, *part: Any) -> dict[str, float]:
        if self.scheduler.last_epoch == 1:
            raise KeyboardInterrupt
        return accumulate(self, *part)

    accumulate = OptimizerStep.accumulate
    monkeypatch.setattr(checkpoint, "_fill", fill_later)
    monkeypatch.setattr(screen, "say", say)
    monkeypatch.setattr(OptimizerStep, "accumulate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train("run", train__checkpoint_frequency=1)
    assert (
        messages[0] == "The checkpoint of step 1 is still being written; interrupt again to end without it."
    )
    folders = complete_checkpoints(tmp_path / "run")
    if fails:
        assert len(messages) == 2 and folders == []
        assert messages[1].startswith("warning: the checkpoint of step 1 is not written: ")
        return
    (folder,) = folders
    assert len(messages) == 1 and folder.name == "1" and manifest.find_damage(folder) is None
