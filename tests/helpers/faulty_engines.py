"""Engines that weights do not reach whole, and what they are probed with."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from batches import VOCAB
from torch import Tensor

from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.weight_sync.probe import probe_prompts

Weights = Iterable[tuple[str, Tensor]]


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    system = [9, 8, 7, 6, 5, 4]
    return probe_prompts([system + torch.randint(3, VOCAB, (20,), generator=g).tolist() for _ in range(4)])


class EngineIgnores(TransformersEngine):
    """Goes through the list after the first few calls and takes nothing."""

    calls = 0

    def update(self, weights: Weights) -> None:
        self.calls += 1
        if self.calls <= 2:
            super().update(weights)
        else:
            list(weights)


class LoadsIntoACopy(TransformersEngine):
    """The weights go into a model that does not answer."""

    def update(self, weights: Weights) -> None:
        own, self.model = self.model, copy.deepcopy(self.model)
        super().update(weights)
        self.model = own
