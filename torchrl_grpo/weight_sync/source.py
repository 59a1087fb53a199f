"""Where published weights come from: a module, or a model in shards that is gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class NextTokenScorer(Protocol):
    """Computes the trainer's own log-probabilities of the next token for a probe."""

    def next_token_log_probs(self, prompt: Tensor, prompt_mask: Tensor) -> Tensor:
        """See :meth:`~torchrl_grpo.models.scoring.token_scorer.TokenScorer.next_token_log_probs`."""


class ShardedWeights(Protocol):
    """A model in shards on several ranks, seen from rank 0 as if it were whole."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters, one at a time."""

    def scale_columns(self, factor: float) -> None:
        """Multiply every eighth column of every parameter, on every rank."""
