"""What every engine promises: generate, take weights, answer a probe, sleep and wake, close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        num_samples: responses per prompt.
        max_new_tokens: length bound in tokens, the end token included.
        temperature: 0 is greedy.
        seeds: one seed per prompt; equal weights, prompts and seeds give equal responses, whatever was
            generated before. Not needed when greedy.
    """

    num_samples: int
    max_new_tokens: int
    temperature: float
    seeds: Sequence[int] | None = None


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        token_ids: the response, its end token included where it has one.
        log_probs: natural logarithm, per token, of the distribution the token was sampled from,
            that is at the sampling temperature (at temperature 0: of the unscaled distribution).
        finish_reason: ``"stop"`` at an end token, ``"length"`` at the bound.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class NextTokens:
    """The engine's view of what comes after each probe prompt.

    Attributes:
        token_ids: ``[N, K]`` int64, the K likeliest next tokens.
        log_probs: ``[N, K]`` float32, at temperature 1.
        cached_tokens: tokens of the first prompt that were served from a prefix cache.
    """

    token_ids: Tensor
    log_probs: Tensor
    cached_tokens: int


class Engine(ABC):
    """Generates with its own copy of the weights.

    Attributes:
        policy_version: version of the weights held, set by whoever publishes them.
    """

    policy_version: int = 0

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.num_samples`` completions for each of ``prompts`` (token ids), in order."""

    @abstractmethod
    def next_tokens(self, prompts: Sequence[Sequence[int]], top_k: int) -> NextTokens:
        """The ``top_k`` likeliest next tokens after each prompt, through the cache of :meth:`generate`."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by ``(name, tensor)`` pairs in the names of the Hugging Face model."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every key/value state computed so far."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory of weights and caches back; the weights are lost."""

    @abstractmethod
    def wake(self) -> None:
        """Take the memory again. Weights must be loaded before the next :meth:`generate`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
