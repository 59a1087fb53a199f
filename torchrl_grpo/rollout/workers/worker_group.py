"""All workers as one engine: each gets the weights, and an evaluation is divided among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchrl_grpo.inference.protocol import Completion, Engine, Inference, Probe, Sampling
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.types import GenerateForEval, TrainerWeights, WorkerDelivery


class WorkerGroup(Inference):
    """Workers behind a dispatcher.

    Args:
        dispatcher: dispatcher that calls them; started here and closed with the group.
        local_engine: engine of the worker, if it is in the trainer's process; otherwise None.
    """

    def __init__(self, dispatcher: Dispatcher, local_engine: Engine | None = None) -> None:
        self.dispatcher = dispatcher
        self.local_engine = local_engine
        try:
            dispatcher.start()
        except BaseException:
            dispatcher.close()
            raise

    @property
    def name(self) -> str:
        return super().name if self.local_engine is None else self.local_engine.name

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.dispatcher.scheduler.workers)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> WorkerDelivery:
        """Send weights to every worker.

        When this returns, the caller may change its weights: they were copied, or every worker that is up
        has loaded them. Every such worker has if workers read the trainer's own memory, and if none may
        generate with older weights (a largest age of 0, or None where collection and training take turns).
        A worker that is starting again is not waited for, unless it is the only one.
        """
        pool = self.dispatcher.pool
        if pool.overwrites:
            self.dispatcher.block_loading()
        delivery = WorkerDelivery(pool.put_weights(weights), probe)
        self.dispatcher.publish(delivery, version)
        reads_own = isinstance(delivery.content, TrainerWeights)
        if reads_own:
            # Afterwards every free worker has been told to load, so one pass over the weights serves all.
            self.dispatcher.run_in_thread(lambda: None)
        if reads_own or not self.dispatcher.scheduler.tracker.max_age:
            self.dispatcher.serve_until(delivery.all_loaded_future)
            delivery.wait()
        return delivery

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """See :meth:`Inference.generate`; every worker takes a share."""
        share = -(-len(prompts) // self.size)
        jobs = []
        for start in range(0, len(prompts), share):
            chosen = range(start, min(start + share, len(prompts)))
            jobs.append(GenerateForEval([prompts[number] for number in chosen], sampling.select(chosen)))
        return [group for part in self.dispatcher.run_tasks(jobs) for group in part]

    def close(self) -> None:
        self.dispatcher.close()
