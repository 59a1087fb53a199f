"""Run Python code that a model wrote, in a process that can do no harm."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrl_grpo.envs.episodes.tools import scratch_folder
from torchrl_grpo.envs.episodes.tools.tool import Tool, make_schema
from torchrl_grpo.runtime.hardware import available_gib

_PROGRAM = Path(__file__).with_name("python_sandbox.py")
# Address space of the code of one call, and memory beside it: for its files, if they are in memory, and for
# the process that watches it.
_MAX_BYTES, _MORE_BYTES = 2**30, 2**27
# Share of the machine's free memory for the calls of this process.
_SHARE = 0.5
# Time after the limit in which the folder of the code is removed, and longest time for those that other runs
# have left, in seconds.
_CLEANING_S, _CLEANING_UP_S = 0.75, 1.0


class CodeFailed(Exception):
    """The code cannot be run, took too long, or wrote too much. The message is for the model."""


class NotRun(CodeFailed):
    """The code was not run, or not to its end, for no fault of its own."""


class _Memory:
    """Lets code run as long as a share of the machine's free memory suffices for all that runs."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, end: float | None, limit_s: float) -> Iterator[None]:
        """Wait for the memory of one call, and keep it.

        Args:
            end: time of the monotonic clock at which the wait ends; None to wait until there is memory.
            limit_s: seconds that the message names.

        Raises:
            NotRun: there was no memory in time.
        """
        with self._changed:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._changed.wait_for(self._has_room, left):
                raise NotRun(f"the memory was in use for {limit_s:g} s, and the code was not run")
            self._running += 1
            # There may be room for more than one.
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _has_room(self) -> bool:
        free = (available_gib() or 0.0) * 2**30
        return self._running == 0 or (self._running + 1) * (_MAX_BYTES + _MORE_BYTES) <= _SHARE * free


#: What the code of all tools of this process may take.
memory = _Memory()
# Processes that were not waited for to their end.
_unfinished: set[subprocess.Popen[bytes]] = set()


def run_python(code: str, limit_s: float) -> str:
    """Run code and return what it prints, errors included.

    The process of the code has no network, can start no processes, and can use no files but those of an empty
    folder of its own, which is removed afterwards, and Python's library. Only as much code runs at a time as
    the memory of the machine suffices for.

    Args:
        code: Python code.
        limit_s: time limit in seconds. The call returns less than a second later.

    Raises:
        CodeFailed: the code took too long, printed too much, or made too many files.
        OSError: the machine cannot start a process.
    """
    remove_abandoned()
    end = time.monotonic() + limit_s
    with memory.reserved(end, limit_s):
        output = run_program(_PROGRAM, code, limit_s, end, tempfile.gettempdir(), {"PATH": os.defpath})
    status, _, text = output.decode(errors="replace").partition("\n")
    if status != "done":
        raise CodeFailed(text or "the process that ran the code has ended")
    return text.strip()


def run_program(
    program: Path, code: str, limit_s: float, end: float, place: str, environment: Mapping[str, str]
) -> bytes:
    """Return the output of a program that runs code. Its memory is reserved already.

    Args:
        program: path of ``python_sandbox.py`` or of a program with the same arguments.
        code: code, its input.
        limit_s: time limit in seconds.
        end: time of the monotonic clock at which the code is ended.
        place: folder that the program gets.
        environment: its environment variables, beside those that all have.

    Raises:
        CodeFailed: it took too long.
        OSError: the machine cannot start a process.
    """
    arguments = [os.getpid(), place, end, limit_s, _MAX_BYTES]
    with tempfile.TemporaryFile() as file:
        file.write(code.encode(errors="replace"))
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(program), *map(str, arguments)],
            stdin=file,
            stdout=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout as stdout:
            output = _read(process.pid, stdout.fileno(), end + _CLEANING_S)
    finally:
        # One that removes a large folder goes on.
        _unfinished.add(process)
        _unfinished.difference_update([child for child in list(_unfinished) if child.poll() is not None])
    if output is None:
        raise CodeFailed(f"the code took longer than {limit_s:g} s and was ended")
    return output


def _read(pid: int, stdout: int, end: float) -> bytes | None:
    """Wait until a process has ended, or until the time ``end``, and return all that it has written.

    Returns:
        None if it may write more.
    """
    output = b""
    ended = os.pidfd_open(pid)
    try:
        poll, waiting = select.poll(), {ended, stdout}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting and (left := end - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * min(left, 3600)):
                chunk = os.read(stdout, 65_536) if descriptor == stdout else b""
                output += chunk
                if not chunk:
                    poll.unregister(descriptor)
                    waiting.remove(descriptor)
    finally:
        os.close(ended)
    return None if stdout in waiting else output


@lru_cache(1)
def remove_abandoned() -> None:
    """Remove what earlier runs have left that were killed, once."""
    scratch_folder.remove_abandoned(tempfile.gettempdir(), time.monotonic() + _CLEANING_UP_S)


@lru_cache(1)
def why_unavailable() -> str | None:
    """Say why this machine cannot run such code; None if it can. The answer is computed once."""
    try:
        output = run_python("print('ready')", 30.0)
    except (OSError, CodeFailed) as error:
        output = str(error)
    return None if output == "ready" else output or "the process ended without a word"


def _python(code: str) -> None:
    """Run Python code and return what it prints. It has no network and no files.

    Args:
        code: The code. Print what you want to see.
    """


def build() -> Tool:
    """Return the tool."""

    def run(arguments: Mapping[str, Any], limit_s: float) -> str:
        return run_python(str(arguments["code"]), limit_s)

    return Tool("python", "python", make_schema(_python, "python", "python"), run)
