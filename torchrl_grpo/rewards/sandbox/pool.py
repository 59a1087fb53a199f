"""Functions called in worker processes, with a time limit that holds, from any thread.

Some scorers (math_verify, several of reasoning_gym's) hand a model's text to sympy, which may think for
ever. Their own limits are signals, which work in a main thread only. Here the caller waits on a pipe; when
the time is over the worker is killed and the next call starts a fresh one. Workers are plain child processes
that speak JSON lines: nothing is forked (the parent may hold CUDA and threads) and nothing is pickled.
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

#: A worker imports sympy and friends before it is ready; on a busy small machine that is not quick.
START_LIMIT_S = 180.0
#: -P: the working directory is not searched for modules unless the parent does so too.
_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "torchrl_grpo.rewards.sandbox.worker")


class JobError(Exception):
    """The function raised in the worker, or the worker died."""


class JobTimeout(JobError):
    """The function did not return in time; its worker was killed."""


class _Worker:
    """One child process; used by one thread at a time."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self._target, self._timeout_s = target, timeout_s
        # What the parent can import the child can too, wherever the parent found it.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [*_COMMAND, target, str(timeout_s + 5.0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # nothing is left to be flushed into a pipe whose reader was killed
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._ready = False

    def call(self, payload: Any) -> Any:
        if not self._ready:
            self._start_up()
        rest = json.dumps({"payload": payload}).encode() + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._stdin.fileno(), rest) :]
        except BrokenPipeError as error:
            raise self._died() from error
        return self._reply(self._timeout_s)

    def _start_up(self) -> None:
        reply = json.loads(self._read_line(START_LIMIT_S))
        if "error" in reply:
            raise JobError(f"the worker process of {self._target} cannot start: {reply['error']}")
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
                        f"{self._target} did not answer within {limit_s:g} s; its process was ended"
                    )
                chunk = os.read(self._stdout.fileno(), 65_536)
                if not chunk:
                    raise self._died()
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> JobError:
        return JobError(
            f"the worker process of {self._target} ended by itself (exit code {self._process.wait()})"
        )

    def stop(self) -> None:
        self._process.kill()
        # The pipes stay open: another thread may be waiting on one, and wakes at its end.
        self._process.wait()


class JobFailed(JobError):
    """The function raised; its worker is sound."""


class WorkerPool:
    """A fixed number of workers for one function.

    Args:
        target: ``"module:function"``, importable in a fresh process.
        size: number of workers. They start at once, and again after a kill.
        timeout_s: seconds one call may take.
    """

    def __init__(self, target: str, size: int, timeout_s: float) -> None:
        self._target, self._timeout_s = target, timeout_s
        self._closed = False
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        # None stands for a worker that was closed.
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(self._start())

    def call(self, payload: Any) -> Any:
        """Run the function in a worker; waits for a free one. Safe from any thread.

        Args:
            payload: the function's one argument; JSON-serializable.

        Returns:
            What the function returned, after JSON.

        Raises:
            JobTimeout: it took longer than ``timeout_s``.
            JobError: it raised, or its process died; the message says what.
        """
        worker = self._idle.get()
        try:
            if worker is None or self._closed:
                raise JobError(f"the workers of {self._target} are closed")
            return worker.call(payload)
        except JobFailed:
            raise
        except BaseException:  # also KeyboardInterrupt: a late reply must not meet the next question
            if worker is not None:
                self._stop(worker)
                # Its successor gets ready while others work; there is none after close().
                worker = self._start()
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; calls under way end in a JobError. It may be called twice."""
        with self._lock:
            self._closed = True
            workers, self._all = self._all, set()
        for worker in workers:
            worker.stop()

    def _start(self) -> _Worker | None:
        with self._lock:
            if self._closed:
                return None
            worker = _Worker(self._target, self._timeout_s)
            self._all.add(worker)
            return worker

    def _stop(self, worker: _Worker) -> None:
        with self._lock:
            known = worker in self._all
            self._all.discard(worker)
        if known:
            worker.stop()
