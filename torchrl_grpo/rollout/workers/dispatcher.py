"""The thread between trainer and workers: it calls workers, scores their groups and replaces dead workers.

All bookkeeping happens in this one thread. The thread waits on one queue for replies of workers, for scores
and for requests of the trainer. It polls nothing. The only timeouts are those of processes that do not
answer.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from torchrl_grpo.errors import UserError, WorkersLost
from torchrl_grpo.inference.protocol import ProbeResult
from torchrl_grpo.rollout.groups import Group, ScoredGroup
from torchrl_grpo.rollout.workers.scheduler import Call, Load, Scheduler, Task, Weights
from torchrl_grpo.rollout.workers.types import (
    Command,
    Generate,
    Pool,
    Publication,
    Reference,
    TakeWeights,
    Work,
    WorkerStats,
)

_T = TypeVar("_T")

# Loading a model and compiling an engine take minutes on a slow machine.
START_LIMIT_S = 900.0


class Dispatcher:
    """Runs a :class:`Scheduler` on a :class:`Pool`.

    Args:
        scheduler: scheduler that chooses the calls. Once the thread runs, only the thread may access it.
        pool: pool of workers.
        score: function that computes the rewards of a whole group.
        timeout_s: number of seconds after which a silent worker counts as dead. A start may take at least
            :data:`START_LIMIT_S`.
        max_restarts: number of workers that this process replaces before it fails.
        refills: whether a round may be taken again. Groups that are too late for the next round are then
            kept, because the current round may still need them.
        reference: reference model in separate processes; None if it is unused or the trainer holds it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: Pool,
        *,
        score: Callable[[Group], ScoredGroup],
        timeout_s: float,
        max_restarts: int,
        refills: bool = False,
        reference: Reference | None = None,
    ) -> None:
        count = len(scheduler.workers)
        self.scheduler = scheduler
        self.stats = WorkerStats([0] * count, [0.0] * count)
        self.accepted: dict[int, ScoredGroup] = {}
        self._pool = pool
        self._score = score
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._restarts = 0
        self._refills = refills
        self.reference = reference
        self._starting: Future[None] | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._lives = [0] * count
        # By worker: deadline by the monotonic clock, and the number of seconds allowed.
        self._deadlines: dict[int, tuple[float, float]] = {}
        self._taker: Future[list[ScoredGroup]] | None = None
        self._open: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Start the thread and every worker, and block until all workers can be called."""
        ready: Future[None] = self._promise()
        self._inbox.put(lambda: self._start_all(ready))
        self._thread.start()
        ready.result()

    def ask(self, question: Callable[[], _T]) -> _T:
        """Run ``question`` in the dispatcher's thread and return its result.

        If the thread has failed, ``question`` runs in the calling thread.

        Raises:
            WorkersLost: workers failed too often.
            UserError: a worker reported an error at the start that the user can fix.
        """
        answer: Future[_T] = self._promise()
        begun = False

        def run() -> None:
            nonlocal begun
            begun = True
            answer.set_result(question())

        self._inbox.put(run)
        try:
            return answer.result()
        except BaseException as error:
            if begun or error is not self._error:
                raise
            # The thread ends without running the question. Nothing else uses the tracker any more, so this
            # thread may access it, for example to save its state.
            self._thread.join()
            return question()

    def take(self, again: bool) -> list[ScoredGroup]:
        """Wait for the next round and return its groups in the order of their numbers.

        Args:
            again: whether this round replaces the one taken last.

        Raises:
            UserError: a worker failed, see :meth:`ask`.
        """
        if again:
            # Use a separate call, because the tracker must record it even if no worker is left.
            self.ask(self.scheduler.tracker.reopen)
        taken: Future[list[ScoredGroup]] = self._promise()
        self._inbox.put(lambda: self._want(taken))
        return taken.result()

    def publish(self, publication: Publication, version: int) -> None:
        """Send weights to all workers without waiting for them."""

        def post() -> None:
            before = self.scheduler.newest
            self.scheduler.publish(Weights(0 if before is None else before.number + 1, version, publication))
            if before is not None:
                # No worker gets the older weights any more, so free their memory in the object store.
                before.content.content = None
                before.content.arrived.cancel()

        self._watch(publication.arrived)
        self._inbox.put(post)

    def tasks(self, jobs: Sequence[Generate]) -> list[Any]:
        """Run job i on worker i with the newest weights, and wait for all results."""
        results: list[Future[Any]] = [self._promise() for _ in jobs]

        def post() -> None:
            for worker, job, result in zip(self.scheduler.workers, jobs, results, strict=False):
                worker.tasks.append(Task(job, result.set_result))

        self._inbox.put(post)
        return [result.result() for result in results]

    def close(self) -> None:
        """End the thread and the workers, and drop open calls."""

        def stop() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self._inbox.put(stop)
            self._thread.join()
        # Close the workers first, so that a hanging reward does not occupy their devices.
        self._pool.close()
        self._scorer.shutdown(cancel_futures=True)

    def _promise(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._watch(future)
        return future

    def _watch(self, future: Future[Any]) -> None:
        """Fail this future if the thread ends with an error."""
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._error is not None:
            _fail(future, self._error)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
                self._error = error
                for future in list(self._open):
                    _fail(future, error)
                return

    def _turn(self) -> None:
        deadline = math.inf if self.reference is None else self.reference.deadline()
        deadline = min(deadline, *(until for until, _ in self._deadlines.values()), math.inf)
        try:
            wait = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            self._inbox.get(timeout=wait)()
        except queue.Empty:
            self._give_up_on_silent()
        self._hand_out()
        for number in range(len(self.scheduler.workers)):
            call = self.scheduler.next_call(number)
            if call is not None:
                self._send(number, call)

    def _start_all(self, ready: Future[None]) -> None:
        self._starting = ready
        for number in range(len(self.scheduler.workers)):
            self._begin(number)

    def _begin(self, number: int) -> None:
        self._lives[number] += 1
        self._allow(number, max(START_LIMIT_S, self._timeout_s))
        self._pool.start(number, self._posting(number, lambda _: self._started(number)))

    def _allow(self, number: int, seconds: float) -> None:
        self._deadlines[number] = time.monotonic() + seconds, seconds

    def _started(self, number: int) -> None:
        self.scheduler.started(number)
        if self._starting is not None and all(worker.ready for worker in self.scheduler.workers):
            self._starting.set_result(None)
            self._starting = None

    def _posting(self, number: int, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a callback that passes a result to ``handle`` in the dispatcher's thread.

        The thread ignores the result if its worker has been replaced since.
        """
        life = self._lives[number]

        def receive(result: Any) -> None:
            if self._lives[number] != life:
                return
            del self._deadlines[number]
            if isinstance(result, BaseException):
                self._failed(number, result)
            else:
                handle(result)

        return lambda result: self._inbox.put(lambda: receive(result))

    def _send(self, number: int, call: Call) -> None:
        command: Command
        if isinstance(call, Load):
            weights, publication = call.weights, call.weights.content
            command = TakeWeights(publication.content, weights.version, publication.probe, call.give_back)
            handle = self._posting(number, lambda result: self._loaded(number, weights, result))
        elif isinstance(call, Work):
            command = call
            handle = self._posting(number, lambda turn: self._worked(number, turn))
        else:
            command = call
            handle = self._posting(number, lambda result: self.scheduler.ran_task(number, result))
        self._allow(number, self._timeout_s)
        self._pool.call(number, command, handle)

    def _loaded(self, number: int, weights: Weights, result: tuple[ProbeResult, list[Group]]) -> None:
        probe_result, cut = result
        self.scheduler.loaded(number, weights, cut)
        publication: Publication = weights.content
        publication.results_queue.put(probe_result)
        everywhere = all(worker.holds is weights for worker in self.scheduler.workers)
        if everywhere and not publication.arrived.done():
            publication.arrived.set_result(None)

    def _worked(self, number: int, turn: Any) -> None:
        self.stats.tokens[number] += turn.tokens
        self.stats.seconds[number] += turn.seconds
        for group in self.scheduler.worked(number, turn.finished):
            self._begin_to_score(group)

    def _begin_to_score(self, group: Group) -> None:
        asked: Future[Any] = Future()
        if self.reference is None:
            asked.set_result(None)
        else:
            asked = self.reference.score(group)
        rewarded = self._scorer.submit(self._timed_score, group)
        rewarded.add_done_callback(
            lambda done: self._inbox.put(lambda: self._rewarded(*done.result(), asked))
        )

    def _rewarded(self, scored: ScoredGroup, seconds: float, asked: Future[Any]) -> None:
        self.stats.score_seconds += seconds
        asked.add_done_callback(
            lambda done: self._inbox.put(lambda: self._accept(replace(scored, reference=done.result())))
        )

    def _timed_score(self, group: Group) -> tuple[ScoredGroup, float]:
        start = time.perf_counter()
        return self._score(group), time.perf_counter() - start

    def _accept(self, scored: ScoredGroup) -> None:
        number, oldest = scored.group.group_id, scored.group.oldest
        # A group dropped while it was scored is no longer in the tracker.
        if number in self.scheduler.tracker.running:
            assert oldest is not None
            self.scheduler.tracker.accept(number, oldest)
            self.accepted[number] = scored

    def _want(self, taken: Future[list[ScoredGroup]]) -> None:
        self._taker = taken
        self.scheduler.wanted = True

    def _hand_out(self) -> None:
        if self._taker is None:
            return
        self._expire()
        chosen = self.scheduler.tracker.take()
        if chosen is None:
            return
        self.scheduler.wanted = False
        taker, self._taker = self._taker, None
        taker.set_result([self.accepted.pop(number) for number in chosen])
        if not self._refills:
            # Groups that were recent enough for this round may be too old for the next one.
            self._expire()

    def _expire(self) -> None:
        for number in self.scheduler.expire():
            self.accepted.pop(number, None)

    def _give_up_on_silent(self) -> None:
        now = time.monotonic()
        if self.reference is not None:
            self.reference.give_up_on_silent()
        for number, (until, allowed) in list(self._deadlines.items()):
            if until <= now:
                del self._deadlines[number]
                self._failed(number, TimeoutError(f"no answer within {allowed:g} s"))

    def _failed(self, number: int, error: BaseException) -> None:
        if isinstance(error, UserError) and self._starting is not None:
            raise error
        self._pool.kill(number)
        self.scheduler.lost(number)
        self.stats.restarts += 1
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise WorkersLost(
                f"rollout worker {number} failed ({_first_line(error)}), and "
                f"collector.max_restarts={self._max_restarts} workers have been replaced already; fix the "
                "cause and go on with resume=auto (without a checkpoint start again), or raise "
                "collector.max_restarts or collector.timeout_s"
            ) from error
        self._begin(number)


def _fail(future: Future[Any], error: BaseException) -> None:
    """Set the exception of a future, unless another thread has completed it."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
