"""Call functions in worker processes with an enforced time limit, from any thread.

Some scorers (math_verify, several of reasoning_gym) pass a model's text to sympy, which may never return.
Their own time limits use signals, which work in the main thread only. Here the caller waits on a pipe. After
the time limit the worker is killed and replaced by a new one. Workers are plain child processes that exchange
JSON lines. Nothing is forked, because the parent may use CUDA and threads, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchrl_grpo.runtime.json_channel import ChannelClosed, ChannelTimeout, JsonChannel, RemoteError

#: Time limit for the start of a worker. It imports sympy and more, which is slow on a small, busy machine.
START_LIMIT_S = 180.0
#: -P keeps the working directory out of the module search path, unless it is on the parent's.
_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "torchrl_grpo.rewards.sandbox.worker")


class JobError(Exception):
    """The function raised in the worker, or the worker died."""


class JobTimeout(JobError):
    """The function did not return in time; its worker was killed."""


class _Worker:
    """One child process; used by one thread at a time."""

    def __init__(
        self, target: str, timeout_s: float, *, label: str, setup: Any, max_bytes: int | None
    ) -> None:
        self._label, self._timeout_s, self._setup = label, timeout_s, setup
        # The child must be able to import everything that the parent can.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [*_COMMAND, target, str(max_bytes or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # no buffered data remains for a pipe whose reader was killed
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # only the parent handles Ctrl-C
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = JsonChannel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._ready = False
        self._stopping = threading.Lock()

    def call(self, payload: Any) -> Any:
        self.start_up()
        return self._ask(payload, self._timeout_s)

    def _ask(self, payload: Any, limit_s: float) -> Any:
        with self._told(limit_s):
            return self._channel.ask(payload, limit_s)

    def start_up(self) -> None:
        """Wait until the worker has started."""
        if self._ready:
            return
        try:
            with self._told(START_LIMIT_S):
                self._channel.answer(START_LIMIT_S)
                if self._setup is not None:
                    self._channel.ask(self._setup, START_LIMIT_S)
        except JobFailed as error:
            # Not a JobFailed: this worker cannot be used.
            raise JobError(f"the worker process of {self._label} cannot start: {error}") from error
        self._ready = True

    @contextlib.contextmanager
    def _told(self, limit_s: float) -> Iterator[None]:
        """Turn errors of the channel into those of a job."""
        try:
            yield
        except RemoteError as error:
            raise JobFailed(str(error)) from error
        except ChannelTimeout as error:
            raise JobTimeout(
                f"{self._label} did not answer within {limit_s:g} s; its process was killed"
            ) from error
        except ChannelClosed as error:
            raise self._died() from error

    def _died(self) -> JobError:
        self.stop()
        return JobError(
            f"the worker process of {self._label} exited unexpectedly (exit code {self._process.returncode})"
        )

    def stop(self) -> None:
        with self._stopping:
            # The whole process group, because a job may have started processes. Before wait(), after which
            # the group's number may be another's.
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            # The pipes stay open, because another thread may wait on one. It wakes when the process is gone.
            self._process.wait()


class JobFailed(JobError):
    """The function raised, and its worker is still usable."""


class WorkerPool:
    """A fixed number of workers for one function.

    Args:
        target: ``"module:function"``, importable in a new process.
        size: number of workers. They start immediately, and restart after a kill.
        timeout_s: time limit of one call in seconds.
        setup: JSON-serializable argument of a first call in each worker, which has the time limit of a start.
        label: name of the function in messages; ``target`` by default.
        max_bytes: limit of a worker's address space, so that a runaway expression ends in a MemoryError of
            the worker; None for no limit.
    """

    def __init__(
        self,
        target: str,
        size: int,
        timeout_s: float,
        *,
        label: str | None = None,
        setup: Any = None,
        max_bytes: int | None = 4 * 2**30,
    ) -> None:
        self._label = label or target
        self._make = partial(_Worker, target, timeout_s, label=self._label, setup=setup, max_bytes=max_bytes)
        self._closed = False
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        # None represents a closed worker.
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(self._start())

    def call(self, payload: Any) -> Any:
        """Wait for a free worker and run the function in it. This method is thread-safe.

        Args:
            payload: JSON-serializable argument of the function.

        Returns:
            The function's result, converted to JSON and back.

        Raises:
            JobTimeout: the call took longer than ``timeout_s``.
            JobError: the function raised, its process died, or the pool is closed.
        """
        return self._use(lambda worker: worker.call(payload))

    def wait_until_started(self) -> None:
        """Wait until one of the workers has started.

        Raises:
            JobError: it cannot start.
        """
        self._use(_Worker.start_up)

    def _use(self, run: Callable[[_Worker], Any]) -> Any:
        worker = self._idle.get()
        try:
            if worker is None or self._closed:
                raise JobError(f"the workers of {self._label} are closed")
            return run(worker)
        except JobFailed:
            raise
        except BaseException:  # also KeyboardInterrupt, so that no late reply is taken for the next call's
            if worker is not None:
                self._stop(worker)
                # The new worker starts while others work. After close() none starts.
                worker = self._start()
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all workers. Calls in progress raise a JobError. It may be called twice."""
        with self._lock:
            self._closed = True
            workers, self._all = self._all, set()
        for worker in workers:
            worker.stop()

    def _start(self) -> _Worker | None:
        with self._lock:
            if self._closed:
                return None
            worker = self._make()
            self._all.add(worker)
            return worker

    def _stop(self, worker: _Worker) -> None:
        with self._lock:
            known = worker in self._all
            self._all.discard(worker)
        if known:
            worker.stop()
