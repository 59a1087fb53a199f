"""A run whose folder is deleted, and what a resumed run says of files that are lost."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError, TrainingStopped
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.training.job import run


@pytest.mark.slow
@pytest.mark.float32
def test_a_run_whose_folder_is_deleted_saves_what_it_has_and_ends(
    config: Config,
    train: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.train.total_dialog_turns = 48
    config.train.checkpoint_frequency = 1
    expected = train("whole")
    honest, graded, lost = BareNumberReward.__call__, iter(range(10**6)), tmp_path / "lost"
    fill, filled, deleted = checkpoint._fill, threading.Event(), threading.Event()

    def fill_and_wait(*content: Any) -> None:
        fill(*content)
        # The first checkpoint is whole, and has not got its name yet.
        filled.set()
        deleted.wait()

    def delete(self: BareNumberReward, text: str, example: object) -> float:
        # In the second of three rounds of 16 responses.
        if next(graded) == 20:
            filled.wait()
            shutil.rmtree(lost)
            deleted.set()
        return honest(self, text, example)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(BareNumberReward, "__call__", delete)
        patch.setattr(checkpoint, "_fill", fill_and_wait)
        with pytest.raises(TrainingStopped) as error:
            train("lost")
    assert str(error.value) == (
        f"{lost}/metrics.jsonl was deleted or moved while the run wrote to it; what was trained is now in "
        f"{lost}/checkpoints/2: {checkpoint.how_to_continue(lost)}"
    )
    capsys.readouterr()
    # The metrics of the step that was not written are in the checkpoint.
    assert train("lost", resume="auto") == [line for line in expected if line["step"] >= 2]
    output = capsys.readouterr().err
    lacks = "is missing: it lacks lines of 2 steps"
    assert f"warning: {lost}/metrics.jsonl {lacks} (0 to 1), and the run goes on without them\n" in output
    assert f"warning: {lost}/rollouts.jsonl {lacks} (1 to 2), and the run goes on without them\n" in output


def test_a_lock_of_another_kind_does_not_block(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / ".lock")
    with pytest.raises(ConfigError, match=rf"run folder {folder} cannot be used: .*/.lock: is not a regular"):
        run(config, folder)
