"""A trial's process: its cores, its devices, its output, and how it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.sweep.processes import TrialProcess

SHOWS = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES'))"


def run(process: TrialProcess, code: str, folder: Path) -> int | None:
    return process.run([sys.executable, "-c", code], dict(os.environ), str(folder))


@pytest.mark.slow
def test_output_of_all_starts_is_in_the_log(tmp_path: Path) -> None:
    for code in (0, 3):
        assert run(TrialProcess(str(tmp_path), "7", None), f"print({code}); exit({code})", tmp_path) == code
    assert (tmp_path / "7.log").read_text() == "0\n3\n"


def test_trials_get_different_cores_and_this_thread_keeps_its_own(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    with (tmp_path / f".core-{allowed[0]}").open("w") as taken:
        # Another trial has it.
        fcntl.flock(taken, fcntl.LOCK_EX)
        run(TrialProcess(str(tmp_path), "1", 1), SHOWS, tmp_path)
    assert os.sched_getaffinity(0) == set(allowed)
    cores = allowed[1:2] or allowed
    assert (tmp_path / "1.log").read_text().startswith(str(cores))


def test_a_process_sees_the_gpus_that_ray_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    TrialProcess(str(tmp_path), "1", None).run([sys.executable, "-c", SHOWS], environment, str(tmp_path))
    assert (tmp_path / "1.log").read_text().strip().endswith("3,5")


def test_a_signal_reaches_the_process_and_one_that_has_not_begun_does_not_begin(tmp_path: Path) -> None:
    process = TrialProcess(str(tmp_path), "1", None)
    waits = "import pathlib, signal; pathlib.Path('ready').touch(); signal.pause()"
    codes: list[int | None] = []
    thread = threading.Thread(target=lambda: codes.append(run(process, waits, tmp_path)))
    thread.start()
    while not (tmp_path / "ready").exists():
        thread.join(0.05)
    process.stop(signal.SIGTERM)
    thread.join()
    assert codes == [-signal.SIGTERM]
    late = TrialProcess(str(tmp_path), "2", None)
    late.stop(signal.SIGTERM)
    assert run(late, "print('begun')", tmp_path) is None and (tmp_path / "2.log").read_text() == ""


@pytest.mark.slow
def test_a_signal_while_a_process_begins_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, begin = TrialProcess(str(tmp_path), "1", None), subprocess.Popen
    stops: list[threading.Thread] = []

    def begin_slowly(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        stops.append(threading.Thread(target=process.stop, args=(signal.SIGTERM,)))
        stops[0].start()
        # Without waiting for each other, the other thread would be through by now.
        stops[0].join(0.2)
        return begin(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", begin_slowly)
    assert run(process, "import signal; signal.sigwait([signal.SIGUSR1])", tmp_path) == -signal.SIGTERM
    stops[0].join()


def test_a_trial_waits_until_the_process_before_has_left_its_folder(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with (tmp_path / "1/.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(
            target=run, args=(TrialProcess(str(tmp_path), "1", None), "print('begun')", tmp_path)
        )
        thread.start()
        while not (tmp_path / "1.log").exists():
            thread.join(0.05)
        assert (tmp_path / "1.log").read_text() == "" and thread.is_alive()
        fcntl.flock(held, fcntl.LOCK_UN)
        thread.join()
    assert (tmp_path / "1.log").read_text() == "begun\n"
