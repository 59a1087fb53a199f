"""Publishers of whole models, for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchrl_grpo.inference.protocol import Engine
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.weight_sync.publisher import WeightPublisher


def make_publisher(
    model: Any, engine: Engine, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> WeightPublisher:
    """A publisher of ``model`` to an engine with weights in ``dtype``."""
    return WeightPublisher(
        model,
        TokenScorer(model),
        engine=engine,
        probe_prompts=prompts,
        pad_token_id=2,
        precision=dtype,
        engine_dtype=dtype,
    )
