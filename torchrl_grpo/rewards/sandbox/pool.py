"""Call functions in worker processes with an enforced time limit, from any thread.

Some scorers (math_verify, several of reasoning_gym) pass a model's text to sympy, which may never return.
Their own time limits use signals, which work in the main thread only. Here the caller waits on a pipe. After
the time limit the worker is killed and replaced by a new one. Workers are plain child processes that exchange
JSON lines. Nothing is forked, because the parent may use CUDA and threads, and nothing is pickled.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from typing import Any

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

    def __init__(self, target: str, timeout_s: float, setup: Any, max_bytes: int | None) -> None:
        self._target, self._timeout_s, self._setup = target, timeout_s, setup
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
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._ready = False

    def call(self, payload: Any) -> Any:
        if not self._ready:
            self._start_up()
        return self._ask(payload, self._timeout_s)

    def _ask(self, payload: Any, limit_s: float) -> Any:
        # The worker's own limit is for the case that the parent is gone.
        # Columns of a table may hold dates and the like.
        request = json.dumps({"payload": payload, "limit_s": limit_s + 5.0}, default=str)
        rest = request.encode() + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._stdin.fileno(), rest) :]
        except BrokenPipeError as error:
            raise self._died() from error
        return self._reply(limit_s)

    def _start_up(self) -> None:
        reply = json.loads(self._read_line(START_LIMIT_S))
        if "error" in reply:
            raise JobError(f"the worker process of {self._target} cannot start: {reply['error']}")
        if self._setup is not None:
            self._ask(self._setup, START_LIMIT_S)
        self._ready = True

    def _reply(self, limit_s: float) -> Any:
        reply = json.loads(self._read_line(limit_s))
        if "error" in reply:
            raise JobFailed(reply["error"])
        return reply["value"]

    def _read_line(self, limit_s: float) -> bytes:
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise JobTimeout(
                        f"{self._target} did not answer within {limit_s:g} s; its process was killed"
                    )
                chunk = os.read(self._stdout.fileno(), 65_536)
                if not chunk:
                    raise self._died()
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> JobError:
        return JobError(
            f"the worker process of {self._target} exited unexpectedly (exit code {self._process.wait()})"
        )

    def stop(self) -> None:
        self._process.kill()
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
        max_bytes: limit of a worker's address space, so that a runaway expression ends in a MemoryError of
            the worker; None for no limit.
    """

    def __init__(
        self,
        target: str,
        size: int,
        timeout_s: float,
        *,
        setup: Any = None,
        max_bytes: int | None = 4 * 2**30,
    ) -> None:
        self._target, self._timeout_s, self._setup, self._max_bytes = target, timeout_s, setup, max_bytes
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
        worker = self._idle.get()
        try:
            if worker is None or self._closed:
                raise JobError(f"the workers of {self._target} are closed")
            return worker.call(payload)
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
            worker = _Worker(self._target, self._timeout_s, self._setup, self._max_bytes)
            self._all.add(worker)
            return worker

    def _stop(self, worker: _Worker) -> None:
        with self._lock:
            known = worker in self._all
            self._all.discard(worker)
        if known:
            worker.stop()
