"""The engine of one training rank, which generates this rank's part of the prompts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from torchrl_grpo.batch.micro_batches import partition_balanced
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine

# Responses by the keys of their requests.
Completions = dict[Hashable, Completion]


class RankEngine:
    """This rank's engine in a :class:`~torchrl_grpo.training.data_parallel_engine.DataParallelEngine`.

    Every rank calls every method, in the same order.

    Args:
        engine: engine of this rank alone.
        ranks: this process's place among the training ranks.
        device: device on which weights are received.
    """

    def __init__(self, engine: SteppingEngine, ranks: Ranks, device: torch.device) -> None:
        self.engine = engine
        self.ranks = ranks
        self.device = device
        # On rank 0: the tensor that update() gives to all.
        self.outgoing: Tensor | None = None

    def answer(self, requests: Sequence[Request]) -> Completions:
        """Generate the whole responses to this rank's part of the requests.

        Every rank gets the same requests. Those of a prompt are adjacent, and stay together.

        Returns:
            The responses of all ranks on rank 0, and none on the others.
        """
        prompts = [list(group) for _, group in itertools.groupby(requests, key=_prompt_of)]
        costs = [len(group[0].tokens) + sum(request.max_new_tokens for request in group) for group in prompts]
        mine = partition_balanced(costs, self.ranks.size)[self.ranks.rank]
        own = [request for number in mine for request in prompts[number]]
        if own:
            self.engine.submit(own)
        completions: Completions = {}
        while len(completions) < len(own):
            completions.update(self.engine.step())
        return {key: value for part in self.ranks.gather_to_main(completions) for key, value in part.items()}

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.engine.locate_weights(shapes)

    def start_update(self) -> None:
        self.engine.start_update()

    def update(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Load a parameter that rank 0 sends to all ranks.

        Args:
            name: name of the parameter.
            shape: shape of the tensor.
            dtype: dtype of the tensor.
        """
        own = self.outgoing
        tensor = torch.empty(shape, dtype=dtype, device=self.device) if own is None else own
        self.engine.update([(name, self.ranks.broadcast(tensor))])

    def finish_update(self) -> None:
        self.engine.finish_update()

    def checksums(self) -> tuple[Checksums, ...]:
        """On rank 0: see :meth:`Engine.checksums`; one entry for each rank."""
        by_rank = self.ranks.gather_to_main(self.engine.checksums())
        return tuple(checksums for rank in by_rank for checksums in rank)

    def next_tokens(self, probe: Probe) -> ProbeResult:
        """See :meth:`Engine.next_tokens`; the rows of all ranks are concatenated."""
        results = self.ranks.gather(self.engine.next_tokens(probe))
        return ProbeResult(
            torch.cat([result.token_ids for result in results]),
            torch.cat([result.log_probs for result in results]),
            max(result.cached_tokens for result in results),
        )

    def reset_cache(self) -> None:
        self.engine.reset_cache()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()


def _prompt_of(request: Request) -> Hashable:
    """Return what the keys of a prompt's requests share. They end in the number of the sample."""
    assert isinstance(request.key, tuple)
    return request.key[:-1]
