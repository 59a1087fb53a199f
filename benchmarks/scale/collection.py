"""Parts of the collection: dispatcher, rewards, checkpoint of what waits, and the choice of problems."""

from __future__ import annotations

import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.scale.parts import Part, fastest, microseconds, total
from torchrl_grpo.batch.micro_batches import first_fit_decreasing
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.curriculum import PassRateStream
from torchrl_grpo.inference.protocol import Probe, ProbeResult
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import LoadWeightsCommand, WorkerDelivery
from torchrl_grpo.rollout.workers.worker import GroupsResult
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime.malloc import release_freed_memory

SAMPLES = 8
_ROUNDS = 3
_WORKERS = 64
_MOST_PACKED = 16_384


def _group(number: int, tokens: int, version: int = 0) -> Group:
    responses = [
        Response([number] * tokens, [-0.5] * tokens, [version] * tokens, "stop") for _ in range(SAMPLES)
    ]
    return Group(number, [1] * 8, number, responses)


class _Pool:
    """Workers that finish a group at each call. One thread answers for all."""

    overwrites = False

    def __init__(self, workers: int) -> None:
        self._groups: list[dict[int, Group]] = [{} for _ in range(workers)]
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.version = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            work()

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        self._inbox.put(lambda: done(None))

    def call(self, worker_index: int, command: Any, done: Callable[[Any], None]) -> None:
        if isinstance(command, LoadWeightsCommand):
            result = ProbeResult(torch.zeros(0), torch.zeros(0), 0), list[Group]()
            self._inbox.put(lambda: done(result))
            return
        groups = self._groups[worker_index]
        groups.update((group.group_id, group) for group in command.groups)
        for number in command.dropped:
            groups.pop(number, None)

        def answer() -> None:
            finished = []
            if groups:
                group = groups.pop(next(iter(groups)))
                group.responses = _group(group.group_id, 4, self.version).responses
                finished.append(group)
            done(GroupsResult(finished))

        self._inbox.put(answer)

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        return None

    def kill(self, worker_index: int) -> None:
        """Nothing to end."""

    def close(self) -> None:
        self._inbox.put(None)


def _score(groups: Sequence[Group]) -> list[ScoredGroup]:
    return [ScoredGroup(group, [""] * SAMPLES, [ResponseScore(1.0)] * SAMPLES) for group in groups]


def _make_dispatcher(groups: int) -> tuple[Dispatcher, _Pool]:
    tracker = StalenessTracker(groups, 1, 10**6)
    scheduler = Scheduler(
        tracker,
        _WORKERS,
        lambda number: Group(number, [1] * 8, number, [Response() for _ in range(SAMPLES)]),
        wait_for_running=False,
        return_interrupted=False,
    )
    pool = _Pool(_WORKERS)
    return Dispatcher(scheduler, pool, score_rewards=_score, timeout_s=300.0, max_restarts=0), pool


def _deliver(dispatcher: Dispatcher, version: int) -> WorkerDelivery:
    delivery = WorkerDelivery(None, Probe([], 0))
    dispatcher.publish(delivery, version)
    return delivery


def _dispatcher(groups: int) -> float:
    """Return the processor time of the dispatcher's thread for rounds of so many groups, for one round."""
    dispatcher, pool = _make_dispatcher(groups)
    dispatcher.start()
    _deliver(dispatcher, 0).wait()

    def run_ahead() -> float:
        dispatcher.scheduler.may_run_ahead = True
        return time.thread_time()

    start = dispatcher.run_in_thread(run_ahead)
    for number in range(_ROUNDS):
        dispatcher.wait_for_round(False)
        pool.version = number + 1
        _deliver(dispatcher, number + 1)
    spent = dispatcher.run_in_thread(time.thread_time) - start
    dispatcher.close()
    return spent / _ROUNDS


class _SlowReward:
    """A reward of the user that waits, one call for a group."""

    name = "slow"

    def __call__(self, completion: str, example: Example) -> float:
        return 1.0

    def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
        time.sleep(0.05)
        return [1.0] * len(completions)


class _JoinedReward(_SlowReward):
    """A reward of the user that asks a server, and takes several groups in a call."""

    prompts_per_call = 32

    def score_batch(self, completions: Sequence[str], examples: Sequence[Example]) -> list[float]:
        time.sleep(0.2)
        return [1.0] * len(completions)


def score_all(rewards: RewardSet, responses: int) -> float:
    """Return the seconds for the rewards of so many responses, as the dispatcher has them computed."""
    examples = [
        Example(str(number // SAMPLES), [{"role": "user", "content": str(number // SAMPLES)}])
        for number in range(responses)
    ]
    size = rewards.groups_per_call * SAMPLES
    calls = [examples[start : start + size] for start in range(0, responses, size)]
    texts = [str(number) for number in range(size)]
    with ThreadPoolExecutor(rewards.parallel_calls) as threads:
        start = time.perf_counter()
        list(threads.map(lambda call: rewards.score(texts[: len(call)], call), calls))
        spent = time.perf_counter() - start
    rewards.close()
    return spent


def _rewards(responses: int) -> float:
    return score_all(RewardSet([(_SlowReward(), 1.0)], workers=16, group_size=SAMPLES), responses)


def _joined(responses: int) -> float:
    return score_all(RewardSet([(_JoinedReward(), 1.0)], group_size=SAMPLES), responses)


def waiting(tokens: int) -> tuple[Collector, Dispatcher]:
    """Return a collector for which groups with so many tokens wait."""
    dispatcher, _ = _make_dispatcher(4)
    groups = [_group(number, 500) for number in range(tokens // (500 * SAMPLES))]
    dispatcher.accepted = {
        scored.group.group_id: ScoredGroup(scored.group, ["x" * 1_500] * SAMPLES, scored.scores)
        for scored in _score(groups)
    }
    dispatcher.scheduler.tracker.accepted = dict.fromkeys(dispatcher.accepted, 0)
    env = SimpleNamespace(batch_size=(4, SAMPLES))
    source = cast(Any, SimpleNamespace(env=env, read_pictures=lambda group: None))
    return Collector(source, WorkerGroup(dispatcher, None), total_dialog_turns=1), dispatcher


def _frozen(tokens: int) -> float:
    """Return the time for which the dispatcher does nothing else while so many tokens are saved."""
    collector, dispatcher = waiting(tokens)
    longest, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            start = time.perf_counter()
            dispatcher.run_in_thread(lambda: None)
            longest[0] = max(longest[0], time.perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    collector.state_dict()
    stop.set()
    watcher.join()
    dispatcher.close()
    return longest[0]


def _resume(tokens: int) -> float:
    """Return the time in which so many waiting tokens are read from a checkpoint.

    A run that starts has no freed memory to use again, so this has none either.
    """
    collector, dispatcher = waiting(tokens)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(collector.state_dict(), Path(folder) / "state.pt")
        release_freed_memory()
        start = time.perf_counter()
        collector.load_state_dict(torch.load(Path(folder) / "state.pt", weights_only=True))
        spent = time.perf_counter() - start
    dispatcher.close()
    return spent


def _packing(groups: int) -> float:
    """Return the processor time in which so many groups are packed.

    Batches of every size have the same number of groups in all: a small batch that is repeated would find its
    own in the processor's caches.
    """
    draw = random.Random(0)
    batches = [
        {number: draw.randint(1_000, 12_000) for number in range(groups)}
        for _ in range(_MOST_PACKED // groups)
    ]
    return fastest(lambda: [first_fit_decreasing(batch, 16_384) for batch in batches]) / len(batches)


def _draws(problems: int) -> float:
    """Return the time of 1,000 draws among problems whose pass rates are known."""
    example = Example("0", [], {}, {})
    rates = {"rates": [(number, number % 11 / 10) for number in range(problems)], "chosen": []}
    stream = PassRateStream(
        [example] * problems, 0, bands=[0.1, 0.9], weights=[0.2, 1.0, 0.2], unseen_weight=1.0
    )
    stream.load_learned_state(rates)
    start = time.process_time()
    for number in range(1_000):
        stream.at(number)
    return time.process_time() - start


PARTS = {
    "dispatcher": Part(
        "dispatcher, a round", "groups", (256, 1_024, 4_096), _dispatcher,
        microseconds, "µs a group", target=300, repeats=7,
    ),
    "rewards": Part(
        "a reward of 50 ms for a group, 16 workers", "responses", (1_024,), _rewards,
        lambda size, cost: size / cost, "responses/s",
    ),
    "joined": Part(
        "a reward of 200 ms for 32 groups, 1 worker", "responses", (1_024,), _joined,
        lambda size, cost: size / cost, "responses/s",
    ),
    "checkpoint": Part(
        "workers stopped by a checkpoint", "tokens", (500_000, 1_000_000, 2_000_000), _frozen,
        total, "s", target=0.3, repeats=3,
    ),
    "resume": Part(
        "waiting groups resumed", "tokens", (125_000, 500_000, 2_000_000), _resume,
        total, "s", target=3.0, while_training=False, repeats=7,
    ),
    "packing": Part(
        "first-fit decreasing", "groups", (1_024, 4_096, _MOST_PACKED), _packing,
        total, "s", repeats=7,
    ),
    "curriculum": Part(
        "1,000 draws by pass rate", "problems", (10_000, 100_000, 1_000_000), _draws, total, "s"
    ),
}  # fmt: skip
