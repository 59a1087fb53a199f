"""What a publication expects of an engine, and how far the engine's log-probabilities are from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import ProbeResult


@dataclass(frozen=True)
class ExpectedResult:
    """Checksums and log-probabilities expected from an engine that loaded one version of the weights.

    Attributes:
        version: number of optimizer steps that produced the weights.
        trainer_log_probs: the trainer's log-probabilities ``[N, V]`` of the token after each probe prompt.
        checksums: checksums of the weights in the engine's dtype.
    """

    version: int
    trainer_log_probs: Tensor
    checksums: Checksums


@dataclass(frozen=True)
class LogProbDiff:
    """Absolute differences of log-probabilities between the engine and the trainer, in nats.

    Attributes:
        mean: mean over the likeliest tokens after the probe prompts.
        p99: 99th percentile.
        largest: largest difference.
    """

    mean: float
    p99: float
    largest: float

    @classmethod
    def between(
        cls, trainer_log_probs: Tensor, result: ProbeResult, rows: Tensor | None = None
    ) -> LogProbDiff:
        """Compare the trainer's log-probabilities ``[N, V]`` with a probe result.

        The result may hold the rows of several engines, concatenated. All differences are NaN if one of them
        is not finite.

        Args:
            trainer_log_probs: ``[N, V]``.
            result: probe result of one or several engines.
            rows: ``[N]`` bool, True on the prompts that are compared; None for all.
        """
        engines = len(result.token_ids) // len(trainer_log_probs)
        diff = (trainer_log_probs.repeat(engines, 1).gather(1, result.token_ids) - result.log_probs).abs()
        diff = (diff if rows is None else diff[rows.repeat(engines)]).flatten()
        if not bool(diff.isfinite().all()):
            return cls(math.nan, math.nan, math.nan)
        return cls(float(diff.mean()), float(diff.quantile(0.99)), float(diff.max()))
