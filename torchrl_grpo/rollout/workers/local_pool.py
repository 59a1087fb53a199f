"""A pool of one worker, with an engine in the trainer's process, that runs in the trainer's own thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

from torch import Tensor

from torchrl_grpo.rollout.workers.types import Command
from torchrl_grpo.rollout.workers.worker import RolloutWorker


class TrainerThread(Executor):
    """Runs calls in the trainer's thread, while that thread waits for something else.

    Libraries keep settings for each thread, and a reward may use signals, which only the main thread can.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                # Outside of the block above: an interrupt may come while callbacks of the future run.
                future.set_result(result)

        self._calls.put(call)
        return future

    def run_until(self, until: Future[Any]) -> None:
        """Run calls in this thread until a future is done."""
        until.add_done_callback(lambda _: self._calls.put(lambda: None))
        while not until.done():
            self._calls.get()()


class LocalPool:
    """A :class:`~torchrl_grpo.rollout.workers.types.Pool` of one worker.

    Args:
        worker: the worker.
        thread: thread that runs its commands.
    """

    overwrites = False

    def __init__(self, worker: RolloutWorker, thread: TrainerThread) -> None:
        self.worker = worker
        self.thread = thread

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        """See :class:`~torchrl_grpo.rollout.workers.types.Pool`; the worker is there already."""
        done(None)

    def call(self, worker_index: int, command: Command, done: Callable[[Any], None]) -> None:
        result = self.thread.submit(self.worker.run, command)
        result.add_done_callback(lambda future: done(future.exception() or future.result()))

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        """Return the weights themselves, to be read once: the trainer waits until they are loaded."""
        return iter(weights)

    def kill(self, worker_index: int) -> None:
        """Do nothing: what fails in this process ends the run."""

    def close(self) -> None:
        """Close the engine."""
        self.worker.close()
