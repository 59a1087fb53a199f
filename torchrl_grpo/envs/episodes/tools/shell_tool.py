"""Run command lines that a model wrote, in a folder of its episode and in processes that can do no harm."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrl_grpo.envs.episodes.tools import scratch_folder
from torchrl_grpo.envs.episodes.tools.python_tool import (
    CodeFailed,
    NotRun,
    memory,
    remove_abandoned,
    run_program,
)
from torchrl_grpo.envs.episodes.tools.tool import Tool, make_schema

NAME = "shell"
#: Folders of the system's programs.
PROGRAMS = ("/usr/local/bin", "/usr/bin", "/bin")
_VARIABLES = {
    "PATH": os.pathsep.join((*PROGRAMS, f"{sys.base_prefix}/bin")),
    # Its settings in /etc cannot be read.
    "GIT_CONFIG_NOSYSTEM": "1",
}
_PROGRAM = Path(__file__).with_name("shell_sandbox.py")


class ShellFolder:
    """The folder of an episode, in which command lines run. It is created with the first of them."""

    def __init__(self) -> None:
        # A command runs in one thread while another one closes the folder.
        self._lock = threading.Lock()
        self._path, self._descriptor, self._closed = "", -1, False

    def run(self, arguments: Mapping[str, Any], limit_s: float) -> str:
        """Run the command line of a call, and return what it prints, with its exit status if that is not 0.

        Raises:
            CodeFailed: it took too long, or took too much.
            OSError: the machine cannot start a process.
        """
        status, text = self.result(str(arguments["command"]), limit_s)
        return text if status == 0 else f"{text}\nexit status {status}".lstrip()

    def result(
        self,
        command: str,
        limit_s: float,
        variables: Mapping[str, str] | None = None,
        *,
        waits: bool = False,
    ) -> tuple[int, str]:
        """Run a command line.

        Args:
            command: command line.
            limit_s: time limit in seconds. The call returns less than a second later.
            variables: further environment variables.
            waits: whether the limit begins when there is memory, and the wait for it has no limit.

        Returns:
            Its exit status, negative for a signal, and what it has printed.

        Raises:
            CodeFailed: it took too long, or took too much.
            NotRun: there was no memory in time, the folder is closed, or somebody ended the process.
            OSError: the machine cannot start a process.
        """
        remove_abandoned()
        end = time.monotonic() + limit_s
        with self._lock, memory.reserved(None if waits else end, limit_s):
            if self._closed:
                raise NotRun("the episode has ended")
            if waits:
                end = time.monotonic() + limit_s
            if not self._path:
                self._path, self._descriptor = scratch_folder.create(tempfile.gettempdir())
            own = {"HOME": self._path, "TMPDIR": self._path}
            environment = {**_VARIABLES, **own, **(variables or {})}
            output = run_program(_PROGRAM, command, limit_s, end, self._path, environment)
        status, _, text = output.decode(errors="replace").partition("\n")
        name, _, number = status.partition(" ")
        if name == "failed":
            raise CodeFailed(text)
        if name != "done":
            raise NotRun("the process that ran the command has ended")
        return int(number), text.strip()

    def close(self) -> None:
        """Remove the folder, in another thread because it may take long. A command ends first."""
        self._closed = True
        threading.Thread(target=self._remove, name="shell-folder").start()

    def _remove(self) -> None:
        with self._lock:
            path, self._path = self._path, ""
            if path:
                scratch_folder.remove(path, self._descriptor)
                os.close(self._descriptor)


@lru_cache(1)
def why_unavailable() -> str | None:
    """Say why this machine cannot run such commands; None if it can. The answer is computed once."""
    folder = ShellFolder()
    try:
        output = folder.run({"command": "echo ready"}, 30.0)
    except (OSError, CodeFailed) as error:
        output = str(error)
    finally:
        folder.close()
    return None if output == "ready" else output or "the process ended without a word"


def _shell(command: str) -> None:
    """Run a command line with bash and return what it prints. It has no network. Files stay in its folder.

    Args:
        command: The command line.
    """


def build() -> Tool:
    """Return the tool."""
    return Tool(NAME, NAME, make_schema(_shell, NAME, NAME), None, start=ShellFolder)
