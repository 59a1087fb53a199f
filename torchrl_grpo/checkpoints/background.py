"""Writes checkpoints in a thread while the run goes on.

Weights and optimizer state change only in the optimizer's update, so they are not copied on a CPU: the update
waits until they have been read. There is at most one write at a time. This module does not know what is
written; :mod:`~torchrl_grpo.checkpoints.checkpoint` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """A thread that writes one checkpoint at a time. All methods are for the thread that trains."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write: Future[None] | None = None
        self._has_read = threading.Event()
        self._has_read.set()

    def start(self, write: Callable[[Callable[[], None]], object]) -> None:
        """Begin a write, after the one before has ended.

        Args:
            write: function that writes. It calls its argument once it no longer reads weights and optimizer
                state.

        Raises:
            Exception: the write before failed with it.
        """
        self.finish()
        self._has_read.clear()

        def run() -> None:
            try:
                write(self._has_read.set)
            finally:
                self._has_read.set()

        self._write = self._thread.submit(run)

    def wait_until_read(self) -> None:
        """Wait until weights and optimizer state may change. If the write failed, they may too."""
        self._has_read.wait()

    def check(self) -> None:
        """Do nothing while a write is under way.

        Raises:
            Exception: the last write failed with it, which is raised once.
        """
        if self._write is not None and self._write.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the end of the write.

        Raises:
            Exception: it failed with it, which is raised once.
        """
        if self._write is not None:
            # An interrupt during the wait leaves the write to the next call.
            error = self._write.exception()
            self._write = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for the end of the write, and end the thread.

        Raises:
            Exception: the write failed with it.
        """
        try:
            self.finish()
        finally:
            self._thread.shutdown(wait=False)
