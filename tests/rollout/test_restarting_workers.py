"""Workers that start again while the trainer publishes, collects and evaluates: nobody waits for them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Sampling
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import Command, GenerateForEval, GenerateGroups, LoadWeightsCommand
from torchrl_grpo.rollout.workers.worker import GroupsResult
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup

LIMIT_S = 30
PROBE = Probe([[1]], 1)


class OwnWeights:
    """The trainer's own weights, as a publication from GPU to GPU has them."""

    def open(self) -> None:
        """Workers may load at any time."""

    def postpone(self) -> None:
        """No worker waits."""

    def send_until(self, until: Future[Any]) -> None:
        wait([until])


class Pool:
    """Workers that answer at once. A worker that has died starts again when the test says so.

    Attributes:
        calls: what each worker was told, and the version of its weights then, since it started last.
        starting: callbacks of workers that start again.
        restarts: their numbers, in order.
        dies: function that says of each command whether it is the end of the worker.
    """

    overwrites = False

    def __init__(self, count: int, *, own_weights: bool) -> None:
        self.own_weights = own_weights
        self.held: list[int | None] = [None] * count
        self.calls: list[list[tuple[type, int]]] = [[] for _ in range(count)]
        self.starting: dict[int, Callable[[Any], None]] = {}
        self.restarts: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.dies: Callable[[int, Command], bool] = lambda number, command: False
        self._fresh = set(range(count))

    def start(self, number: int, done: Callable[[Any], None]) -> None:
        self.held[number], self.calls[number] = None, []
        if number in self._fresh:
            self._fresh.discard(number)
            done(None)
        else:
            self.starting[number] = done
            self.restarts.put(number)

    def call(self, number: int, command: Command, done: Callable[[Any], None]) -> None:
        if isinstance(command, LoadWeightsCommand):
            self.held[number] = command.version
        version = self.held[number]
        assert version is not None, "a worker without weights"
        self.calls[number].append((type(command), version))
        done(ConnectionError("killed") if self.dies(number, command) else self.answer(command, version))

    def answer(self, command: Command, version: int) -> Any:
        if isinstance(command, LoadWeightsCommand):
            return ProbeResult(torch.zeros(1, 1), torch.zeros(1, 1), 0), []
        if isinstance(command, GenerateForEval):
            return [[Completion(list(prompt), [0.0], "stop")] for prompt in command.prompts]
        for group in command.groups:
            for response in group.responses:
                response.extend(Completion([2], [-0.1], "stop"), version)
        return GroupsResult(list(command.groups), 1, 1.0)

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        return OwnWeights() if self.own_weights else list(weights)

    def kill(self, number: int) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to end."""


class Trainer:
    """A trainer whose every wait has a limit."""

    def __init__(self, pool: Pool, max_age: int) -> None:
        scheduler = Scheduler(
            StalenessTracker(2, max_age, 20),
            len(pool.held),
            lambda number: Group(number, [1], number, [Response(), Response()]),
            wait_for_running=False,
            return_interrupted=False,
        )

        def score(groups: Sequence[Group]) -> list[ScoredGroup]:
            return [ScoredGroup(group, ["", ""], []) for group in groups]

        self.pool, self.max_age = pool, max_age
        self.dispatcher = Dispatcher(scheduler, pool, score_rewards=score, timeout_s=600.0, max_restarts=9)
        self.group = WorkerGroup(self.dispatcher)
        self._thread = ThreadPoolExecutor(1)

    def sends(self, version: int) -> Future[Any]:
        """Begin to publish."""
        return self._thread.submit(self.group.send, [], version, PROBE)

    def publish(self, version: int) -> None:
        self.sends(version).result(LIMIT_S).all_loaded_future.result(LIMIT_S)

    def collect(self, number: int) -> None:
        """Take a round, whose groups must be recent enough."""
        groups = self._thread.submit(self.dispatcher.wait_for_round, is_refill=False).result(LIMIT_S)
        ages = [number - version for scored in groups if (version := scored.group.oldest_version) is not None]
        assert len(ages) == 2 and 0 <= min(ages) <= max(ages) <= self.max_age

    def evaluate(self) -> list[Any]:
        sampling = Sampling(1, 4, 0.0)
        return self._thread.submit(self.group.generate, [[1], [2], [3]], sampling).result(LIMIT_S)

    def settle(self) -> None:
        """Wait until the dispatcher has handled all that has happened."""
        for _ in range(4):
            self.dispatcher.run_in_thread(lambda: None)

    def restart(self, number: int) -> None:
        self.pool.starting.pop(number)(None)
        self.settle()


@pytest.fixture
def train() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def build(count: int, own_weights: bool, max_age: int) -> Trainer:
        made.append(Trainer(Pool(count, own_weights=own_weights), max_age))
        return made[-1]

    yield build
    for trainer in made:
        trainer.dispatcher.close()


WAYS = pytest.mark.parametrize(("own_weights", "max_age"), [(True, 0), (True, 2), (False, 0), (False, 2)])


def dies_once(worker: int, kind: type) -> Callable[[int, Command], bool]:
    """Have a worker die at its next command of this kind."""
    pending = [worker]

    def dies(number: int, command: Command) -> bool:
        return isinstance(command, kind) and pending == [number] and pending.pop() == number

    return dies


@WAYS
def test_a_worker_that_starts_again_for_long_stops_nothing_and_joins_with_the_newest_weights(
    train: Callable[..., Trainer], own_weights: bool, max_age: int
) -> None:
    trainer = train(2, own_weights, max_age)
    pool = trainer.pool
    trainer.publish(0)
    pool.dies = dies_once(1, GenerateGroups)
    for number in range(5):
        trainer.collect(number)
        trainer.publish(number + 1)
        trainer.evaluate()
    assert list(pool.starting) == [1] and pool.calls[1] == []
    trainer.restart(1)
    trainer.collect(5)
    trainer.settle()
    assert pool.calls[1][0] == (LoadWeightsCommand, 5), "before anything else"
    trainer.publish(6)
    trainer.collect(6)
    assert pool.held == [6, 6]


@WAYS
def test_a_worker_that_dies_while_it_loads_ends_the_wait_for_it(
    train: Callable[..., Trainer], own_weights: bool, max_age: int
) -> None:
    trainer = train(2, own_weights, max_age)
    pool = trainer.pool
    trainer.publish(0)
    for version in (1, 2, 3):
        trainer.collect(version - 1)
        if version > 1:
            trainer.restart(1)
        pool.dies = dies_once(1, LoadWeightsCommand)
        trainer.publish(version)
        assert pool.restarts.get(timeout=LIMIT_S) == 1 and pool.held == [version, None]
    trainer.collect(3)
    trainer.restart(1)
    trainer.publish(4)
    trainer.settle()
    assert pool.held == [4, 4]


@pytest.mark.parametrize("count", [1, 2])
def test_the_trainer_waits_for_one_worker_if_none_is_up(train: Callable[..., Trainer], count: int) -> None:
    trainer = train(count, own_weights=True, max_age=2)
    pool = trainer.pool
    trainer.publish(0)
    pool.dies = lambda number, command: isinstance(command, LoadWeightsCommand)
    sending = trainer.sends(1)
    for _ in range(count):
        pool.restarts.get(timeout=LIMIT_S)
    trainer.settle()
    loaded: list[bool] = []
    trainer.dispatcher.run_in_thread(lambda: loaded.append(trainer.dispatcher.scheduler.all_loaded))
    assert not sending.done() and loaded == [False]
    pool.dies = lambda number, command: False
    trainer.restart(0)
    sending.result(LIMIT_S)
    assert pool.held == [1, None][:count]


@pytest.mark.parametrize("when", ["before", "during"])
def test_another_worker_takes_over_the_evaluation(train: Callable[..., Trainer], when: str) -> None:
    trainer = train(2, own_weights=False, max_age=2)
    pool = trainer.pool
    trainer.publish(0)
    pool.dies = dies_once(1, LoadWeightsCommand if when == "before" else GenerateForEval)
    if when == "before":
        trainer.publish(1)
        pool.restarts.get(timeout=LIMIT_S)
    assert [[answer.token_ids for answer in group] for group in trainer.evaluate()] == [[[1]], [[2]], [[3]]]
    assert list(pool.starting) == [1]
    assert pool.calls[0][-2:] == [(GenerateForEval, 1 if when == "before" else 0)] * 2
    trainer.restart(1)
    assert GenerateForEval not in [kind for kind, _ in pool.calls[1]]
