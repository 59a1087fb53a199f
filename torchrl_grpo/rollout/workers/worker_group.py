"""All workers as one engine: each gets the weights, and an evaluation is divided among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from torchrl_grpo.inference.protocol import Completion, Inference, Probe, ProbeResult, Sampling
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.types import GenerateForEval, TrainerWeights, WorkerDelivery
from torchrl_grpo.weight_sync.transport import concatenate_results


class WorkerGroup(Inference):
    """Workers behind a dispatcher.

    Args:
        dispatcher: dispatcher that calls them; started here and closed with the group.
        put_weights: function that converts weights to the form that the pool transfers, once for all workers.
        overwrites: whether this form takes the place of the one before, so that no worker may be reading it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        put_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
        overwrites: bool = False,
    ) -> None:
        self.dispatcher = dispatcher
        self._put_weights = put_weights
        self._overwrites = overwrites
        try:
            dispatcher.start()
        except BaseException:
            dispatcher.close()
            raise

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.dispatcher.scheduler.workers)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> WorkerDelivery:
        """Send weights to every worker.

        They have been copied when this returns, or every worker has them, so the caller's may change.
        """
        if self._overwrites:
            self.dispatcher.block_loading()
        delivery = WorkerDelivery(self._put_weights(weights), probe)
        self.dispatcher.publish(delivery, version)
        if isinstance(delivery.content, TrainerWeights):
            # When this returns, every free worker has been told to load. So one pass is enough for all.
            self.dispatcher.run_in_thread(lambda: None)
            self.dispatcher.send_weights_until(delivery.all_loaded_future)
            delivery.wait()
        return delivery

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> ProbeResult:
        """See :meth:`Inference.publish`; waits until every worker has returned its probe result."""
        delivery = self.send(weights, version, probe)
        delivery.wait()
        return concatenate_results(delivery.new_results())

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """See :meth:`Inference.generate`; every worker takes a share."""
        share = -(-len(prompts) // self.size)
        jobs = []
        for start in range(0, len(prompts), share):
            chosen = range(start, min(start + share, len(prompts)))
            jobs.append(GenerateForEval([prompts[number] for number in chosen], sampling.select(chosen)))
        return [group for part in self.dispatcher.run_tasks(jobs) for group in part]

    def close(self) -> None:
        """See :meth:`Inference.close`."""
        self.dispatcher.close()
