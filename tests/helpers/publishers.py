"""Publishers of whole models, for tests of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.inference.protocol import Inference, Probe, ProbeResult, PromptPictures
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.weight_sync.publisher import WeightPublisher


class Direct:
    """A transport to one engine, which has loaded the weights when :meth:`send` returns."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.results: list[ProbeResult] = []

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Direct:
        delivery = Direct(self.engine)
        delivery.results.append(self.engine.publish(weights, version, probe))
        return delivery

    def wait(self) -> None:
        """It has arrived."""

    def new_results(self) -> Iterator[ProbeResult]:
        while self.results:
            yield self.results.pop()


def make_publisher(
    model: Any,
    engine: Inference,
    prompts: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    processor: PictureProcessor | None = None,
    pictures: Sequence[PromptPictures | None] | None = None,
) -> WeightPublisher:
    """A publisher of ``model`` to an engine with weights in ``dtype``."""
    return WeightPublisher(
        model,
        TokenScorer(model, pictures=processor),
        engine=engine,
        probe_prompts=prompts,
        probe_pictures=pictures,
        pad_token_id=2,
        precision=dtype,
        engine_dtype=dtype,
        transport=Direct(engine),
    )
