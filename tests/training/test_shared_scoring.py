"""Ranks that score parts of a round: each gets the whole, and sends only what it has computed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import make_batch
from tensordict import TensorDictBase

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.training import learner
from torchrl_grpo.training.learner import Learner


class Ranks:
    """One of several ranks, which are threads of the test."""

    def __init__(self, rank: int, boxes: list[Any], together: threading.Barrier) -> None:
        self.rank, self.size = rank, len(boxes)
        self._boxes, self._together = boxes, together

    def gather(self, value: Any) -> list[Any]:
        self._boxes[self.rank] = value
        self._together.wait(60)
        received = list(self._boxes)
        self._together.wait(60)
        return received

    def all_reduce_max(self, value: int) -> int:
        return int(max(self.gather(value)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_gets_all_log_probs_and_sends_its_own(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    sent: list[int] = []

    def score(network: Any, piece: TensorDictBase) -> torch.Tensor:
        ids: torch.Tensor = piece["tokens", "response"].float() * piece["masks", "response"]
        return ids

    monkeypatch.setattr(learner, "score_piece", score)
    boxes: list[Any] = [None] * size
    together = threading.Barrier(size)

    def log_probs(rank: int) -> torch.Tensor:
        ranks = Ranks(rank, boxes, together)
        gather = ranks.gather

        def counted(value: Any) -> list[Any]:
            if isinstance(value, list):
                sent.append(sum(scored.numel() for _, scored in value))
            return gather(value)

        ranks.gather = counted  # type: ignore[method-assign]
        fake: Any = SimpleNamespace(
            ranks=ranks, network=torch.nn.Linear(1, 1), budget=TokenBudget(16, True, print)
        )
        return Learner.log_probs(fake, batch)

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(log_probs, range(size)))
    expected = batch["tokens", "response"].float() * batch["masks", "response"]
    assert all(torch.equal(result, expected) for result in results)
    assert sum(sent) <= expected.numel()
