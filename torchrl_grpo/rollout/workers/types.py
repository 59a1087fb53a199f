"""Types that the dispatcher shares with pools and workers: commands, publications and statistics."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchrl_grpo.inference.protocol import Probe, ProbeResult, Sampling
from torchrl_grpo.rollout.groups import Group, UnderReference


class Reference(Protocol):
    """The reference model in processes of its own. Called from the dispatcher's thread only."""

    def score(self, group: Group) -> Future[UnderReference]:
        """Start scoring a finished group; the future gets its log-probabilities, or WorkersLost."""

    def deadline(self) -> float:
        """Next deadline by the monotonic clock; infinite if no request is open."""

    def give_up_on_silent(self) -> None:
        """Restart timed-out processes and resend their requests."""


@dataclass(frozen=True)
class Work:
    """Command: generate until a group has finished or half a second is over.

    Attributes:
        groups: groups to take on: new ones, or interrupted ones to be continued.
        dropped: numbers of groups that nobody wants any more.
    """

    groups: Sequence[Group]
    dropped: Sequence[int]


@dataclass(frozen=True)
class TakeWeights:
    """Command to a worker: take new weights between two tokens, and return a probe result.

    The scheduler's ``Load`` becomes this command when the worker is called.

    Attributes:
        content: weights, as the pool ships them.
        version: number of optimizer steps that produced these weights.
        probe: prompts of the probe.
        give_back: whether to return the groups that are interrupted, in place of continuing them.
    """

    content: Any
    version: int
    probe: Probe
    give_back: bool


@dataclass(frozen=True)
class Generate:
    """Command: answer prompts beside the groups, for an evaluation.

    Attributes:
        prompts: token ids of each prompt.
        sampling: number, length and seeds of the responses.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling


Command = Work | TakeWeights | Generate


class Pool(Protocol):
    """Where workers live. ``done`` is called from any thread, with a result or an exception."""

    def start(self, number: int, done: Callable[[Any], None]) -> None:
        """Start worker ``number``, in place of an earlier one."""

    def call(self, number: int, command: Command, done: Callable[[Any], None]) -> None:
        """Have worker ``number`` run a command: see ``RolloutWorker.run``."""

    def kill(self, number: int) -> None:
        """End worker ``number`` at once; an open call may stay unanswered."""

    def close(self) -> None:
        """End all workers in good order."""


@dataclass
class Publication:
    """Weights on their way to the workers: a :class:`~torchrl_grpo.weight_sync.transport.Delivery`.

    Attributes:
        content: what a worker is handed.
        probe: prompts of the probe that each worker runs with the new weights.
        results_queue: probe result and checksums of each worker that has loaded the weights, in order of
            arrival.
        arrived: done when every worker has taken the weights.
    """

    content: Any
    probe: Probe
    results_queue: queue.SimpleQueue[ProbeResult] = field(default_factory=queue.SimpleQueue)
    arrived: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        """Block until every worker has taken the weights.

        Raises:
            WorkersLost: workers failed too often.
        """
        self.arrived.result()

    def new_results(self) -> Iterator[ProbeResult]:
        """Probe results that have arrived and were not returned before."""
        while True:
            try:
                yield self.results_queue.get_nowait()
            except queue.Empty:
                return


@dataclass
class WorkerStats:
    """Totals over the run so far.

    Attributes:
        tokens: tokens sampled, by worker.
        seconds: seconds spent generating, by worker.
        score_seconds: seconds spent in rewards.
        restarts: number of workers replaced.
    """

    tokens: list[int]
    seconds: list[float]
    score_seconds: float = 0.0
    restarts: int = 0
