"""A server that the run starts from a command, and starts again when it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from torchrl_grpo.config.remote import PORT
from torchrl_grpo.runtime.rank_env import free_port

# A server that ends sooner, so many times in a row, is not started again before the next episode.
_SHORTEST_LIFE_S, _MOST_SHORT_LIVES = 5.0, 3
# Variables that the host of episodes sets for itself.
_OWN_VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS")


class StartedServer:
    """A server on a port of this machine. Its process ends with the host of the episodes.

    Args:
        command: words of the command, in which ``{port}`` stands for the port.

    Attributes:
        url: its address, which stays the same.
        process: process id of the one that was started last.
    """

    def __init__(self, command: Sequence[str]) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._command = [word.replace(PORT, port) for word in command]
        self._environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        self._ended = False
        self._short_lives = 0
        self._start()

    def _start(self) -> None:
        started = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
        )
        # The host reaps its children itself.
        started.returncode = 0
        self.process, self._started_at, self._ended = started.pid, time.monotonic(), False

    def has_ended(self) -> None:
        """Start the server again, because its process has ended."""
        self._ended = True
        is_short = time.monotonic() - self._started_at < _SHORTEST_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0
        if self._short_lives < _MOST_SHORT_LIVES:
            self.start_if_ended()

    def start_if_ended(self) -> None:
        """Start the server again if its process has ended."""
        if self._ended:
            sys.stderr.write(f"env.environment: {self._command[0]} has ended and is started again\n")
            try:
                self._start()
            except OSError as error:
                sys.stderr.write(f"env.environment: {self._command[0]} cannot be started: {error}\n")
