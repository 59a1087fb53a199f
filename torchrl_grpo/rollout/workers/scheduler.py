"""Which worker does what next: pure bookkeeping, without threads, clocks or Ray.

Each worker has one call under way at most. When a call comes back, or the trainer has asked for something,
:meth:`Scheduler.next_call` says what the worker does next:

1. new weights, as soon as it may take them: at once with ``weight_update="in_flight"`` or with partial
   rollouts; once its running groups have finished with ``"drain"``, and meanwhile it gets no new ones;
2. what the trainer waits for: a probe, or a share of an evaluation;
3. groups: interrupted or reissued ones first, then new ones while the tracker has room for its weights;
4. nothing.

A call to take new weights is a :class:`Load` here. The dispatcher turns it into the command ``TakeWeights``,
which the worker runs. ``Work`` and ``Generate`` are the same in both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.rollout.groups import Group, Response
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import Generate, Work


@dataclass(frozen=True)
class Weights:
    """Weights that workers are to take.

    Attributes:
        number: number of the publication; later ones have larger numbers.
        version: number of optimizer steps that produced these weights.
        content: the publication that the workers take.
    """

    number: int
    version: int
    content: Any


@dataclass
class Task:
    """A command whose result the trainer waits for from one worker, with the newest weights.

    Attributes:
        command: what the worker runs.
        deliver: function that takes the result.
    """

    command: Generate
    deliver: Callable[[Any], None]


@dataclass(frozen=True)
class Load:
    """Call: take new weights.

    Attributes:
        weights: the weights.
        give_back: whether interrupted groups come back to the scheduler.
    """

    weights: Weights
    give_back: bool


Call = Load | Work | Generate


@dataclass
class WorkerState:
    """What is known of one worker.

    Attributes:
        ready: it has started and can be called.
        holds: the weights it has; None right after its start.
        running: its groups, as they were handed to it.
        dropped: groups it need not go on with.
        tasks: commands whose results the trainer waits for.
        call: the call it runs now; None if it is idle.
    """

    ready: bool = False
    holds: Weights | None = None
    running: dict[int, Group] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    tasks: deque[Task] = field(default_factory=deque)
    call: Call | None = None


class Scheduler:
    """Hands groups and weights to workers.

    Args:
        tracker: bounds the number of groups.
        num_workers: number of workers.
        num_samples: G, number of responses in a group.
        prompt_of: function that maps a group number to its prompt and seed.
        wait_for_running: whether weights wait until a worker's groups have finished, as with ``drain``.
        give_back: whether groups interrupted by new weights go back into the queue, so that any worker
            continues them.

    Attributes:
        wanted: whether the trainer waits for a round.
        runs_ahead: whether new groups may also start while the trainer does not wait for a round. It is False
            until the start test has passed. It is always False with ``max_age=0``: results must then equal
            those of synchronous training, so no other request may be in the engine.
    """

    def __init__(
        self,
        tracker: StalenessTracker,
        num_workers: int,
        num_samples: int,
        prompt_of: Callable[[int], tuple[list[int], int]],
        *,
        wait_for_running: bool,
        give_back: bool,
    ) -> None:
        self.tracker = tracker
        self.workers = [WorkerState() for _ in range(num_workers)]
        self.wanted = False
        self.runs_ahead = False
        self.newest: Weights | None = None
        self._samples = num_samples
        self._prompt_of = prompt_of
        self._wait_for_running = wait_for_running and not give_back
        self._give_back = give_back
        # Groups of a round are spread evenly: a worker with more would make the others wait.
        self._per_worker = -(-tracker.groups_per_round // num_workers)
        # Groups that have started but have no worker now: interrupted by new weights, or lost with a worker.
        self._queue: dict[int, Group] = {}

    def next_call(self, number: int) -> Call | None:
        """What worker ``number`` does next, None for nothing; the worker is marked as busy with it."""
        worker = self.workers[number]
        if not worker.ready or worker.call is not None or self.newest is None:
            return None
        worker.call = self._choose(worker, self.newest)
        return worker.call

    def _choose(self, worker: WorkerState, newest: Weights) -> Call | None:
        current = worker.holds is newest
        if not current and not (self._wait_for_running and worker.running):
            return Load(newest, self._give_back)
        if current and worker.tasks:
            return worker.tasks[0].command
        begun = list(self._admit(worker)) if current else []
        if not (begun or worker.running or worker.dropped):
            return None
        dropped, worker.dropped = worker.dropped, []
        return Work(begun, dropped)

    def _admit(self, worker: WorkerState) -> Iterator[Group]:
        assert worker.holds is not None
        version = worker.holds.version
        while len(worker.running) < self._per_worker and (self.wanted or self.runs_ahead):
            if self._queue:
                group = self._queue.pop(min(self._queue))
            elif self.tracker.room(version) > 0:
                group = self._new_group(self.tracker.issue())
            else:
                return
            oldest = group.oldest
            self.tracker.start(group.group_id, version if oldest is None else oldest)
            worker.running[group.group_id] = group
            yield group

    def _new_group(self, number: int) -> Group:
        prompt, seed = self._prompt_of(number)
        return Group(number, prompt, seed, [Response() for _ in range(self._samples)])

    def worked(self, number: int, finished: list[Group]) -> list[Group]:
        """Record the groups that ``work`` finished; return those that are still wanted."""
        worker = self.workers[number]
        worker.call = None
        return [group for group in finished if worker.running.pop(group.group_id, None) is not None]

    def loaded(self, number: int, weights: Weights, cut: list[Group]) -> None:
        """Record that worker ``number`` has taken ``weights`` and has returned ``cut``.

        Args:
            number: the worker.
            weights: the weights that it holds now.
            cut: the groups that it was interrupted in; empty if it continues them.
        """
        worker = self.workers[number]
        worker.call = None
        worker.holds = weights
        for group in cut:
            if worker.running.pop(group.group_id, None) is not None:
                self._queue[group.group_id] = group

    def ran_task(self, number: int, result: Any) -> None:
        """Record the result of a task; None keeps the task queued for another call."""
        worker = self.workers[number]
        worker.call = None
        if result is None:
            return
        worker.tasks.popleft().deliver(result)

    def lost(self, number: int) -> None:
        """Worker ``number`` is gone with all it held; its groups are reissued as they were handed to it."""
        worker = self.workers[number]
        for group in worker.running.values():
            if group.oldest is None:
                self.tracker.restart(group.group_id)
            self._queue[group.group_id] = group
        # The next worker of this number repeats the tasks that the trainer waits for.
        self.workers[number] = WorkerState(tasks=worker.tasks)

    def started(self, number: int) -> None:
        """Record that worker ``number`` can be called."""
        self.workers[number].ready = True

    def publish(self, weights: Weights) -> None:
        """Make ``weights`` those that every worker must hold."""
        self.newest = weights

    def expire(self) -> list[int]:
        """Drop groups that are too old for the next round, wherever they are; return their numbers."""
        gone = self.tracker.expire()
        for number in gone:
            self._queue.pop(number, None)
            for worker in self.workers:
                if worker.running.pop(number, None) is not None:
                    worker.dropped.append(number)
        return gone

    def reissue(self, numbers: list[int]) -> None:
        """Start the unfinished groups of a checkpoint again, from their first token."""
        self._queue |= {number: self._new_group(number) for number in numbers}
