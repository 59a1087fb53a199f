"""Run Python code that a model wrote, in a process that can do no harm."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrl_grpo.envs.episodes.tools.tool import Tool, make_schema

_PROGRAM = Path(__file__).with_name("python_sandbox.py")
_MAX_BYTES = 2**30
# Output after this is not read, and the code is ended.
_MAX_OUTPUT = 2**16
# More in files ends the code. A limit of the kernel is for each file alone, so this is looked at.
_MAX_FOLDER = 2**26
_FOLDER_CHECK_S = 0.2


class PythonFailed(Exception):
    """The code cannot be run, took too long, or wrote too much. The message is for the model."""


def run_python(code: str, limit_s: float) -> str:
    """Run code and return what it prints, errors included.

    The process of the code has no network, can start no processes, and can use no files but those of an empty
    folder of its own, which is removed afterwards, and Python's library.

    Args:
        code: Python code.
        limit_s: time limit in seconds.

    Raises:
        PythonFailed: the code took too long, printed too much, or wrote too much.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-python-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_PROGRAM), folder, str(math.ceil(limit_s) + 1), str(_MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
                "LC_ALL": "C.UTF-8",
            },
            start_new_session=True,
        )
        try:
            output = _communicate(process, code, limit_s, Path(folder))
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
    text = output.decode(errors="replace").strip()
    if process.returncode < 0:
        return f"{text}\nthe code was ended by {signal.Signals(-process.returncode).name}".strip()
    return text


@lru_cache(1)
def why_unavailable() -> str | None:
    """Say why this machine cannot run such code; None if it can. The answer is computed once."""
    try:
        said = run_python("print('ready')", 30.0)
    except (OSError, PythonFailed) as error:
        said = str(error)
    return None if said == "ready" else said or "the process ended without a word"


def _communicate(process: subprocess.Popen[bytes], code: str, limit_s: float, folder: Path) -> bytes:
    """Give the code to the process, and return its output when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    end, next_check = time.monotonic() + limit_s, 0.0
    output, rest = b"", code.encode(errors="replace")
    os.set_blocking(process.stdin.fileno(), False)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        # The code may close its output and go on.
        selector.register(ended, selectors.EVENT_READ)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise PythonFailed(f"the code took longer than {limit_s:g} s and was ended")
            ready = selector.select(min(left, _FOLDER_CHECK_S))
            if time.monotonic() >= next_check:
                if _is_too_large(folder):
                    raise PythonFailed(f"the code wrote more than {_MAX_FOLDER} bytes of files and was ended")
                next_check = time.monotonic() + _FOLDER_CHECK_S
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(process.stdin.fileno(), rest) :]
                    except BrokenPipeError:
                        rest = b""
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif key.fileobj is ended:
                    selector.unregister(ended)
                else:
                    chunk = os.read(process.stdout.fileno(), 65_536)
                    output += chunk
                    if len(output) > _MAX_OUTPUT:
                        raise PythonFailed(f"the code printed more than {_MAX_OUTPUT} bytes and was ended")
                    if not chunk:
                        selector.unregister(process.stdout)
    process.wait()
    return output


def _is_too_large(folder: Path) -> bool:
    """Whether the files of a folder have too many bytes, counting 4 KiB for each file and folder.

    A folder that cannot be read counts as too large, because it may hold anything.
    """
    total = 0
    unreadable: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=unreadable.append):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                total += 4096 + os.lstat(os.path.join(place, name)).st_size
            if total > _MAX_FOLDER:
                return True
    return any(not isinstance(error, FileNotFoundError) for error in unreadable)


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
