"""Types that the dispatcher shares with pools and workers: commands, publications and statistics."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchrl_grpo.inference.protocol import Probe, ProbeResult, Sampling
from torchrl_grpo.rollout.groups import Group, ReferenceLogProbs


class ReferenceClient(Protocol):
    """Client of the reference model in separate processes. Only the dispatcher's thread calls it."""

    def log_probs(self, group: Group) -> Future[ReferenceLogProbs]:
        """Start to compute a finished group's log-probabilities; the future gets them, or WorkersLost."""

    def deadline(self) -> float:
        """Next deadline by the monotonic clock; infinite if no request is open."""

    def restart_timed_out(self) -> None:
        """Restart timed-out processes and resend their requests."""


@dataclass(frozen=True)
class GenerateGroups:
    """Command: generate until a group has finished or half a second is over.

    Attributes:
        groups: groups to take on: new ones, or interrupted ones to be continued.
        dropped: numbers of groups that the worker should stop generating.
    """

    groups: Sequence[Group]
    dropped: Sequence[int]


@dataclass(frozen=True)
class LoadWeightsCommand:
    """Command: load new weights between two tokens, and return a probe result.

    The dispatcher makes it from the scheduler's ``LoadWeights``.

    Attributes:
        content: weights, in the form in which the pool transfers them.
        version: number of optimizer steps that produced these weights.
        probe: prompts of the probe.
        return_interrupted: whether to return the groups that are interrupted, in place of continuing them.
    """

    content: Any
    version: int
    probe: Probe
    return_interrupted: bool


@dataclass(frozen=True)
class GenerateForEval:
    """Command: generate responses to prompts that belong to no group, for an evaluation.

    Attributes:
        prompts: token ids of each prompt.
        sampling: number, length and seeds of the responses.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling


Command = GenerateGroups | LoadWeightsCommand | GenerateForEval


class Pool(Protocol):
    """Starts, calls and ends workers. ``done`` gets a result or an exception, and may run in any thread."""

    @property
    def overwrites(self) -> bool:
        """Whether :meth:`put_weights` overwrites the previous weights. No worker may load weights then."""

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        """Start worker ``worker_index``, in place of an earlier one."""

    def call(self, worker_index: int, command: Command, done: Callable[[Any], None]) -> None:
        """Have worker ``worker_index`` run a command: see ``RolloutWorker.run``."""

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        """Bring weights into the form in which the pool transfers them, once for all workers."""

    def kill(self, worker_index: int) -> None:
        """End worker ``worker_index`` at once; an open call may stay unanswered."""

    def close(self) -> None:
        """Shut all workers down cleanly."""


@runtime_checkable
class TrainerWeights(Protocol):
    """The trainer's own weights, which it sends to each worker that asks for them.

    A publication with this content needs no copy of the model.
    """

    def open(self) -> None:
        """Let workers ask for the weights from now on."""

    def postpone(self) -> None:
        """Refuse workers that wait for the weights; they fail with ``TransferPostponed``."""

    def send_until(self, until: Future[Any]) -> None:
        """Send the weights to workers that ask for them, in the calling thread, until a future is done."""


@dataclass
class WorkerDelivery:
    """A weight update in progress, sent to all workers that are up.

    It is a :class:`~torchrl_grpo.weight_sync.transport.Delivery`.

    Attributes:
        content: weights, in the form in which the pool transfers them; None once newer ones are published.
        probe: prompts of the probe that each worker runs with the new weights.
        results_queue: probe result and checksums of each worker that has loaded the weights, in order of
            arrival.
        all_loaded_future: future that is done when every worker that is up has loaded the weights, and at
            least one is up. A worker that is starting again loads them later, if none are newer by then.
    """

    content: Any
    probe: Probe
    results_queue: queue.SimpleQueue[ProbeResult] = field(default_factory=queue.SimpleQueue)
    all_loaded_future: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        """Block until every worker that is up has loaded the weights, and at least one is up.

        Raises:
            WorkersLost: workers failed too often.
        """
        self.all_loaded_future.result()

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
