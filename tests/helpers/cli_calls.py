"""Calls the command line inside the test's own process, with a run that only takes notes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.cli import checked_job, main
from torchrl_grpo.cli.compose import composer, open_free_form
from torchrl_grpo.config import Config

ROOT = Path(__file__).resolve().parents[2]

# What the fake run saw, and what it does; a run is found by name, so this has to be module state.
SEEN: list[tuple[Config, Path]] = []
BEHAVE: dict[str, Any] = {}


def run(cfg: Config, run_dir: Path) -> dict[str, Any]:
    SEEN.append((cfg, run_dir))
    BEHAVE.get("do", lambda cfg, run_dir: None)(cfg, run_dir)
    return {}


def set_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in ``folder`` as a script called ``grpo.py`` that has seen no run."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(main, "check_installed", lambda cfg: None)
    SEEN.clear()
    BEHAVE.clear()
    return folder


def call(*words: str, asynchronous: bool = False) -> int:
    """Run the command line and return its exit code."""
    try:
        main.main(main.Command(f"{__name__}:run", asynchronous=asynchronous), words)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code
    return 0


def accept(*words: str) -> Config:
    """Compose and check a job without starting it, which takes a third of the time of :func:`call`.

    Raises:
        UserError: the words are wrong.
    """
    with composer(ROOT / "config", "grpo_gsm8k", None) as tree:
        (overrides,) = tree.jobs([open_free_form(word) for word in words], sweep=False)
        return checked_job.resolve_job(tree.compose(overrides, 0).node, lambda cfg: None)


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a wrong command line, check all that every mistake must do, and return its message."""
    assert call(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    assert "write " in captured.err and "instead instead" not in captured.err
    assert SEEN == []
    return captured.err


def write_run(folder: Path, *steps: int) -> Path:
    """Make a folder look like a run with complete checkpoints at these steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        checkpoint = folder / "checkpoints" / str(step)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def snapshot(folder: Path) -> dict[str, str | None]:
    """Every file below a folder with its text, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
