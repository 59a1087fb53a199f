"""Samples with a seed for each request where SGLang itself cannot: on a CPU.

SGLang honors seeds in its deterministic mode only, which needs a GPU. Two hooks for SGLang's registry of
hooks give the samplers of a CPU the seeds of their requests, and a way to draw with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.inference.noise import INCREMENT, mixed

# The logarithm of noise must be finite.
_LEAST = torch.finfo(torch.float32).tiny


def register() -> None:
    """Register the hooks. SGLang applies them in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batch, _give_seeds, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw, HookType.REPLACE)


def _give_seeds(info: Any, kind: type, batch: Any, *more: Any, **named: Any) -> None:
    """Give a batch's sampling parameters the seeds of its requests; see :func:`register`."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    # A request without a seed is a greedy one, or one of the probe: any will do.
    info.sampling_seed = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64)


def draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row, which depends on the row, its seed and its position alone.

    The token with the largest sum of log-probability and noise is drawn from the distribution. Rounding of
    the log-probabilities hardly ever changes which one that is.

    Args:
        log_probs: ``[N, V]``; they need not be normalized.
        seeds: ``[N]`` int64.
        positions: ``[N]``, position of the token in its sequence.

    Returns:
        Tokens ``[N, 1]`` int64.
    """
    generator = torch.Generator()
    noise = torch.empty(log_probs.shape)
    for row, seed in zip(noise, noise_seeds(seeds, positions).tolist(), strict=True):
        row.exponential_(generator=generator.manual_seed(seed))
    return (log_probs - noise.clamp_(min=_LEAST).log_()).argmax(1, keepdim=True)


def noise_seeds(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return seeds ``[N]`` int64 of the noise of each row, one for each pair of seed and position."""
    return mixed(mixed(seeds.long() + INCREMENT) + (positions.long() + 1) * INCREMENT)
