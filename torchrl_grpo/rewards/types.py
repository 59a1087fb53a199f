"""The two interfaces of this package: a reward for training and a grader for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torchrl_grpo.data.example import Example


@dataclass(frozen=True)
class Verdict:
    """What a judge said about a completion.

    Attributes:
        score: value of the reward.
        text: the judge's own words, for ``rollouts.jsonl``.
        components: further numbers, which are logged as ``<name>/<part>``.
    """

    score: float
    text: str
    components: Mapping[str, float] = field(default_factory=dict)


class NoVerdict(Exception):
    """A judge failed. That says nothing about the completion, so ``reward.on_error`` does not count for it.

    Args:
        message: what went wrong.
        stand_in: value that counts in place of the score, usually the mean of the group's other responses,
            which leaves the judge without influence on this one. None if the judge failed on the whole
            group; it then counts for none of them.
    """

    def __init__(self, message: str, stand_in: float | None = None) -> None:
        super().__init__(message)
        self.stand_in = stand_in


#: What a reward returns for a completion.
Result = float | Mapping[str, float] | Verdict


class Reward(Protocol):
    """Scores a completion. It must be thread-safe.

    Attributes:
        name: name of the reward in ``reward.weights`` and in the logs.
    """

    name: str

    def __call__(self, completion: str, example: Example) -> Result:
        """Score one completion.

        Args:
            completion: text that the model wrote, with special tokens but without its end token. It begins
                with the tags that the prompt has opened, such as ``<think>``
                (:class:`~torchrl_grpo.data.episode.ResponseText`).
            example: problem that the completion answers.

        Returns:
            A number, or a mapping of named numbers. Its ``"score"`` is weighted. The others are components of
            the reward, which are logged as ``<name>/<part>``. A judge returns a :class:`Verdict`.

        Raises:
            Exception: any failure. :class:`~torchrl_grpo.rewards.reward_set.RewardSet` counts and logs it.
        """
        ...


@runtime_checkable
class BatchReward(Protocol):
    """Scores the responses to one prompt in one call, for example relative to each other.

    Attributes:
        name: name of the reward in ``reward.weights`` and in the logs.
    """

    name: str

    def score_batch(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[Result | Exception]:
        """Score completions, each the answer to its own example.

        Returns:
            For each completion what :meth:`Reward.__call__` returns, or the exception that it would raise.

        Raises:
            Exception: any failure. It counts for each of the completions.
        """
        ...


@runtime_checkable
class WaitingReward(BatchReward, Protocol):
    """A reward that waits for answers from elsewhere, so that several groups should wait at a time.

    Attributes:
        parallel_calls: number of calls of ``score_batch`` that run in parallel, whatever ``reward.workers``.
    """

    parallel_calls: int


@runtime_checkable
class JoinedReward(BatchReward, Protocol):
    """A batch reward whose calls may have the responses to several prompts.

    Attributes:
        prompts_per_call: largest number of prompts of a call.
    """

    prompts_per_call: int


class Grader(Protocol):
    """Judges the correctness of a completion in evaluation, by one or more metrics."""

    # Declared as properties, so that both class constants and instance attributes satisfy the protocol.
    @property
    def primary(self) -> str:
        """The main metric of the data set."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics, in display order."""
        ...

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return a value for each metric: 0 or 1, unless the metric averages parts of an example, or rewards.

        Nothing is returned for a completion that a judge failed on, which then counts in no mean.

        Args:
            completion: text that the model wrote.
            example: problem that the completion answers.
            score: what the rewards gave for it; empty if they were not asked.

        Raises:
            Exception: any failure. :class:`~torchrl_grpo.rewards.graders.CountingGrader` counts and logs it.
        """
        ...

    def weights(self, example: Example) -> dict[str, float]:
        """Return the weight of this example in the mean of each metric. The usual weight is 1.0."""
        ...

    def close(self) -> None:
        """Stop the grader's workers. It may be called twice."""
        ...


@dataclass(frozen=True)
class ResponseScore:
    """The score of a completion.

    Attributes:
        total: weighted sum of the rewards.
        parts: unweighted value of each reward by name, and its components as ``<name>/<part>``.
        errors: reward name -> message for rewards that raised. Each of them counted as ``reward.on_error``,
            or as :class:`NoVerdict` says; it is not in ``parts`` if it did not count.
        verdicts: reward name -> words of a judge.
    """

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
