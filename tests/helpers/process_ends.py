"""Whether processes have ended, for tests of what a run leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# Much patience, for a busy machine.
_PATIENCE_S = 20


def alive(number: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def child_of(number: int) -> int:
    """Return the only child of a process: of a supervisor, the module's process."""
    (child,) = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return int(child)


def wait_for_end(*numbers: int) -> None:
    """Wait until processes have ended."""
    end = time.monotonic() + _PATIENCE_S
    while any(alive(number) for number in numbers):
        assert time.monotonic() < end, "a process is left"
        os.sched_yield()


def processes_with(word: str) -> set[int]:
    """Return the process ids of the programs that have a word in their command."""
    return {
        process.pid for process in psutil.process_iter(["cmdline"]) if word in (process.info["cmdline"] or ())
    }


def error_in_time(job: Callable[[], Any]) -> Exception | None:
    """Return the error of a call that has a limit of a fraction of a second, or none; fail if it hangs."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    assert not thread.is_alive(), "a call hangs"
    return errors[0] if errors else None
