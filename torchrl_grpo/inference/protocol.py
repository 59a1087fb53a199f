"""What every engine promises: generate, token by token if need be; take weights, answer a probe, close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchrl_grpo.inference.checksums import Checksums


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        num_samples: responses per prompt.
        max_new_tokens: length bound in tokens, the end token included.
        temperature: 0 is greedy.
        seeds: one seed per prompt; equal weights, prompts and seeds give equal responses, whatever was
            generated before. Not needed when greedy.
        ignore_end: go on past end tokens to ``max_new_tokens``, so that measurements have equal lengths.
    """

    num_samples: int
    max_new_tokens: int
    temperature: float
    seeds: Sequence[int] | None = None
    ignore_end: bool = False


@dataclass(frozen=True)
class Request:
    """One response that is asked for.

    Attributes:
        key: names it among those in the engine.
        tokens: the prompt, and what has been generated of the response already.
        max_new_tokens: tokens still to come at most.
        temperature: 0 is greedy.
        seed: of the tokens to come; None takes any.
        ignore_end: go on past end tokens.
    """

    key: Hashable
    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int | None = None
    ignore_end: bool = False


@dataclass(frozen=True)
class Completion:
    """One response, or its continuation.

    Attributes:
        token_ids: the response, its end token included where it has one.
        log_probs: natural logarithm, per token, of the distribution the token was sampled from,
            that is at the sampling temperature (at temperature 0: of the unscaled distribution).
        finish_reason: ``"stop"`` at an end token, ``"length"`` at the bound, ``"withdrawn"`` where it was
            taken out of the engine before either.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class Probe:
    """A question whose answer shows which weights an engine holds, and how it computes with them.

    Attributes:
        prompts: token ids; N of them. What comes after each?
        top_k: K, how many of the likeliest next tokens are asked for.
        shapes: of all published tensors by name. Engines read checksums of these.
    """

    prompts: Sequence[Sequence[int]]
    top_k: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class NextTokens:
    """The engine's view of what comes after each prompt of a :class:`Probe`.

    Attributes:
        token_ids: ``[N, K]`` int64, the K likeliest next tokens.
        log_probs: ``[N, K]`` float32, at temperature 1.
        cached_tokens: tokens of the first prompt that were served from a prefix cache.
        checksums: of the weights that each engine computes with, one for each engine; none where
            :meth:`Engine.next_tokens` was asked alone.
        before: the answer of an engine that had taken no weights yet, but those it was built with; None
            later.
    """

    token_ids: Tensor
    log_probs: Tensor
    cached_tokens: int
    checksums: tuple[Checksums, ...] = ()
    before: NextTokens | None = None


class Inference(ABC):
    """What training asks of whatever generates, one engine or many workers.

    Attributes:
        policy_version: version of the weights held, set by whoever publishes them.
    """

    policy_version: int = 0

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.num_samples`` completions for each of ``prompts`` (token ids), in order."""

    @abstractmethod
    def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        probe: Probe,
    ) -> NextTokens:
        """Take the weights of ``version`` and answer a probe with them: see :meth:`Engine.next_tokens`.

        The answers of several workers stand below one another, and each has its checksums.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; it cannot be used afterwards."""


class Engine(Inference):
    """Generates with its own copy of the weights."""

    _learned = False

    @abstractmethod
    def next_tokens(self, probe: Probe) -> NextTokens:
        """The likeliest next tokens after each prompt of ``probe``, through the cache of :meth:`generate`."""

    @abstractmethod
    def start_update(self) -> None:
        """Begin to replace the weights."""

    @abstractmethod
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take ``(name, tensor)`` pairs in the names of the Hugging Face model; called once or more."""

    @abstractmethod
    def finish_update(self) -> None:
        """End what :meth:`start_update` began; only now may the engine compute again."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by ``(name, tensor)`` pairs in the names of the Hugging Face model."""
        self.start_update()
        self.update(weights)
        self.finish_update()

    @abstractmethod
    def learn(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find out where published tensors of these names and shapes lie, at the first publication.

        The engine may lose its weights by that; they are loaded afterwards.
        """

    @abstractmethod
    def checksums(self) -> tuple[Checksums, ...]:
        """Of the weights that this engine computes with, as they are now; one entry for each engine."""

    def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        probe: Probe,
    ) -> NextTokens:
        """See :meth:`Inference.publish`."""
        before = None
        if not self._learned:
            self.reset_cache()
            before = self.next_tokens(probe)
            self.learn(probe.shapes)
            self._learned = True
        self.load_weights(weights)
        self.reset_cache()
        answer = self.next_tokens(probe)
        self.policy_version = version
        return replace(answer, checksums=self.checksums(), before=before)

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every key/value state computed so far."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory of weights and caches back; the weights are lost."""

    @abstractmethod
    def wake(self) -> None:
        """Take the memory again. Weights must be loaded before the next :meth:`generate`."""


class SteppingEngine(Engine):
    """An engine that is driven token by token, so that responses come and go while others are generated."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to those that :meth:`step` works on. Siblings stand side by side."""

    @abstractmethod
    def step(self) -> list[tuple[Hashable, Completion]]:
        """Sample the next token of the requests being worked on; returns those that ended with it."""

    @abstractmethod
    def withdraw(self) -> dict[Hashable, Completion]:
        """Take every request out that has not ended, with the tokens it has; weights may then change."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.num_samples`` completions for each of ``prompts`` (token ids), in order.

        Nothing else may be in the engine.
        """
        requests = requests_of(prompts, sampling)
        self.submit(requests)
        found: dict[Hashable, Completion] = {}
        while len(found) < len(requests):
            found.update(self.step())
        return [[found[p, g] for g in range(sampling.num_samples)] for p in range(len(prompts))]


def requests_of(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
    """A request for each sample, its key ``(prompt, sample)``; a sample's number is added to its seed."""
    return [
        Request(
            (number, sample),
            prompt,
            sampling.max_new_tokens,
            sampling.temperature,
            None if sampling.seeds is None else sampling.seeds[number] + sample,
            sampling.ignore_end,
        )
        for number, prompt in enumerate(prompts)
        for sample in range(sampling.num_samples)
    ]
