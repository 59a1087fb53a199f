"""A process that writes a checkpoint in the background, and stops for good at one of its steps."""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.config import Config
from torchrl_grpo.runtime.files.direct_file import Written

# What a write does to files, as Python's audit hooks name it. It stops before doing it.
_STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def save(run_dir: Path, step: int, writer: BackgroundWriter | None = None) -> torch.Tensor:
    """Write weights that are all ``step`` as a checkpoint of this step, and return them."""
    weights = torch.full((2**16,), float(step))

    def write_model(folder: Path) -> dict[Path, Written]:
        with (folder / "model.safetensors").open("wb") as file:
            for half in weights.chunk(2):
                file.write(half.numpy().tobytes())
                file.flush()
                (folder / "config.json").write_text("{}")
        return {}

    def write(on_state_read: Any) -> None:
        state = {"step": step, "weights": weights}
        checkpoint.save(
            run_dir,
            step,
            cfg=Config(),
            write_model=write_model,
            state=state,
            keep=1,
            on_state_read=on_state_read,
        )

    writer = writer or BackgroundWriter()
    writer.start(step, write)
    return weights


def save_and_stop(run_dir: Path, step: int, stop: int, to_test: Connection) -> None:
    """Write a checkpoint, and send True before operation ``stop`` of the write, or False at its end."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _STEPS or threading.current_thread() is threading.main_thread():
            return
        # Of a file in a folder that is open, a removal names only the last part.
        if event.startswith("os.rm") or event == "os.remove" or str(run_dir) in str(arguments[0]):
            count += 1
            if count == stop:
                to_test.send(True)
                threading.Event().wait()

    sys.addaudithook(hook)
    writer = BackgroundWriter()
    weights = save(run_dir, step, writer)
    # As the optimizer does in the next step.
    writer.wait_until_read()
    weights.fill_(-1.0)
    writer.finish()
    to_test.send(False)
