"""Staleness under random schedules, and the books: the real scheduler and tracker, a simulated clock."""

from __future__ import annotations

import heapq
import pickle
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.inference.protocol import Completion, Sampling
from torchrl_grpo.rollout.groups import Group, Response
from torchrl_grpo.rollout.workers.scheduler import Call, LoadWeights, PublishedWeights, Scheduler, Task
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import GenerateForEval, GenerateGroups

LENGTH = 4


@dataclass
class Plan:
    """One schedule."""

    seed: int
    groups_per_round: int
    max_age: int
    rounds: int
    steps_per_round: int
    workers: int
    slow_worker: float
    trainer: float
    death: float
    drain: bool
    return_interrupted: bool
    refill: float = 0.0


@dataclass
class Outcome:
    """What a schedule led to."""

    tracker: StalenessTracker
    ages: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    deaths: int = 0
    mixed: int = 0


def new_group(number: int) -> Group:
    return Group(number, [number], number, [Response(), Response()])


class Simulation:
    """Workers, trainer and their delays; every event has a time drawn at random."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.tracker = StalenessTracker(
            plan.groups_per_round, plan.max_age, plan.rounds, plan.steps_per_round
        )
        self.scheduler = Scheduler(
            self.tracker,
            plan.workers,
            new_group,
            wait_for_running=plan.drain,
            return_interrupted=plan.return_interrupted,
        )
        self.outcome = Outcome(self.tracker)
        self.accepted: dict[int, Group] = {}
        # What each worker really has: groups, and the version it samples with.
        self.held: list[dict[int, Group]] = [{} for _ in range(plan.workers)]
        self.version = [-1] * plan.workers
        self.lives = [0] * plan.workers
        self.events: list[tuple[float, int, object]] = []
        self.count = 0
        self.now = 0.0
        self.step = 0
        self.waiting = False

    def later(self, delay: float, event: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, event))

    def run(self) -> Outcome:
        for number in range(self.plan.workers):
            self.later(self.random.random(), ("start", number, self.lives[number]))
        self.publish()
        self.scheduler.may_run_ahead = self.plan.max_age > 0
        self.want()
        while len(self.outcome.trained) < self.plan.rounds * self.plan.groups_per_round:
            assert self.events, "a deadlock: nobody will ever do anything"
            assert self.count < 50_000, "no progress"
            self.now, _, event = heapq.heappop(self.events)
            self.handle(*event)  # type: ignore[misc]
            self.check_books()
            self.hand_out()
            self.dispatch()
        return self.outcome

    def dispatch(self) -> None:
        for number, call in self.scheduler.next_calls():
            speed = self.plan.slow_worker if number == 0 else 1.0
            if self.random.random() < self.plan.death:
                self.later(self.random.random(), ("die", number, self.lives[number]))
            else:
                # A worker gets copies of its groups.
                received = pickle.loads(pickle.dumps(call)) if isinstance(call, GenerateGroups) else call
                self.later(speed * self.random.random(), ("done", number, self.lives[number], received))
        for number in range(self.plan.workers):
            assert self.scheduler.next_call(number) is None, "a worker that nobody looked at has work"
        loading = [isinstance(worker.call, LoadWeights) for worker in self.scheduler.workers]
        newest, up = self.scheduler.newest, [worker for worker in self.scheduler.workers if worker.ready]
        current = bool(up) and all(worker.loaded_weights is newest for worker in up)
        assert self.scheduler.is_loading == any(loading) and self.scheduler.all_loaded == current

    def handle(self, kind: str, number: int, life: int, *rest: object) -> None:
        if kind == "trained":
            self.step += self.plan.steps_per_round
            self.publish()
            self.want()
            return
        if kind == "flat":
            self.tracker.uncount_last_round()
            self.want()
            return
        if life != self.lives[number]:
            return
        if kind == "start":
            self.scheduler.on_worker_started(number)
        elif kind == "die":
            self.outcome.deaths += 1
            self.lives[number] += 1
            self.held[number] = {}
            self.scheduler.on_worker_lost(number)
            self.later(self.random.random(), ("start", number, self.lives[number]))
        else:
            (call,) = rest
            self.done(number, call)  # type: ignore[arg-type]

    def done(self, number: int, call: Call) -> None:
        if isinstance(call, LoadWeights):
            cut = list(self.held[number].values()) if self.plan.return_interrupted else []
            if self.plan.return_interrupted:
                self.held[number] = {}
            self.version[number] = call.weights.version
            newest = self.scheduler.newest
            # The simulated trainer never publishes while a load is under way unless it did so before.
            weights = newest if newest is not None and newest.version == call.weights.version else None
            self.scheduler.on_weights_loaded(
                number, weights or PublishedWeights(-1, call.weights.version, None), cut
            )
            return
        assert isinstance(call, GenerateGroups)
        self.held[number] |= {group.group_id: group for group in call.groups}
        for gone in call.dropped:
            self.held[number].pop(gone, None)
        finished = [
            group for group in self.held[number].values() if self.advance(group, self.version[number])
        ]
        for group in finished:
            del self.held[number][group.group_id]
        for group in self.scheduler.on_groups_generated(number, finished):
            oldest_version = group.oldest_version
            assert oldest_version is not None
            if group.group_id in self.tracker.running:
                self.tracker.accept(group.group_id, oldest_version)
                self.accepted[group.group_id] = group

    def advance(self, group: Group, version: int) -> bool:
        for response in group.responses:
            more = self.random.randint(0, LENGTH - len(response.token_ids))
            whole = len(response.token_ids) + more == LENGTH
            response.extend(Completion([1] * more, [0.0] * more, "stop" if whole else "aborted"), version)
        return group.is_finished

    def publish(self) -> None:
        newest = self.scheduler.newest
        self.scheduler.publish(PublishedWeights(0 if newest is None else newest.number + 1, self.step, None))

    def want(self) -> None:
        self.waiting = self.scheduler.round_requested = True

    def hand_out(self) -> None:
        if not self.waiting:
            return
        for number in self.scheduler.expire():
            self.accepted.pop(number, None)
        chosen = self.tracker.take()
        if chosen is None:
            return
        groups = [self.accepted.pop(number) for number in chosen]
        self.waiting = self.scheduler.round_requested = False
        if self.random.random() < self.plan.refill:
            # Workers bring groups while the trainer looks for a signal in these.
            self.later(self.plan.trainer * self.random.random(), ("flat", 0, 0))
            return
        for group in groups:
            versions = [version for response in group.responses for version in response.versions]
            assert group.is_finished and len(versions) == 2 * LENGTH
            self.outcome.mixed += len(set(versions)) > 1
            self.outcome.ages.append((self.step - min(versions)) // self.plan.steps_per_round)
            self.outcome.trained.append(group.group_id)
        if not self.plan.refill:
            for number in self.scheduler.expire():
                self.accepted.pop(number, None)
        self.later(self.plan.trainer * self.random.random(), ("trained", 0, 0))

    def check_books(self) -> None:
        books = self.tracker
        assert books.max_age is not None
        assert books.issued == books.trained + books.dropped_age + books.dropped_filter + books.outstanding
        assert set(books.accepted) == set(self.accepted)
        held = [*books.accepted.values(), *(v for v in books.running.values() if v is not None)]
        assert all(books._no_older_than <= version for version in held)
        assert books.outstanding <= (books.max_age + 1) * books.groups_per_round


plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    groups_per_round=st.integers(1, 5),
    max_age=st.integers(0, 4),
    rounds=st.integers(1, 8),
    steps_per_round=st.integers(1, 3),
    workers=st.integers(1, 4),
    slow_worker=st.sampled_from([1.0, 10.0, 100.0]),
    trainer=st.sampled_from([0.01, 1.0, 10.0]),
    death=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    drain=st.booleans(),
    return_interrupted=st.booleans(),
    refill=st.sampled_from([0.0, 0.3]),
)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(plans)
def test_nothing_older_than_the_bound_is_trained_on_and_the_books_add_up(plan: Plan) -> None:
    outcome = Simulation(plan).run()
    assert max(outcome.ages) <= plan.max_age and min(outcome.ages) >= 0
    assert len(set(outcome.trained)) == len(outcome.trained), "no group is trained on twice"
    books = outcome.tracker
    assert books.trained == plan.rounds * plan.groups_per_round
    assert books.issued == books.trained + books.dropped_age + books.dropped_filter + books.outstanding


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("max_age", [0, 1, 2, 4, 8])
def test_the_bound_is_reached(max_age: int, drain: bool) -> None:
    plan = Plan(0, 4, max_age, 20, 1, 2, 1.0, 20.0, 0.0, drain, False)
    outcome = Simulation(plan).run()
    assert max(outcome.ages) == max_age, (
        "workers that are faster than the trainer run ahead as far as they may"
    )
    assert outcome.tracker.dropped_age <= outcome.tracker.issued // 20, (
        "with workers of one speed nearly every group is in time"
    )
    slow = Simulation(Plan(0, 4, max_age, 20, 1, 2, 1.0, 0.001, 0.0, drain, False)).run()
    assert sum(slow.ages) <= sum(outcome.ages)


def test_a_slow_worker_does_not_hold_up_the_others() -> None:
    def duration(slow: float, max_age: int) -> float:
        simulation = Simulation(Plan(3, 4, max_age, 12, 1, 4, slow, 0.1, 0.0, False, False))
        simulation.run()
        return simulation.now

    # Three of four workers go on: a third longer, and not two hundred times.
    assert duration(200.0, 2) < 4 * duration(1.0, 2)


def test_cut_responses_go_on_with_the_tokens_they_have_on_any_worker() -> None:
    outcomes = [Simulation(Plan(seed, 4, 3, 10, 1, 3, 3.0, 0.5, 0.1, True, True)).run() for seed in range(5)]
    assert sum(outcome.mixed for outcome in outcomes) > 0 and sum(outcome.deaths for outcome in outcomes) > 0


def scheduler_of(**changes: bool) -> Scheduler:
    options = {"wait_for_running": True, "return_interrupted": False, **changes}
    scheduler = Scheduler(StalenessTracker(2, 1, 5), 1, new_group, **options)
    scheduler.on_worker_started(0)
    scheduler.publish(PublishedWeights(0, 0, "first"))
    call = scheduler.next_call(0)
    assert scheduler.newest is not None
    assert call == LoadWeights(scheduler.newest, options["return_interrupted"])
    scheduler.on_weights_loaded(0, scheduler.newest, [])
    return scheduler


def test_nothing_is_begun_before_it_may_and_each_worker_does_one_thing_at_a_time() -> None:
    scheduler = scheduler_of()
    assert scheduler.next_call(0) is None
    scheduler.round_requested = True
    call = scheduler.next_call(0)
    assert isinstance(call, GenerateGroups) and [group.group_id for group in call.groups] == [0, 1]
    assert scheduler.next_call(0) is None


def test_draining_weights_wait_for_running_groups_and_tasks_wait_for_weights() -> None:
    scheduler = scheduler_of()
    scheduler.may_run_ahead = True
    scheduler.next_call(0)
    scheduler.publish(PublishedWeights(1, 1, "second"))
    got: list[str] = []
    evaluation = GenerateForEval([[1]], Sampling(1, 4, 0.0))
    scheduler.workers[0].tasks.append(Task(evaluation, got.append))
    assert scheduler.on_groups_generated(0, []) == []
    assert scheduler.next_call(0) == GenerateGroups([], []), "running groups go on, no new ones are begun"
    running = list(scheduler.workers[0].running.values())
    assert scheduler.on_groups_generated(0, running) == running
    assert scheduler.next_call(0) == LoadWeights(PublishedWeights(1, 1, "second"), False)
    assert scheduler.newest is not None
    scheduler.on_weights_loaded(0, scheduler.newest, [])
    assert scheduler.next_call(0) == evaluation
    scheduler.on_worker_lost(0)
    scheduler.on_worker_started(0)
    assert scheduler.next_call(0) == LoadWeights(PublishedWeights(1, 1, "second"), False), (
        "a new worker has no weights"
    )
    scheduler.on_weights_loaded(0, scheduler.newest, [])
    assert scheduler.next_call(0) == evaluation, "and is asked again"
    scheduler.on_task_done(0, "answer")
    assert got == ["answer"]


def test_weights_in_flight_come_at_once() -> None:
    scheduler = scheduler_of(wait_for_running=False)
    scheduler.round_requested = True
    scheduler.next_call(0)
    scheduler.publish(PublishedWeights(1, 1, "second"))
    scheduler.on_groups_generated(0, [])
    assert scheduler.next_call(0) == LoadWeights(PublishedWeights(1, 1, "second"), False)


def test_a_resumed_tracker_goes_on_with_the_same_counts() -> None:
    tracker = StalenessTracker(2, 1, 5)
    for number in range(4):
        assert tracker.register_group() == number
        tracker.start(number, 0)
    for number in range(3):
        tracker.accept(number, 0)
    assert tracker.take() == [0, 1] and tracker.take() is None
    again = StalenessTracker(2, 1, 5)
    again.load_state_dict(tracker.state_dict())
    assert again.counts() == tracker.counts() and again.running == {3: None} and again.accepted == {2: 0}
    assert tracker.num_admissible(0) == 2 * 2 - 2 - 2 and tracker.num_admissible(1) == 2


def test_a_run_in_turn_begins_each_round_with_the_weights_that_were_published_last() -> None:
    tracker = StalenessTracker(2, None, 3)
    for done in range(3):
        assert tracker.num_admissible(version=0) == 2, "published once, and never again"
        for _ in range(2):
            number = tracker.register_group()
            tracker.start(number, 0)
            tracker.accept(number, 0)
        assert tracker.num_admissible(0) == 0 and tracker.expire() == []
        assert tracker.take() == [2 * done, 2 * done + 1]
    assert tracker.num_admissible(0) == 0, "the run has no more rounds"


@pytest.mark.parametrize(
    ("saved", "own", "script"), [(2, None, "grpo-async"), (None, 2, "grpo"), (2, 0, "grpo-async")]
)
def test_a_run_that_runs_ahead_and_one_that_does_not_are_not_mixed(
    saved: int | None, own: int | None, script: str
) -> None:
    state = StalenessTracker(2, saved, 5).state_dict()
    with pytest.raises(CheckpointError, match=rf"was started with {script}\.py.*; resume it in the same way"):
        StalenessTracker(2, own, 5).load_state_dict(state)
    for same in (saved, saved and saved + 1, saved or 0):
        StalenessTracker(2, same, 5).load_state_dict(state)


def test_what_comes_while_a_round_may_be_refilled_is_kept_for_it() -> None:
    tracker = StalenessTracker(1, 0, 5)
    for number in range(2):
        tracker.register_group()
        tracker.start(number, 0)
    tracker.accept(0, 0)
    assert tracker.take() == [0]
    # Too old for the next round, but not for the one that is taken again.
    tracker.accept(1, 0)
    tracker.uncount_last_round()
    assert tracker.expire() == [] and tracker.take() == [1]
    assert tracker.counts() == {"issued": 2, "trained": 1, "dropped_age": 0, "dropped_filter": 1, "left": 0}


def test_a_response_knows_the_version_behind_each_of_its_tokens() -> None:
    response = Response()
    response.extend(Completion([1, 2], [-0.1, -0.2], "aborted"), 3)
    response.extend(Completion([], [], "aborted"), 4)
    response.extend(Completion([5], [-0.3], "stop"), 6)
    group = Group(0, [9], 0, [response, Response()])
    assert response.versions == [3, 3, 6] and response.finish_reason == "stop"
    assert group.oldest_version == 3 and not group.is_finished
