"""The thread between trainer and workers.

It calls workers, has rewards computed in another thread, and replaces dead workers.

All bookkeeping happens in this one thread. The thread waits on one queue for replies of workers, for rewards
and for requests of the trainer. It does not poll. Timeouts only detect processes that do not respond.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torchrl_grpo.errors import UserError, WorkersLost, typed_first_line
from torchrl_grpo.inference.protocol import ProbeResult
from torchrl_grpo.inference.servers.weight_stream import TransferPostponed
from torchrl_grpo.rollout.groups import Group, ScoredGroup
from torchrl_grpo.rollout.workers.local_pool import TrainerThread
from torchrl_grpo.rollout.workers.scheduler import Call, LoadWeights, PublishedWeights, Scheduler, Task
from torchrl_grpo.rollout.workers.types import (
    Command,
    GenerateForEval,
    GenerateGroups,
    LoadWeightsCommand,
    Pool,
    ReferenceClient,
    TrainerWeights,
    WorkerDelivery,
    WorkerStats,
)

_T = TypeVar("_T")

# Loading a model and compiling an engine take minutes on a slow machine.
START_LIMIT_S = 900.0


class Dispatcher:
    """Runs a :class:`Scheduler` on a :class:`Pool`.

    Args:
        scheduler: scheduler that chooses the calls. Once the thread runs, only the thread may change it.
        pool: pool of workers.
        score_rewards: function that computes the rewards of whole groups.
        timeout_s: number of seconds after which a silent worker counts as dead. While a worker
            starts, the limit is :data:`START_LIMIT_S` if that is longer.
        max_restarts: number of workers that this process replaces before it fails. None if a worker cannot
            be replaced: its error is the run's.
        may_refill: whether the trainer may ask for a refill of the round that it got last. If so, groups that
            are too old for the next training round are kept until the trainer asks for that round. A refill
            belongs to the previous round, so it may use groups that are one round older.
        reference: client of the reference model in separate processes. None if the model is unused or the
            trainer holds it.
        trainer_thread: the trainer's thread, if it runs the worker and computes the rewards. These are then
            computed for a whole round at a time. None for workers elsewhere.
        make_scored: function that makes a finished group from its number and the version of the weights that
            were published last. If it is given, workers generate no groups.
        reward_threads: number of calls of ``score_rewards`` at a time, without ``trainer_thread``.
        groups_per_call: largest number of groups in such a call. Groups are taken together if more wait than
            there are threads without work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: Pool,
        *,
        score_rewards: Callable[[Sequence[Group]], Sequence[ScoredGroup]],
        timeout_s: float,
        max_restarts: int | None,
        may_refill: bool = False,
        reference: ReferenceClient | None = None,
        trainer_thread: TrainerThread | None = None,
        make_scored: Callable[[int, int], ScoredGroup] | None = None,
        reward_threads: int = 1,
        groups_per_call: int = 1,
    ) -> None:
        count = len(scheduler.workers)
        self.scheduler = scheduler
        self.stats = WorkerStats([0] * count, [0.0] * count)
        self.accepted: dict[int, ScoredGroup] = {}
        self.pool = pool
        self._score_rewards = score_rewards
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        # Replacements by this process. Those in ``stats`` are counted over all resumptions of the run.
        self._own_restarts = 0
        self._may_refill = may_refill
        self.reference = reference
        self._trainer_thread = trainer_thread
        self._make_scored = make_scored
        self._too_old: list[ScoredGroup] = []
        # Finished groups of a round that is scored at once.
        self._unscored: list[Group] = []
        self._starting: Future[None] | None = None
        # The newest weights if the pool has no copy of them; else None. Only the trainer's thread uses this.
        self._trainer_weights: TrainerWeights | None = None
        self._loads_ended: Future[None] | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rewards: Executor = trainer_thread or ThreadPoolExecutor(
            reward_threads, thread_name_prefix="rewards"
        )
        self._groups_per_call = groups_per_call
        # Groups that no thread has taken yet, one or a whole round at a time; the number of threads that have
        # none; and the lock for taking them.
        self._waiting: deque[Sequence[Group]] = deque()
        self._idle = reward_threads
        self._taking = threading.Lock()
        # By number of the group.
        self._references: dict[int, Future[Any]] = {}
        self._incarnations = [0] * count
        # By worker: deadline by the monotonic clock, and the number of seconds allowed.
        self._deadlines: dict[int, tuple[float, float]] = {}
        # No deadline is earlier than this.
        self._first_deadline = math.inf
        self._round_future: Future[list[ScoredGroup]] | None = None
        self._pending_futures: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Start the thread and every worker, and block until all workers can be called.

        Raises:
            WorkersLost: workers failed too often.
            UserError: a worker reported an error that the user can fix.
        """
        ready: Future[None] = self._new_future()
        self._inbox.put(lambda: self._start_all(ready))
        self._thread.start()
        ready.result()

    def run_in_thread(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` in the dispatcher's thread and return its result.

        If the thread has failed, ``function`` runs in the calling thread.

        Raises:
            Exception: whatever ``function`` raises.
        """
        future: Future[_T] = self._new_future()
        begun = False

        def run() -> None:
            nonlocal begun
            begun = True
            future.set_result(function())

        self._inbox.put(run)
        try:
            return future.result()
        except BaseException as error:
            if begun or error is not self._error:
                raise
            # The thread ends without running the function. Nothing else uses the tracker any more, so this
            # thread may access it, for example to save its state.
            self._thread.join()
            return function()

    def wait_for_round(self, is_refill: bool) -> list[ScoredGroup]:
        """Wait for the next round and return its groups in the order of their numbers.

        Args:
            is_refill: whether the round completes the previous one.

        Raises:
            WorkersLost: workers or reference processes failed too often.
            UserError: the dispatcher's thread has ended with another error, for example because a problem is
                too long.
        """
        if is_refill:
            # Stop counting the last round as trained: the next round completes it. run_in_thread does this
            # even if the dispatcher's thread has failed, so that a checkpoint saved afterwards has the right
            # counts. If this were done in _request_round instead, it would never happen after the thread has
            # failed.
            self.run_in_thread(self.scheduler.tracker.uncount_last_round)
        future: Future[list[ScoredGroup]] = self._new_future()
        self._inbox.put(lambda: self._request_round(future))
        self.serve_until(future)
        return future.result()

    def serve_until(self, until: Future[Any]) -> None:
        """Do in the trainer's thread what workers need of it, until a future is done.

        The trainer's thread calls this wherever it waits for workers. It runs the worker of its own process,
        or sends the newest weights to workers that ask for them. It returns at once if the weights were
        copied at their publication, for example to Ray's object store. Otherwise it sends the trainer's own
        weights. They are still those that were published last: such transports require a publication at
        the end of every round (``config/checks/schedule.py``).
        """
        if self._trainer_thread is not None:
            self._trainer_thread.run_until(until)
        if self._trainer_weights is None:
            return
        self._trainer_weights.open()
        self._set_loading_blocked(False)
        try:
            self._trainer_weights.send_until(until)
        finally:
            # The weights change from now on. Workers that start later wait for the next call of this method.
            self._set_loading_blocked(True)
            self._trainer_weights.postpone()

    def _set_loading_blocked(self, blocked: bool) -> None:
        def change() -> None:
            self.scheduler.loading_blocked = blocked

        self._inbox.put(change)

    def block_loading(self) -> None:
        """Let no worker begin to load weights before the next publication, and wait for loads under way.

        Workers with the newest weights go on generating.

        Raises:
            WorkersLost: workers failed too often.
        """
        ended: Future[None] = self._new_future()

        def block() -> None:
            self.scheduler.loading_blocked = True
            self._loads_ended = ended

        self._inbox.put(block)
        ended.result()

    def publish(self, delivery: WorkerDelivery, version: int) -> None:
        """Send weights to all workers without waiting for them."""

        def post() -> None:
            previous = self.scheduler.newest
            number = 0 if previous is None else previous.number + 1
            self.scheduler.publish(PublishedWeights(number, version, delivery))
            self.scheduler.loading_blocked = False
            if previous is not None:
                # No worker gets the older weights any more, so free their memory in the object store.
                previous.delivery.content = None
                previous.delivery.all_loaded_future.cancel()

        content = delivery.content
        self._trainer_weights = content if isinstance(content, TrainerWeights) else None
        self._watch(delivery.all_loaded_future)
        self._inbox.put(post)

    def run_tasks(self, commands: Sequence[GenerateForEval]) -> list[Any]:
        """Run command i on worker i with the newest weights, and wait for all results."""
        results: list[Future[Any]] = [self._new_future() for _ in commands]

        def post() -> None:
            for worker_index, (command, result) in enumerate(zip(commands, results, strict=True)):
                self.scheduler.add_task(worker_index, Task(command, result.set_result))

        self._inbox.put(post)
        for result in results:
            self.serve_until(result)
        return [result.result() for result in results]

    def close(self) -> None:
        """End the thread and the workers, and drop open calls."""

        def stop() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self._inbox.put(stop)
            self._thread.join()
        # Close the workers first, so that a hanging reward does not occupy their devices.
        self.pool.close()
        self._rewards.shutdown(cancel_futures=True)

    def _new_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._watch(future)
        return future

    def _watch(self, future: Future[Any]) -> None:
        """Fail this future if the thread ends with an error."""
        self._pending_futures.add(future)
        future.add_done_callback(self._pending_futures.discard)
        if self._error is not None:
            _fail(future, self._error)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._process_next_event()
            except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
                self._error = error
                for future in list(self._pending_futures):
                    _fail(future, error)
                return

    def _process_next_event(self) -> None:
        deadline = self._first_deadline
        if self.reference is not None:
            deadline = min(deadline, self.reference.deadline())
        try:
            wait = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            self._inbox.get(timeout=wait)()
        except queue.Empty:
            self._fail_timed_out()
        self._deliver_round()
        self._report_loads()
        for worker_index, call in self.scheduler.next_calls():
            self._send(worker_index, call)

    def _report_loads(self) -> None:
        """Let the trainer go on if the loads that it waits for have ended, or their workers were lost."""
        if self._loads_ended is not None and not self.scheduler.is_loading:
            ended, self._loads_ended = self._loads_ended, None
            ended.set_result(None)
        newest = self.scheduler.newest
        if newest is not None and self.scheduler.all_loaded:
            loaded = newest.delivery.all_loaded_future
            if not loaded.done():
                loaded.set_result(None)

    def _start_all(self, ready: Future[None]) -> None:
        self._starting = ready
        for worker_index in range(len(self.scheduler.workers)):
            self._start_worker(worker_index)

    def _start_worker(self, worker_index: int) -> None:
        self._incarnations[worker_index] += 1
        self._set_deadline(worker_index, max(START_LIMIT_S, self._timeout_s))
        self.pool.start(
            worker_index, self._make_callback(worker_index, lambda _: self._on_worker_started(worker_index))
        )

    def _set_deadline(self, worker_index: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._deadlines[worker_index] = until, seconds
        self._first_deadline = min(self._first_deadline, until)

    def _on_worker_started(self, worker_index: int) -> None:
        self.scheduler.on_worker_started(worker_index)
        if self._starting is not None and all(worker.ready for worker in self.scheduler.workers):
            self._starting.set_result(None)
            self._starting = None

    def _make_callback(self, worker_index: int, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a callback that passes a result to ``handle`` in the dispatcher's thread.

        The thread ignores the result if its worker has been replaced since.
        """
        incarnation = self._incarnations[worker_index]

        def receive(result: Any) -> None:
            if self._incarnations[worker_index] != incarnation:
                return
            del self._deadlines[worker_index]
            if isinstance(result, TransferPostponed):
                self.scheduler.on_load_postponed(worker_index)
            elif isinstance(result, BaseException):
                self._on_worker_failed(worker_index, result)
            else:
                handle(result)

        return lambda result: self._inbox.put(lambda: receive(result))

    def _send(self, worker_index: int, call: Call) -> None:
        command: Command
        if isinstance(call, LoadWeights):
            weights, delivery = call.weights, call.weights.delivery
            command = LoadWeightsCommand(
                delivery.content, weights.version, delivery.probe, call.return_interrupted
            )
            handle = self._make_callback(
                worker_index, lambda result: self._on_weights_loaded(worker_index, weights, result)
            )
        elif isinstance(call, GenerateGroups):
            command = call
            handle = self._make_callback(
                worker_index, lambda result: self._on_groups_generated(worker_index, result)
            )
        else:
            command = call
            handle = self._make_callback(
                worker_index, lambda result: self.scheduler.on_task_done(worker_index, result)
            )
        self._set_deadline(worker_index, self._timeout_s)
        self.pool.call(worker_index, command, handle)

    def _on_weights_loaded(
        self, worker_index: int, weights: PublishedWeights, result: tuple[ProbeResult, list[Group]]
    ) -> None:
        probe_result, interrupted = result
        self.scheduler.on_weights_loaded(worker_index, weights, interrupted)
        weights.delivery.results_queue.put(probe_result)

    def _on_groups_generated(self, worker_index: int, result: Any) -> None:
        self.stats.tokens[worker_index] += result.tokens
        self.stats.seconds[worker_index] += result.seconds
        finished = self.scheduler.on_groups_generated(worker_index, result.finished)
        if self._trainer_thread is None:
            for group in finished:
                self._compute_rewards([group])
            return
        # Rewards that work side by side have a round of work, and each call a whole round of responses.
        self._unscored += finished
        if self._unscored and len(self._unscored) == len(self.scheduler.tracker.running):
            groups, self._unscored = sorted(self._unscored, key=lambda group: group.group_id), []
            self._compute_rewards(groups)

    def _compute_rewards(self, groups: Sequence[Group]) -> None:
        if self.reference is not None:
            self._references |= {group.group_id: self.reference.log_probs(group) for group in groups}
        self._waiting.append(groups)
        # A call may take the groups of later ones, which then find nothing to do.
        self._rewards.submit(self._score_waiting).add_done_callback(
            lambda future: self._inbox.put(lambda: self._on_rewarded(*future.result()))
        )

    def _score_waiting(self) -> tuple[Sequence[ScoredGroup], float]:
        with self._taking:
            # Other threads without work get their part, so that a call that hangs holds up few groups.
            count = min(self._groups_per_call, -(-len(self._waiting) // self._idle))
            groups = [group for _ in range(count) for group in self._waiting.popleft()]
            self._idle -= 1
        start = time.perf_counter()
        try:
            return self._score_rewards(groups) if groups else [], time.perf_counter() - start
        finally:
            with self._taking:
                self._idle += 1

    def _on_rewarded(self, groups: Sequence[ScoredGroup], seconds: float) -> None:
        self.stats.score_seconds += seconds
        for scored in groups:
            if self.reference is None:
                self._accept(scored)
            else:
                reference = self._references.pop(scored.group.group_id)
                reference.add_done_callback(partial(self._on_reference_scored, scored))

    def _on_reference_scored(self, scored: ScoredGroup, reference: Future[Any]) -> None:
        self._inbox.put(lambda: self._accept(replace(scored, reference=reference.result())))

    def _accept(self, scored: ScoredGroup) -> None:
        group_id, oldest_version = scored.group.group_id, scored.group.oldest_version
        # A group dropped while it was scored is no longer in the tracker.
        if group_id not in self.scheduler.tracker.running:
            self._too_old.append(scored)
            return
        assert oldest_version is not None
        self.scheduler.tracker.accept(group_id, oldest_version)
        self.accepted[group_id] = scored

    def _request_round(self, future: Future[list[ScoredGroup]]) -> None:
        assert self.scheduler.newest is not None, "publish weights before the first round"
        self._round_future = future
        if self._make_scored is None:
            self.scheduler.round_requested = True
            return
        tracker, version = self.scheduler.tracker, self.scheduler.newest.version
        for _ in range(tracker.num_admissible(version)):
            self._accept(self._make_scored(tracker.register_group(), version))

    def _deliver_round(self) -> None:
        if self._round_future is None:
            return
        self._expire()
        chosen = self.scheduler.tracker.take()
        if chosen is None:
            return
        self.scheduler.round_requested = False
        future, self._round_future = self._round_future, None
        future.set_result([self.accepted.pop(group_id) for group_id in chosen])
        if not self._may_refill:
            # Groups that were recent enough for this round may be too old for the next one.
            self._expire()

    def _expire(self) -> None:
        gone = self.scheduler.expire()
        self._too_old += [self.accepted.pop(group_id) for group_id in gone if group_id in self.accepted]

    def take_too_old(self) -> list[ScoredGroup]:
        """Return the scored groups that were dropped since the last call; to be run in this thread."""
        taken, self._too_old = self._too_old, []
        return taken

    def _fail_timed_out(self) -> None:
        now = time.monotonic()
        if self.reference is not None:
            self.reference.restart_timed_out()
        for worker_index, (until, allowed) in list(self._deadlines.items()):
            if until <= now:
                del self._deadlines[worker_index]
                self._on_worker_failed(worker_index, TimeoutError(f"no answer within {allowed:g} s"))
        self._first_deadline = min((until for until, _ in self._deadlines.values()), default=math.inf)

    def _on_worker_failed(self, worker_index: int, error: BaseException) -> None:
        if self._max_restarts is None or (isinstance(error, UserError) and self._starting is not None):
            raise error
        self.pool.kill(worker_index)
        self.scheduler.on_worker_lost(worker_index)
        self.stats.restarts += 1
        self._own_restarts += 1
        if self._own_restarts > self._max_restarts:
            raise WorkersLost(
                f"rollout worker {worker_index} failed ({typed_first_line(error)}), and "
                f"collector.max_restarts={self._max_restarts} workers have been replaced already; fix the "
                "cause and resume with resume=auto (or start a new run if there is no checkpoint), or raise "
                "collector.max_restarts or collector.timeout_s"
            ) from error
        self._start_worker(worker_index)


def _fail(future: Future[Any], error: BaseException) -> None:
    """Set the exception of a future, unless another thread has completed it."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
