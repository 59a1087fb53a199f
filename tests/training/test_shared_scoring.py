"""Ranks that share a batch: each gets its own groups and no others, and sends only what it has computed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import assert_same_groups, make_batch, ragged, size_in_bytes
from tensordict import TensorDictBase

from torchrl_grpo.batch.micro_batches import MicroBatch, Share, TokenBudget
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

    def gather_to_main(self, value: Any) -> list[Any]:
        received = self.gather(value)
        return received if self.rank == 0 else []

    def all_reduce_max(self, value: int) -> int:
        return int(max(self.gather(value)))


class MainRank(Ranks):
    """Rank 0, which sends shares to the others as messages, and keeps them."""

    others: Sequence[Any]
    messages: Sequence[bytes]

    def call_each(
        self, function: Callable[..., Any], target: Any, shares: Sequence[Share], *arguments: Any
    ) -> Any:
        self.messages = [pickle.dumps(share) for share in shares]
        received = [pickle.loads(message) for message in self.messages]
        with ThreadPoolExecutor(self.size) as threads:
            results = list(
                threads.map(
                    lambda rank, share: function(rank, share, *arguments), [target, *self.others], received
                )
            )
        assert [len(result) for result in results] == [self.size] + [0] * (self.size - 1)
        return results[0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_scores_its_own_share(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged(make_batch(P=4, T=9))
    scored: list[int] = []

    def score(network: Any, piece: TensorDictBase) -> torch.Tensor:
        ids: torch.Tensor = piece["tokens", "response"].float() * piece["masks", "response"]
        scored.append(len(piece))
        return ids

    monkeypatch.setattr(learner, "score_piece", score)
    boxes: list[Any] = [None] * size
    together = threading.Barrier(size)
    main = MainRank(0, boxes, together)
    members: list[Any] = [
        SimpleNamespace(
            ranks=main if rank == 0 else Ranks(rank, boxes, together),
            network=torch.nn.Linear(1, 1),
            _budgets={"policy": TokenBudget(10**6, True, print)},
        )
        for rank in range(size)
    ]
    main.others = members[1:]
    results = Learner.log_probs(members[0], batch)
    assert len(results) == 4
    for result, group in zip(results, batch, strict=True):
        assert torch.equal(result, group["tokens", "response"].float() * group["masks", "response"])
    # With five ranks, one takes part with a response that counts for nobody.
    assert sum(scored) == max(4, size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_share_has_its_own_groups_and_travels_without_the_others(ranks: int) -> None:
    batch = ragged(make_batch(P=5, G=3, L=9, T=4000))
    budget = TokenBudget(10**6, True, print)
    kinds = [[0, 3], [1, 4]]
    shares = budget.divide(batch, ranks, kinds)
    assert sorted(row for share in shares for row in share.rows) == [0, 1, 3, 4]
    # Each kind is divided by itself.
    assert all(sum(row in kind for row in share.rows) <= 1 for share in shares for kind in kinds if ranks > 1)
    for share in shares:
        message = pickle.dumps(share)
        received = pickle.loads(message)
        assert received.rows == share.rows
        own = batch[share.rows] if share.rows else MicroBatch((0,), slice(0, 1)).select(batch)
        assert_same_groups(received.groups, own)
        # Nothing of another rank's groups, which are ten times as large as what a message has besides.
        assert len(message) < 1.05 * size_in_bytes(own) + 20_000
