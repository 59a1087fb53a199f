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
        PythonFailed: the code took too long or printed too much.
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
            output = _communicate(process, code, limit_s)
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


def _communicate(process: subprocess.Popen[bytes], code: str, limit_s: float) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    end = time.monotonic() + limit_s
    output, rest = b"", code.encode(errors="replace")
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise PythonFailed(f"the code took longer than {limit_s:g} s and was ended")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(process.stdin.fileno(), rest) :]
                    except BrokenPipeError:
                        rest = b""
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(process.stdout.fileno(), 65_536)
                output += chunk
                if len(output) > _MAX_OUTPUT:
                    raise PythonFailed(f"the code printed more than {_MAX_OUTPUT} bytes and was ended")
                if not chunk:
                    # The code may have closed its output and gone on.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, end - time.monotonic()))
                        return output
                    raise PythonFailed(f"the code took longer than {limit_s:g} s and was ended")


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
