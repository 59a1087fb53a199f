"""Engine interfaces: generation, weight updates and probes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.inference.checksums import Checksums


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of a prompt.

    Attributes:
        files: encoded pictures, in the order of their tokens; empty for a prompt of text.
        written: token ids of the prompt as the chat template writes it, with one mark per picture.
        tokens: number of tokens of the prompt with all tokens of its pictures.
        blocked: tokens that stand for pictures and videos, which no response may have.
    """

    files: tuple[bytes, ...]
    written: tuple[int, ...]
    tokens: int
    blocked: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        num_samples: number of responses per prompt.
        max_new_tokens: largest number of tokens of a response, its end token included.
        temperature: sampling temperature; 0 is greedy.
        seeds: one seed per prompt. Equal weights, prompts and seeds give equal responses, whatever was
            generated before. Not needed at temperature 0.
        ignore_eos: whether to ignore end tokens and generate ``max_new_tokens``, for benchmarks.
        problems: one problem per prompt, for episodes of several turns; None if a response is one turn.
        pictures: pictures of each prompt; None for a model of text.
    """

    num_samples: int
    max_new_tokens: int
    temperature: float
    seeds: Sequence[int] | None = None
    ignore_eos: bool = False
    problems: Sequence[Example] | None = None
    pictures: Sequence[PromptPictures | None] | None = None

    def select(self, rows: Sequence[int]) -> Sampling:
        """Return how to sample for some of the prompts only.

        Args:
            rows: positions of these prompts.
        """
        seeds = None if self.seeds is None else [self.seeds[row] for row in rows]
        problems = None if self.problems is None else [self.problems[row] for row in rows]
        pictures = None if self.pictures is None else [self.pictures[row] for row in rows]
        return replace(self, seeds=seeds, problems=problems, pictures=pictures)


@dataclass(frozen=True)
class Request:
    """A request for one response.

    Attributes:
        key: identifier, unique in the engine.
        tokens: the prompt and the tokens of the response generated so far.
        max_new_tokens: largest number of tokens to generate.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of the tokens to generate; None lets the engine choose one.
        ignore_eos: whether to ignore end tokens and generate ``max_new_tokens``.
        problem: problem of the episode that the request begins or continues; None for a response of one turn.
        stop_token_ids: tokens that end this response beside the model's end tokens.
        pictures: pictures of the prompt; None for a model of text.
    """

    key: Hashable
    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int | None = None
    ignore_eos: bool = False
    problem: Example | None = None
    stop_token_ids: tuple[int, ...] = ()
    pictures: PromptPictures | None = None

    @property
    def prompt(self) -> tuple[tuple[int, ...], PromptPictures | None]:
        """What a model reads before it goes on: requests of one prompt can share it."""
        return tuple(self.tokens), self.pictures

    @property
    def written(self) -> Sequence[int]:
        """Tokens with one mark for each picture, for an engine that makes the tokens of pictures itself."""
        pictures = self.pictures
        if pictures is None or not pictures.files:
            return self.tokens
        return [*pictures.written, *self.tokens[pictures.tokens :]]


class Answered(Protocol):
    """A response with what the engine reported of each token: a :class:`Completion`, or several as one."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""

    @property
    def log_probs(self) -> list[float]:
        """The log-probabilities."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; ``"stop"`` at an end token, ``"length"`` at the length bound."""

    @property
    def sampled(self) -> list[bool] | None:
        """Whether the model sampled each token; None if it sampled all."""

    @property
    def record(self) -> EpisodeRecord | None:
        """The record of an episode of several turns."""


@dataclass(frozen=True)
class Completion:
    """One response, or its continuation.

    Attributes:
        token_ids: the response, with its end token if it has one.
        log_probs: log-probability of each token under the distribution it was sampled from, at the sampling
            temperature (at temperature 0: under the unscaled distribution).
        finish_reason: ``"stop"`` at an end token, ``"length"`` at the bound, ``"aborted"`` if it was
            interrupted before either.
        sampled: for each token, whether the model sampled it. In an episode of several turns, the tokens of
            the other messages are not sampled, and their log-probability is 0. None if all are sampled.
        record: record of a finished episode; None for a response of one turn.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    sampled: list[bool] | None = None
    record: EpisodeRecord | None = None


@dataclass(frozen=True)
class Probe:
    """Prompts whose next tokens show which weights an engine holds and how it computes with them.

    Attributes:
        prompts: token ids of N prompts.
        top_k: number K of likeliest next tokens to return.
        shapes: shapes of all published tensors by name; engines compute checksums of these.
        pictures: pictures of each prompt; None for a model of text.
    """

    prompts: Sequence[Sequence[int]]
    top_k: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pictures: Sequence[PromptPictures | None] | None = None

    @property
    def files(self) -> list[Sequence[bytes]] | None:
        """Encoded pictures of each prompt; None for a model of text."""
        return None if self.pictures is None else [each.files if each else () for each in self.pictures]

    def requests(self) -> list[Request]:
        """Return a request for the token after each prompt, at temperature 1."""
        return build_requests(
            self.prompts, Sampling(1, 1, 1.0, [0] * len(self.prompts), pictures=self.pictures)
        )


@dataclass(frozen=True)
class ProbeResult:
    """An engine's likeliest next tokens after each prompt of a :class:`Probe`, and checksums of its weights.

    Attributes:
        token_ids: ``[N, K]`` int64, the K likeliest next tokens.
        log_probs: ``[N, K]`` float32, at temperature 1.
        cached_tokens: number of tokens of the first prompt that came from a prefix cache.
        checksums: checksums of the weights in use, one entry per engine;
            :meth:`Engine.publish` fills them in.
        initial_result: probe result with the weights that the engine was built with. Only the first
            publication has one.
    """

    token_ids: Tensor
    log_probs: Tensor
    cached_tokens: int
    checksums: tuple[Checksums, ...] = ()
    initial_result: ProbeResult | None = None


class Inference(ABC):
    """What training needs from one engine, or from all workers as one.

    Attributes:
        policy_version: version of the weights in use, set by the publisher.
    """

    policy_version: int = 0

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return type(self).__name__

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.num_samples`` completions for each of ``prompts`` (token ids), in order."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""


class Engine(Inference):
    """An engine with its own copy of the weights."""

    _weights_located = False
    # Probe result of the weights that the engine was built with, until a publication returns it.
    _initial_result: ProbeResult | None = None

    @abstractmethod
    def next_tokens(self, probe: Probe) -> ProbeResult:
        """The likeliest next tokens after each prompt of ``probe``.

        They are computed with the same prefix cache that :meth:`generate` uses.
        """

    @abstractmethod
    def start_update(self) -> None:
        """Begin to replace the weights."""

    @abstractmethod
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``(name, tensor)`` pairs under the names of the Hugging Face model; called once or more."""

    @abstractmethod
    def finish_update(self) -> None:
        """End the update. The engine must not compute between :meth:`start_update` and this call."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by ``(name, tensor)`` pairs under the names of the Hugging Face model."""
        self.start_update()
        self.update(weights)
        self.finish_update()

    @abstractmethod
    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find out where the engine keeps published tensors of these names and shapes.

        It runs at the first publication.

        The engine may lose its weights; the caller loads them afterwards.
        """

    @abstractmethod
    def checksums(self) -> tuple[Checksums, ...]:
        """Checksums of the weights that the engine computes with now; one entry per engine."""

    def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        probe: Probe,
    ) -> ProbeResult:
        """Receive the weights of ``version``, load them, and run a probe with them.

        The probe runs as in :meth:`next_tokens`.
        """
        self.prepare(probe)
        self.load_weights(weights)
        return self.prove(version, probe)

    def prepare(self, probe: Probe) -> None:
        """Do what comes before the first update: run the probe, and find out where weights lie."""
        if not self._weights_located:
            self.reset_cache()
            self._initial_result = self.next_tokens(probe)
            self.locate_weights(probe.shapes)
            self._weights_located = True

    def prove(self, version: int, probe: Probe) -> ProbeResult:
        """Run a probe with the weights of ``version``, which have been loaded."""
        self.reset_cache()
        result = self.next_tokens(probe)
        self.policy_version = version
        initial_result, self._initial_result = self._initial_result, None
        return replace(result, checksums=self.checksums(), initial_result=initial_result)

    @abstractmethod
    def reset_cache(self) -> None:
        """Drop all cached keys and values."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of weights and caches; the weights are lost."""

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory again. Weights must be loaded before the next :meth:`generate`."""


class SteppingEngine(Engine):
    """An engine driven token by token, so that responses start and end while others are generated."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests for :meth:`step`. Requests of the same prompt must be adjacent."""

    @abstractmethod
    def step(self) -> list[tuple[Hashable, Completion]]:
        """Sample the next token of the running requests; return those that ended with it."""

    @abstractmethod
    def abort_all(self) -> dict[Hashable, Completion]:
        """Abort every unfinished request and return its tokens so far; weights may then change."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Free what belongs to aborted requests that will not be continued."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.num_samples`` completions for each of ``prompts`` (token ids), in order.

        The engine must hold no other requests.
        """
        requests = build_requests(prompts, sampling)
        self.submit(requests)
        completions: dict[Hashable, Completion] = {}
        while len(completions) < len(requests):
            completions.update(self.step())
        return in_order(completions, len(prompts), sampling.num_samples)


def build_requests(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
    """One request per sample, with key ``("generate", prompt, sample)`` and the sample added to the seed."""
    return [
        Request(
            ("generate", number, sample),
            prompt,
            sampling.max_new_tokens,
            sampling.temperature,
            None if sampling.seeds is None else sampling.seeds[number] + sample,
            sampling.ignore_eos,
            None if sampling.problems is None else sampling.problems[number],
            pictures=None if sampling.pictures is None else sampling.pictures[number],
        )
        for number, prompt in enumerate(prompts)
        for sample in range(sampling.num_samples)
    ]


def in_order(
    completions: Mapping[Hashable, Completion], prompts: int, num_samples: int
) -> list[list[Completion]]:
    """Return the completions of the requests of :func:`build_requests`, prompt by prompt."""
    return [[completions["generate", p, g] for g in range(num_samples)] for p in range(prompts)]
