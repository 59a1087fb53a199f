"""Builds the engine that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import load_built_in
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.planning.plan import SHARED_GPU


class EngineOptions(TypedDict):
    """Named arguments of :func:`build_engine`, for functions that take its place or pass them on."""

    eos_token_ids: Sequence[int]
    pad_token_id: int
    max_num_seqs: int
    sleeps: bool
    gpu_memory_utilization: float


def build_engine(
    cfg: Config,
    source: str,
    device: torch.device,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    max_num_seqs: int,
    sleeps: bool = False,
    gpu_memory_utilization: float = SHARED_GPU,
) -> SteppingEngine:
    """Build the engine of ``inference_model.backend`` on ``device`` with the weights at ``source``.

    Args:
        cfg: configuration of the run.
        source: folder or hub name of the model.
        device: device of the engine.
        eos_token_ids: tokens that end a response.
        pad_token_id: token that fills the left of short prompts.
        max_num_seqs: largest number of responses decoded at a time.
        sleeps: whether :meth:`Engine.sleep` will be called.
        gpu_memory_utilization: share of the GPU's memory that the engine takes; unused on a CPU.
    """
    path = cfg.inference_model.engine.build
    assert path is not None, "the planner builds engines that have servers in servers only"
    build: Callable[..., SteppingEngine] = load_built_in(path)
    return build(
        cfg,
        source,
        device,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        max_num_seqs=max_num_seqs,
        sleeps=sleeps,
        gpu_memory_utilization=gpu_memory_utilization,
    )
