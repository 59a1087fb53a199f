"""Which worker does what next: pure bookkeeping, without threads, clocks or Ray.

Each worker runs at most one call. A call that generates ends when a group has finished, or after half a
second. When a call returns or the trainer makes a request, :meth:`Scheduler.next_call` chooses what the
worker does next, in this order:

1. Load new weights. With ``weight_update="in_flight"``, loading is the worker's next call, and interrupts
   running groups between two tokens. With ``"drain"``, the worker first finishes its running groups and gets
   no new ones. ``partial_rollout=true`` (``return_interrupted`` below) always interrupts.
2. Generate the worker's share of an evaluation, if the trainer waits for one.
3. Generate groups. Groups that wait without a worker come first: interrupted by new weights, lost with a
   worker, or unfinished in a checkpoint. Then come new ones, as many as the ``StalenessTracker`` admits.
4. Nothing.

The dispatcher turns a :class:`LoadWeights` into the command ``LoadWeightsCommand``, which the worker runs.
``GenerateGroups`` and ``GenerateForEval`` are commands themselves.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.rollout.groups import Group
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import GenerateForEval, GenerateGroups


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the weights that was published to the workers.

    Attributes:
        number: number of the publication; later ones have larger numbers.
        version: number of optimizer steps that produced these weights.
        delivery: the weights on their way to the workers.
    """

    number: int
    version: int
    delivery: Any


@dataclass
class Task:
    """A command that one worker runs with the newest weights, while the trainer waits for its result.

    Attributes:
        command: command to run.
        deliver: function that takes the result.
    """

    command: GenerateForEval
    deliver: Callable[[Any], None]


@dataclass(frozen=True)
class LoadWeights:
    """Call: load new weights.

    Attributes:
        weights: the weights.
        return_interrupted: whether the worker returns interrupted groups to the scheduler.
    """

    weights: PublishedWeights
    return_interrupted: bool


Call = LoadWeights | GenerateGroups | GenerateForEval


@dataclass
class WorkerState:
    """The scheduler's record of one worker.

    Attributes:
        ready: whether the worker has started and can be called.
        loaded_weights: newest weights that it has loaded; None right after its start.
        running: its groups. On Ray they are in the state in which they were assigned. With servers they are
            the objects that the worker extends.
        dropped: ids of groups that the worker should stop generating.
        tasks: commands whose results the trainer waits for.
        call: current call; None if the worker is idle.
    """

    ready: bool = False
    loaded_weights: PublishedWeights | None = None
    running: dict[int, Group] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    tasks: deque[Task] = field(default_factory=deque)
    call: Call | None = None


class Scheduler:
    """Hands groups and weights to workers.

    Args:
        tracker: tracker that decides how many groups may start without becoming too old.
        num_workers: number of workers.
        new_group: function that makes a group without responses from its ``group_id``.
        wait_for_running: whether weights wait until a worker's groups have finished, as with ``drain``.
        return_interrupted: whether groups interrupted by new weights go back into the queue, so that any
            worker may continue them.

    Attributes:
        round_requested: whether the trainer waits for a round.
        loading_blocked: whether workers must not begin to load weights now. They must not while newer weights
            are about to be published, or while the weights that a worker would load are changing.
        may_run_ahead: whether new groups may also start while the trainer does not wait for a round. It is
            False until the weights have been verified at the start. It is always False with ``max_age=0``:
            results must then equal those of synchronous training, so the engine may hold only requests of the
            requested round. Other requests in its batch would change the rounding.
    """

    def __init__(
        self,
        tracker: StalenessTracker,
        num_workers: int,
        new_group: Callable[[int], Group],
        *,
        wait_for_running: bool,
        return_interrupted: bool,
    ) -> None:
        self.tracker = tracker
        self.workers = [WorkerState() for _ in range(num_workers)]
        self.round_requested = False
        self.may_run_ahead = False
        self.newest: PublishedWeights | None = None
        self.loading_blocked = False
        self._new_group = new_group
        self._wait_for_running = wait_for_running and not return_interrupted
        self._return_interrupted = return_interrupted
        # Groups of a round are spread evenly: a worker with more would make the others wait.
        self._max_groups_per_worker = -(-tracker.groups_per_round // num_workers)
        # Groups that were issued but have no worker now: interrupted by new weights, lost with a worker, or
        # unfinished in the checkpoint that the run was resumed from.
        self._queue: dict[int, Group] = {}
        # The same numbers as a heap, with some that are no longer in the queue.
        self._queue_order: list[int] = []
        # Tasks whose worker was lost or is not up. Any worker takes them.
        self._open_tasks: deque[Task] = deque()
        # Workers that load weights, and those that are up and have not loaded the newest ones.
        self._loading: set[int] = set()
        self._behind: set[int] = set()
        # Workers whose own state has changed since next_calls() looked at them, and what it saw then of the
        # state that all share.
        self._changed: set[int] = set()
        self._seen: tuple[object, ...] | None = None

    @property
    def is_loading(self) -> bool:
        """Whether a worker loads weights now."""
        return bool(self._loading)

    @property
    def all_loaded(self) -> bool:
        """Whether a worker is up, and every worker that is up has loaded the newest weights.

        Nobody waits for a worker that is starting again: it loads the newest weights before anything else.
        """
        return not self._behind and any(worker.ready for worker in self.workers)

    def next_calls(self) -> Iterator[tuple[int, Call]]:
        """Yield what workers do next, as :meth:`next_call` says, by their numbers.

        Workers that nothing has changed for are not looked at again. So an event costs the same however many
        workers there are.
        """
        changed, self._changed = self._changed, set()
        for worker_index in range(len(self.workers)) if self._shared() != self._seen else sorted(changed):
            call = self.next_call(worker_index)
            if call is not None:
                yield worker_index, call
        self._seen = self._shared()

    def _shared(self) -> tuple[object, ...]:
        """Return all that :meth:`next_call` depends on, but for the worker's own state."""
        return (
            self.newest,
            self.loading_blocked,
            self.round_requested,
            self.may_run_ahead,
            self.tracker.training_rounds,
            self.tracker.outstanding,
            len(self._queue),
            len(self._open_tasks),
        )

    def add_task(self, worker_index: int, task: Task) -> None:
        """Have a worker run a command with the newest weights; any worker, if this one is not up."""
        worker = self.workers[worker_index]
        (worker.tasks if worker.ready else self._open_tasks).append(task)
        self._changed.add(worker_index)

    def next_call(self, worker_index: int) -> Call | None:
        """What worker ``worker_index`` does next, None for nothing; the worker is marked as busy with it."""
        worker = self.workers[worker_index]
        if not worker.ready or worker.call is not None or self.newest is None:
            return None
        worker.call = self._choose(worker, self.newest)
        if isinstance(worker.call, LoadWeights):
            self._loading.add(worker_index)
        return worker.call

    def _end_call(self, worker_index: int) -> WorkerState:
        """Note that a worker's call has ended, and return the worker."""
        worker = self.workers[worker_index]
        worker.call = None
        self._loading.discard(worker_index)
        self._changed.add(worker_index)
        return worker

    def _enqueue(self, group: Group) -> None:
        self._queue[group.group_id] = group
        heapq.heappush(self._queue_order, group.group_id)

    def _dequeue(self) -> Group:
        """Return the group of the queue with the smallest number."""
        while (group_id := heapq.heappop(self._queue_order)) not in self._queue:
            pass
        return self._queue.pop(group_id)

    def _choose(self, worker: WorkerState, newest: PublishedWeights) -> Call | None:
        current = worker.loaded_weights is newest
        if not current and not (self._wait_for_running and worker.running):
            return None if self.loading_blocked else LoadWeights(newest, self._return_interrupted)
        if current and not worker.tasks and self._open_tasks:
            worker.tasks.append(self._open_tasks.popleft())
        if current and worker.tasks:
            return worker.tasks[0].command
        admitted = list(self._admit(worker)) if current else []
        if not (admitted or worker.running or worker.dropped):
            return None
        dropped, worker.dropped = worker.dropped, []
        return GenerateGroups(admitted, dropped)

    def _admit(self, worker: WorkerState) -> Iterator[Group]:
        assert worker.loaded_weights is not None
        version = worker.loaded_weights.version
        while len(worker.running) < self._max_groups_per_worker and (
            self.round_requested or self.may_run_ahead
        ):
            if self._queue:
                group = self._dequeue()
            elif self.tracker.num_admissible(version) > 0:
                group = self._new_group(self.tracker.register_group())
            else:
                return
            oldest_version = group.oldest_version
            self.tracker.start(group.group_id, version if oldest_version is None else oldest_version)
            worker.running[group.group_id] = group
            yield group

    def on_groups_generated(self, worker_index: int, finished: list[Group]) -> list[Group]:
        """Record the groups that a worker has finished; return those that were not dropped."""
        worker = self._end_call(worker_index)
        return [group for group in finished if worker.running.pop(group.group_id, None) is not None]

    def on_weights_loaded(
        self, worker_index: int, weights: PublishedWeights, interrupted: list[Group]
    ) -> None:
        """Record that worker ``worker_index`` has loaded ``weights`` and has returned ``interrupted``.

        Args:
            worker_index: the worker.
            weights: the weights that it holds now.
            interrupted: groups that the worker gave up; empty if it continues them.
        """
        worker = self._end_call(worker_index)
        worker.loaded_weights = weights
        if weights is self.newest:
            self._behind.discard(worker_index)
        for group in interrupted:
            if worker.running.pop(group.group_id, None) is not None:
                self._enqueue(group)

    def on_load_postponed(self, worker_index: int) -> None:
        """Record that the trainer did not send weights to worker ``worker_index`` for now.

        Once loading is not blocked, :meth:`next_call` tells the worker to load them again.
        """
        self._end_call(worker_index)

    def on_task_done(self, worker_index: int, result: Any) -> None:
        """Record the result of a task.

        None means that the worker has not finished it: the task stays queued and the worker is called again.
        """
        worker = self._end_call(worker_index)
        if result is None:
            return
        worker.tasks.popleft().deliver(result)

    def on_worker_lost(self, worker_index: int) -> None:
        """Record the loss of a worker.

        On Ray its groups begin again as they were assigned. With servers, finished responses are kept, and
        others go on from their last interruption, or from their first token if there was none.
        """
        worker = self._end_call(worker_index)
        self._behind.discard(worker_index)
        for group in worker.running.values():
            if group.oldest_version is None:
                self.tracker.restart(group.group_id)
            self._enqueue(group)
        # The trainer waits for them, and not for the next worker of this number.
        self._open_tasks += worker.tasks
        self.workers[worker_index] = WorkerState()

    def on_worker_started(self, worker_index: int) -> None:
        """Record that worker ``worker_index`` can be called."""
        self.workers[worker_index].ready = True
        self._behind.add(worker_index)
        self._changed.add(worker_index)

    def publish(self, weights: PublishedWeights) -> None:
        """Make ``weights`` those that every worker must hold."""
        self.newest = weights
        self._behind = {index for index, worker in enumerate(self.workers) if worker.ready}

    def expire(self) -> list[int]:
        """Drop groups that are too old for the next round, wherever they are; return their ids."""
        gone = self.tracker.expire()
        for group_id in gone:
            self._queue.pop(group_id, None)
            for worker_index, worker in enumerate(self.workers):
                if worker.running.pop(group_id, None) is not None:
                    worker.dropped.append(group_id)
                    self._changed.add(worker_index)
        return gone

    def reissue(self, group_ids: list[int]) -> None:
        """Start the unfinished groups of a checkpoint again, from their first token."""
        for group_id in group_ids:
            self._enqueue(self._new_group(group_id))
