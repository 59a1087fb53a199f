"""A server that the run starts from a command, and starts again when it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from torchrl_grpo.config.remote import PORT
from torchrl_grpo.runtime.rank_env import free_port

# Least time between two starts in seconds. A server that ends at once shall not keep the machine busy.
_PAUSE_S = 1.0
# Variables that the host of episodes sets for itself.
_OWN_VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS")


class StartedServer:
    """A server on a port of this machine. Its process ends with the host of the episodes.

    Args:
        command: words of the command, in which ``{port}`` stands for the port.

    Attributes:
        url: its address, which stays the same.
        process: process id of the one that was started last.
        has_ended: whether that process has ended.
    """

    def __init__(self, command: Sequence[str]) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._command = [word.replace(PORT, port) for word in command]
        self._environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        self._start()

    def _start(self) -> None:
        self.has_ended, self._started_at = False, time.monotonic()
        started = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
        )
        # The host reaps its children itself.
        started.returncode = 0
        self.process = started.pid

    def pause_s(self) -> float | None:
        """Return the seconds until it may be started again; None if it has not ended."""
        return max(0.0, self._started_at + _PAUSE_S - time.monotonic()) if self.has_ended else None

    def start_if_ended(self) -> None:
        """Start the server again if its process has ended, and the last start is some time ago."""
        if self.pause_s() == 0.0:
            sys.stderr.write(f"env.environment: {self._command[0]} has ended and is started again\n")
            try:
                self._start()
            except OSError as error:
                self.has_ended = True
                sys.stderr.write(f"env.environment: {self._command[0]} cannot be started: {error}\n")
