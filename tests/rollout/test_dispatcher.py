"""The thread between trainer and workers, and a worker by itself: failures at awkward moments, and counts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from batches import END, PAD, make_model
from torch import Tensor

from torchrl_grpo.errors import WorkersLost
from torchrl_grpo.inference.protocol import Probe
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.workers import dispatcher
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import WorkerDelivery
from torchrl_grpo.rollout.workers.worker import RolloutWorker


class Pool:
    """Workers that start or do not, and answer when they are told to.

    Attributes:
        calls: the callback of each call.
    """

    overwrites = False

    def __init__(self, starts: bool) -> None:
        self.starts = starts
        self.calls: list[Callable[[Any], None]] = []

    def start(self, number: int, done: Callable[[Any], None]) -> None:
        if self.starts:
            done(None)

    def call(self, number: int, command: Any, done: Callable[[Any], None]) -> None:
        self.calls.append(done)

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        return weights

    def kill(self, number: int) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to end."""


def score(groups: Sequence[Group]) -> list[ScoredGroup]:
    raise AssertionError("there is nothing to score")


def tokens_of(groups: Iterable[Group]) -> int:
    return sum(len(response.token_ids) for group in groups for response in group.responses)


def make_dispatcher(pool: Pool, timeout_s: float = 60.0, **options: Any) -> Dispatcher:
    scheduler = Scheduler(
        StalenessTracker(1, 0, 5),
        1,
        lambda number: Group(number, [1], number, [Response(), Response()]),
        wait_for_running=False,
        return_interrupted=False,
    )
    arguments: dict[str, Any] = {"score_rewards": score, **options}
    return Dispatcher(scheduler, pool, timeout_s=timeout_s, max_restarts=0, **arguments)


def test_rewards_that_wait_are_computed_for_several_groups_at_a_time() -> None:
    """Neither of the two groups is scored before both are under way."""
    under_way = threading.Barrier(3)

    def wait(groups: Sequence[Group]) -> list[ScoredGroup]:
        under_way.wait(60)
        return [ScoredGroup(group, ["", ""], []) for group in groups]

    made = make_dispatcher(Pool(starts=True), score_rewards=wait, reward_threads=2)
    for number in range(2):
        made._compute_rewards([Group(number, [1], number, [Response(), Response()])])
    under_way.wait(60)
    made.close()


@pytest.mark.parametrize(
    ("threads", "calls"), [(1, [[0], [1, 2, 3], [4, 5, 6], [7]]), (2, [[0], [1], [2, 3, 4], [5, 6, 7]])]
)
def test_groups_that_wait_are_scored_together_in_their_order(threads: int, calls: list[list[int]]) -> None:
    """While the threads hold their first calls, the others wait; then one thread goes on."""
    held, scored = threading.Semaphore(0), list[list[int]]()
    gates = [threading.Event() for _ in range(threads)]
    ended = threading.Event()

    def hold(groups: Sequence[Group]) -> list[ScoredGroup]:
        number = len(scored)
        scored.append([group.group_id for group in groups])
        if number < threads:
            held.release()
            gates[number].wait(60)
        if 7 in scored[-1]:
            ended.set()
        return [ScoredGroup(group, ["", ""], []) for group in groups]

    made = make_dispatcher(Pool(True), score_rewards=hold, reward_threads=threads, groups_per_call=3)
    for number in range(8):
        made._compute_rewards([Group(number, [1], number, [Response(), Response()])])
        if number < threads:
            held.acquire(timeout=60)
    gates[0].set()
    assert ended.wait(60)
    gates[-1].set()
    made.close()
    assert scored == calls


@pytest.mark.parametrize(("threads", "taken"), [(1, [0, 1, 2]), (2, [0, 1]), (4, [0])])
def test_a_call_leaves_groups_to_threads_without_work(threads: int, taken: list[int]) -> None:
    """Otherwise a call that hangs would hold up groups that others could score."""
    scored = list[int]()

    def keep(groups: Sequence[Group]) -> list[ScoredGroup]:
        scored.extend(group.group_id for group in groups)
        return []

    made = make_dispatcher(Pool(True), score_rewards=keep, reward_threads=threads, groups_per_call=3)
    made._waiting.extend([Group(number, [1], number, [])] for number in range(4))
    made._score_waiting()
    made.close()
    assert scored == taken


def test_groups_that_are_scored_together_keep_their_own_numbers_of_the_reference() -> None:
    gate = threading.Event()

    def hold(groups: Sequence[Group]) -> list[ScoredGroup]:
        gate.wait(60)
        return [ScoredGroup(group, ["", ""], []) for group in groups]

    class Reference:
        def log_probs(self, group: Group) -> Future[list[list[float]]]:
            future: Future[list[list[float]]] = Future()
            future.set_result([[float(group.group_id)]] * 2)
            return future

    made = make_dispatcher(Pool(True), score_rewards=hold, reference=Reference(), groups_per_call=3)
    for number in range(4):
        made._compute_rewards([Group(number, [1], number, [Response(), Response()])])
    gate.set()
    # What the dispatcher's thread would do: four calls end, and then each group has all its numbers.
    for _ in range(8):
        made._inbox.get(timeout=60)()
    made.close()
    assert [(scored.group.group_id, scored.reference) for scored in made.take_too_old()] == [
        (number, [[float(number)]] * 2) for number in range(4)
    ]


def test_what_is_asked_behind_a_failure_is_done_all_the_same() -> None:
    """The books must say that a round is wanted again, also when the last worker fails just before."""
    pool = Pool(starts=True)
    made = make_dispatcher(pool)
    made.start()
    made.publish(WorkerDelivery("weights", Probe([[1]], 1)), 0)
    entered, gate = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(60)

    holder = threading.Thread(target=made.run_in_thread, args=(hold,))
    holder.start()
    assert entered.wait(60)
    # While the thread is held, the failure waits in its inbox, and what is asked stands behind it.
    pool.calls[0](RuntimeError("device lost"))
    requested = threading.Event()
    answers: list[str] = []

    def ask() -> None:
        requested.set()
        answers.append(made.run_in_thread(lambda: "asked"))

    asker = threading.Thread(target=ask)
    asker.start()
    assert requested.wait(60)
    gate.set()
    holder.join(60)
    asker.join(60)
    assert answers == ["asked"]
    with pytest.raises(WorkersLost, match="device lost"):
        made.wait_for_round(is_refill=False)
    made.close()


def test_finished_groups_that_became_too_old_are_kept_until_they_are_taken() -> None:
    made = make_dispatcher(Pool(starts=False))
    tracker = made.scheduler.tracker = StalenessTracker(1, 1, 5)
    groups = [Group(tracker.register_group(), [1], 0, [Response([2], [-0.1], [0], "stop")]) for _ in range(3)]
    # The third is not finished.
    first, second = (ScoredGroup(group, ["a"], []) for group in groups[:2])
    for group in groups:
        tracker.start(group.group_id, 0)
    made._accept(first)
    tracker.training_rounds = 2
    made._expire()
    # The second was being scored when it was dropped.
    made._accept(second)
    assert tracker.dropped_age == 3 and not made.accepted
    assert made.take_too_old() == [first, second]
    assert made.take_too_old() == []


def test_a_worker_that_does_not_start_is_given_up_after_what_a_start_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "START_LIMIT_S", 0.3)
    made = make_dispatcher(Pool(starts=False), timeout_s=0.1)
    with pytest.raises(WorkersLost, match=r"no answer within 0\.3 s"):
        made.start()
    made.close()


def test_every_sampled_token_is_counted_once_however_often_a_response_is_cut() -> None:
    ticks: Iterator[int] = itertools.count()
    # A clock of its own: the second look at it ends a turn, after one token of each response.
    worker = RolloutWorker(TransformersEngine(make_model(), [END], PAD), 9, 1.0, lambda: 0.3 * next(ticks))
    groups = [Group(number, [5, 9, 2 + number], 7 * number, [Response(), Response()]) for number in range(3)]
    weights = [(name, tensor.detach()) for name, tensor in make_model().named_parameters()]
    counted = 0
    finished: list[Group] = []
    begun, left_out = groups, 0
    for version in itertools.count(1):
        turn = worker.generate_groups(begun, [])
        counted += turn.tokens
        finished += turn.finished
        if len(finished) == 2:
            break
        _, cut = worker.load(weights, version, probe=Probe([[5, 9]], 1), return_interrupted=True)
        # The third group is not wanted any more once it has been cut.
        left_out += tokens_of(group for group in cut if group.group_id == 2)
        begun = [group for group in cut if group.group_id != 2]
    assert left_out > 0 and counted == tokens_of(finished) + left_out
    assert max(len(set(response.versions)) for group in finished for response in group.responses) > 3
