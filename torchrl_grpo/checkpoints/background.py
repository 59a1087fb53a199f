"""Writes checkpoints in a thread while the run goes on.

Weights and optimizer state change only in the optimizer's update, so they are not copied on a CPU: the update
waits until they have been read. There is at most one write at a time. This module does not know what is
written; :mod:`~torchrl_grpo.checkpoints.checkpoint` does.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from torchrl_grpo.errors import first_line
from torchrl_grpo.runtime import screen
from torchrl_grpo.runtime.interrupts import Terminated

# By how much the thread's priority is lower. Of a busy core it gets a tenth, as an update may wait for it.
_NICENESS = 10


class BackgroundWriter:
    """Writes one checkpoint at a time, each in a thread. All methods are for the thread that trains."""

    def __init__(self) -> None:
        self._write: Future[None] | None = None
        self._step = 0
        self._has_read = threading.Event()
        self._has_read.set()

    def start(self, step: int, write: Callable[[Callable[[], None]], object]) -> None:
        """Begin a write, after the one before has ended.

        Args:
            step: step of the checkpoint, for messages.
            write: function that writes. It calls its argument once it no longer reads weights and optimizer
                state.

        Raises:
            Exception: the write before failed with it.
        """
        self.finish()
        result, has_read = Future[None](), threading.Event()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                try:
                    _yield_cores()
                    write(has_read.set)
                finally:
                    has_read.set()
            except BaseException as error:  # noqa: BLE001  raised in the thread that trains
                result.set_exception(error)
            else:
                result.set_result(None)

        # A daemon, so that a second interrupt ends the process, which leaves older checkpoints whole.
        thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        try:
            self._step, self._has_read, self._write = step, has_read, result
            thread.start()
        except BaseException:
            # An interrupt came. Nobody may wait for a thread that has not begun.
            if result.cancel():
                has_read.set()
                self._write = None
            raise

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

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the end of the write. Its error is for those who wait for what it wrote.

        Args:
            limit_s: seconds after which it is left alone; None for no limit.
        """
        if self._write is not None:
            futures.wait([self._write], limit_s)

    def close(self) -> None:
        """Wait for the end of a write that is still under way, as another error or an interrupt ends the run.

        An error of the write is printed only, so that it does not take the place of what ends the run.

        Raises:
            KeyboardInterrupt: an interrupt came during the wait. The process can end without the write.
        """
        write = self._write
        if write is None:
            return
        what = f"checkpoint of step {self._step}"
        try:
            if not write.done():
                screen.say(f"The {what} is still being written; interrupt again to end without it.")
            self.finish()
        except Exception as error:  # noqa: BLE001  of whatever kind, something else ends the run
            screen.say(f"warning: the {what} is not written: {first_line(error)}")
        except KeyboardInterrupt as interrupt:
            number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
            atexit.register(_end_without, write, 128 + number)
            raise


def _yield_cores() -> None:
    """Let this thread compute mostly while a core has nothing else to do."""
    # Elsewhere than on Linux, threads have no priority of their own.
    if sys.platform == "linux":
        thread = threading.get_native_id()
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)


def _end_without(write: Future[None], exit_code: int) -> None:
    """End the process here if a write is under way.

    Python would end the write's thread in the middle of a function of C++ or Rust, which aborts the process.
    """
    if not write.done():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
