"""What libraries print goes to the log of a run, and what the project prints to the screen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_grpo.runtime import screen

# A library that prints in every way there is, inside a run whose root logger is set up as Hydra sets it up.
_PROGRAM = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from torchrl_grpo.runtime import screen

log = Path(sys.argv[1])
form = logging.Formatter("%(name)s: %(message)s")
for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(log)):
    handler.setFormatter(form)
    logging.getLogger().addHandler(handler)
early = logging.StreamHandler(sys.stderr)
logging.getLogger("library").addHandler(early)
print("before")
with screen.libraries_to_log():
    print("noise of print")
    print("noise of stderr", file=sys.stderr)
    warnings.warn("noise of warnings", FutureWarning)
    for module, text in (("torchrl_grpo.x", "a checkpoint is skipped"), ("torch.nn", "noise of torch")):
        exec(f"import warnings; warnings.warn('{text}', stacklevel=2)", {"__name__": module})
    os.write(1, b"noise of C\\n")
    subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
    logging.getLogger("library").warning("noise of a logger")
    logging.getLogger("library").error("an error")
    logging.getLogger("torchrl_grpo.rewards").warning("a reward failed")
    screen.out().write("figures\\n")
    screen.err().write("progress\\n")
    os.write(screen.err_descriptor(), b"interrupted\\n")
    CODE
print("after")
logging.getLogger("library").handlers.clear()
logging.getLogger("library").warning("shown again")
"""
NOISE = ("print", "stderr", "warnings", "C", "a child", "a logger")


def run(log: Path, code: str = "pass") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM.replace("CODE", code), str(log)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_noise_is_in_the_log_and_nothing_else_is_lost(tmp_path: Path) -> None:
    done = run(tmp_path / "grpo.log")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before",
        "library: an error",
        "torchrl_grpo.rewards: a reward failed",
        "figures",
        "after",
        "library: shown again",
    ]
    assert done.stderr.splitlines() == ["warning: a checkpoint is skipped", "progress", "interrupted"]
    logged = (tmp_path / "grpo.log").read_text()
    for way in (*NOISE, "torch"):
        assert f"noise of {way}\n" in logged, way
    assert logged.count("a reward failed") == 1


def test_an_error_is_on_the_screen_and_names_the_log(tmp_path: Path) -> None:
    done = run(tmp_path / "grpo.log", "raise RuntimeError('the engine does not start')")
    assert done.returncode == 1
    assert f"libraries printed more to {tmp_path / 'grpo.log'}\n" in done.stderr
    assert done.stderr.endswith("RuntimeError: the engine does not start\n")
    assert "noise" not in done.stdout and "noise of warnings" not in done.stderr


def test_a_crash_in_c_is_on_the_screen(tmp_path: Path) -> None:
    done = run(tmp_path / "grpo.log", "os.abort()")
    assert "Fatal Python error: Aborted" in done.stderr


def test_without_a_log_nothing_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of an earlier test has left its log here.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with screen.libraries_to_log(), screen.libraries_to_log(tmp_path / "no folder/grpo.log"):
        os.write(1, b"shown\n")
    assert capfd.readouterr().out == "shown\n"
    assert screen.err() is sys.stderr


def test_records_that_are_alike_are_folded_with_a_count_and_all_are_in_the_log(tmp_path: Path) -> None:
    code = """
    rewards = logging.getLogger("torchrl_grpo.rewards")
    for number in range(120):
        rewards.warning("mine failed on %d", number, extra={"fold": "mine"})
    rewards.warning("other failed", extra={"fold": "other"})
    for number in range(2):
        rewards.warning("a worker died")
    """
    done = run(tmp_path / "grpo.log", code)
    lines = done.stdout.splitlines()
    start = lines.index("torchrl_grpo.rewards: mine failed on 0")
    assert lines[start : start + 6] == [
        "torchrl_grpo.rewards: mine failed on 0",
        "torchrl_grpo.rewards: mine failed on 9 (10 times so far)",
        "torchrl_grpo.rewards: mine failed on 99 (100 times so far)",
        "torchrl_grpo.rewards: other failed",
        *["torchrl_grpo.rewards: a worker died"] * 2,
    ]
    log = (tmp_path / "grpo.log").read_text()
    assert log.count("mine failed on") == 120 and "times so far" not in log
