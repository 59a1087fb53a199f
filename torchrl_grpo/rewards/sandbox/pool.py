"""Call functions in worker processes with an enforced time limit, from any thread.

Some scorers (math_verify, several of reasoning_gym) pass a model's text to sympy, which may never return.
Their own time limits use signals, which work in the main thread only. Here the caller waits on a socket.
After the time limit the worker is killed and replaced by a new one. Workers exchange JSON lines with this
process. Nothing is forked here, because this process may use CUDA and threads, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.sandbox.worker import Isolation
from torchrl_grpo.runtime import hardware, sandbox
from torchrl_grpo.runtime.json_channel import (
    ChannelBroken,
    ChannelClosed,
    ChannelTimeout,
    JsonChannel,
    RemoteError,
    RemoteTimeout,
)
from torchrl_grpo.runtime.supervised import SupervisedProcess

if TYPE_CHECKING:
    # Which workers would import, too.
    from torchrl_grpo.config.schema import RewardConfig

#: Time limit for the start of a worker. It imports sympy and more, which is slow on a small, busy machine.
START_LIMIT_S = 180.0
# Seconds after its time limit in which an isolated worker ends the call itself.
_GRACE_S = 0.3
# Environment variables without secrets that libraries may need to be imported. An isolated worker gets these.
_PASSED = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MPLCONFIGDIR", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
    "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "SYSTEMROOT", "TMPDIR",
)  # fmt: skip


def reward_isolation(cfg: RewardConfig, name: str) -> Isolation:
    """Return where a reward runs that may evaluate what a model wrote.

    Args:
        cfg: configuration; ``sandbox`` is read.
        name: name of the reward, for messages.

    Raises:
        ConfigError: the reward must run in the sandbox, and this machine has none.
    """
    if not cfg.sandbox:
        return Isolation.process
    if (why := sandbox.why_unavailable()) is not None:
        raise ConfigError(
            f"reward.sandbox=true: the reward {name} may evaluate what the model writes, and this machine "
            f"cannot run it safely: {why}; use another reward, or write reward.sandbox=false (--no-sandbox "
            "for stored completions) to let such text do whatever your user may do"
        )
    return Isolation.sandbox


# Memory of a worker that has imported little; math_verify and reasoning_gym take more.
_WORKER_GIB = 0.05


class JobError(Exception):
    """The function raised in the worker, or the worker died.

    Args:
        message: what went wrong.
        worker_usable: whether the worker can take the next call.
    """

    def __init__(self, message: str, worker_usable: bool = False) -> None:
        super().__init__(message)
        self.worker_usable = worker_usable


class JobFailed(JobError):
    """The function raised, and its worker is still usable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, worker_usable=True)


class JobTimeout(JobError):
    """The function did not return in time; its process was killed."""


class _Worker:
    """One child process; used by one thread at a time."""

    def __init__(
        self,
        target: str,
        timeout_s: float,
        *,
        label: str,
        setup: Any,
        setup_limit_s: float,
        max_bytes: int | None,
        isolation: Isolation,
        gpu: int | None,
    ) -> None:
        self._label, self._timeout_s = label, timeout_s
        self._setup, self._setup_limit_s = setup, setup_limit_s
        self._grace_s = 0.0 if isolation is Isolation.none else _GRACE_S
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._supervised = SupervisedProcess(
            "torchrl_grpo.rewards.sandbox.worker",
            [target, isolation, str(max_bytes or 0)],
            None if isolation is Isolation.none else passed,
            gpu,
        )
        self._process = self._supervised.process
        self._channel = JsonChannel(self._supervised.socket.fileno())
        self._ready = False
        self._stopping = threading.Lock()

    def call(self, payload: Any) -> Any:
        self.start_up()
        with self._as_job_errors(self._timeout_s):
            return self._channel.ask({"job": payload}, self._timeout_s, self._grace_s)

    def start_up(self) -> None:
        """Wait until the worker has started."""
        if self._ready:
            return
        try:
            with self._as_job_errors(START_LIMIT_S):
                self._channel.wait_until_ready(START_LIMIT_S)
            if self._setup is not None:
                with self._as_job_errors(self._setup_limit_s):
                    self._channel.ask({"setup": self._setup}, self._setup_limit_s)
        except JobFailed as error:
            # Not a JobFailed: this worker cannot be used.
            raise JobError(f"the worker process of {self._label} cannot start: {error}") from error
        self._ready = True

    @contextlib.contextmanager
    def _as_job_errors(self, limit_s: float) -> Iterator[None]:
        """Turn errors of the channel into those of a job."""
        late = f"{self._label} did not answer within {limit_s:g} s; its process was killed"
        try:
            yield
        except RemoteError as error:
            raise JobFailed(str(error)) from error
        except RemoteTimeout as error:
            raise JobTimeout(late, worker_usable=True) from error
        except ChannelTimeout as error:
            raise JobTimeout(late) from error
        except ChannelBroken as error:
            raise JobError(f"the worker process of {self._label} was killed, because {error}") from error
        except ChannelClosed as error:
            code = self.stop()
            known = "not known yet" if code is None else str(code)
            raise JobError(
                f"the worker process of {self._label} exited unexpectedly (exit code {known})"
            ) from error

    def begin_to_stop(self) -> None:
        self._supervised.begin_to_end()

    def stop(self) -> int | None:
        with self._stopping:
            # The socket stays open, because another thread may wait on it. It wakes when the process is gone.
            return self._supervised.end()


def _check_memory(workers: int) -> None:
    """Refuse more workers than the memory has room for, before they end whatever else runs here.

    Raises:
        ConfigError: there are too many.
    """
    room = hardware.available_gib()
    if room is not None and workers > 1 and workers * _WORKER_GIB > room:
        raise ConfigError(
            f"reward.workers={workers}: so many processes need about {workers * _WORKER_GIB:.0f} GiB, and "
            f"{room:.1f} GiB are free; write reward.workers={max(1, int(room / 2 / _WORKER_GIB))}, or let a "
            "function take several prompts in a call with its attribute prompts_per_call"
        )


class WorkerPool:
    """A fixed number of workers for one function.

    Args:
        target: ``"module:function"``, importable in a new process.
        size: number of workers. They start immediately, and restart after a kill.
        timeout_s: time limit of one call in seconds.
        setup: JSON-serializable argument of the function ``prepare`` of the same module, which each worker
            calls once. None calls nothing.
        setup_limit_s: time limit of this call in seconds.
        label: name of the function in messages; ``target`` by default.
        max_bytes: limit of a worker's address space, so that a runaway expression ends in a MemoryError of
            the worker; None for no limit.
        isolation: where a worker runs the function.
        gpu: number of the GPU that the workers see, among those of this process; None for none.
    """

    def __init__(
        self,
        target: str,
        size: int,
        timeout_s: float,
        *,
        label: str | None = None,
        setup: Any = None,
        setup_limit_s: float = START_LIMIT_S,
        max_bytes: int | None = 4 * 2**30,
        isolation: Isolation = Isolation.none,
        gpu: int | None = None,
    ) -> None:
        self._label = label or target
        self._make = partial(
            _Worker,
            target,
            timeout_s,
            label=self._label,
            setup=setup,
            setup_limit_s=setup_limit_s,
            max_bytes=max_bytes,
            isolation=isolation,
            gpu=gpu,
        )
        _check_memory(size)
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
        """Wait until one of the workers has started. If it cannot, the pool is closed.

        Raises:
            JobError: it cannot start.
        """
        try:
            self._use(_Worker.start_up)
        except BaseException:
            self.close()
            raise

    def _use(self, run: Callable[[_Worker], Any]) -> Any:
        worker = self._idle.get()
        try:
            if worker is None or self._closed:
                raise JobError(f"the workers of {self._label} are closed")
            return run(worker)
        except BaseException as error:  # also KeyboardInterrupt, so that no worker is left with a job
            if worker is not None and not (isinstance(error, JobError) and error.worker_usable):
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
            worker.begin_to_stop()
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
