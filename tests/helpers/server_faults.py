"""Faults on the way of weights to a server, which the proof of weights must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.servers.engine import ServerEngine
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.weight_sync.publisher import WeightPublisher


def assert_faults_are_found(
    publisher: WeightPublisher,
    trained: nn.Module,
    older_buckets: Sequence[Bucket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that misses a tensor, or gets an older bucket, is found. The next publication is right."""
    honest = ServerEngine._call
    for what in ("a tensor is skipped", "an older bucket"):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.001)
        count = iter(range(100))

        def call(self: ServerEngine, method: str, **arguments: Any) -> list[Any]:
            if method == "grpo_load" and next(count) == 1:  # noqa: B023  called before the next round
                bucket = Bucket.from_json(arguments["bucket"])
                left = Bucket(bucket.path, bucket.entries[1:])
                arguments["bucket"] = (left if what == "a tensor is skipped" else older_buckets[1]).to_json()  # noqa: B023
            return honest(self, method, **arguments)

        monkeypatch.setattr(ServerEngine, "_call", call)
        with pytest.raises(TrainingStopped, match=r"after publishing version 2, .* are not the trainer's"):
            publisher.publish(2)
        monkeypatch.setattr(ServerEngine, "_call", honest)
        publisher.publish(3)
