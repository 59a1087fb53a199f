"""Graders of completions in evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.gsm8k import grade_answer
from torchrl_grpo.rewards.reward_set import (
    MixtureRewardSet,
    RewardSet,
    close_all,
    error_text,
    excerpt,
    read_result,
)
from torchrl_grpo.rewards.types import Grader, ResponseScore, Reward

_log = logging.getLogger(__name__)

# Metric of a reward that may give any number.
ANY_NUMBER = "primary"
# Metric of held-out solutions that no reward grades.
LOSS = "loss"


class Gsm8kGrader:
    """``strict`` and ``flexible``; see :mod:`torchrl_grpo.rewards.gsm8k`."""

    primary = "flexible"
    metrics: tuple[str, ...] = ("strict", "flexible")

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return ``strict`` and ``flexible``, each 0 or 1."""
        return grade_answer(completion, example.truth["answer"])

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1 for both metrics."""
        return dict.fromkeys(self.metrics, 1.0)

    def close(self) -> None:
        """Nothing to stop."""


class AccuracyGrader:
    """``accuracy``: 1 if a reward gives at least the threshold, else 0.

    Args:
        reward: reward that grades. If it returns a mapping, the ``"score"`` counts.
        owned: whether closing the grader closes the reward.
        threshold: least value of a right answer.
    """

    primary = "accuracy"
    metrics: tuple[str, ...] = ("accuracy",)

    def __init__(self, reward: Reward, owned: bool = True, threshold: float = 1.0) -> None:
        self._reward, self._owned, self._threshold = reward, owned, threshold

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return ``accuracy``, 0 or 1.

        Raises:
            Exception: the reward failed.
        """
        value, _ = read_result(self._reward(completion, example))
        return {"accuracy": float(value >= self._threshold)}

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1."""
        return {"accuracy": 1.0}

    def close(self) -> None:
        """Close the reward if the grader owns it."""
        if self._owned:
            close_all([self._reward])


class OwnRewardGrader:
    """Reads what a reward of the user gave: its value as :data:`ANY_NUMBER`, or ``accuracy``.

    Args:
        name: name of the reward in the scores.
        threshold: least value of a right answer; None if the value itself is the metric.
        is_judge: whether a failure says nothing about the response, which then has no grade.
    """

    def __init__(self, name: str, threshold: float | None, is_judge: bool = False) -> None:
        self._name, self._threshold, self._is_judge = name, threshold, is_judge
        self.primary = ANY_NUMBER if threshold is None else "accuracy"
        self.metrics: tuple[str, ...] = (self.primary,)

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return the value, or with a threshold 0 or 1; nothing if the reward is a judge that failed.

        A response whose reward failed is never right.
        """
        if self._is_judge and self._name in score.errors:
            return {}
        value = score.parts[self._name]
        if self._threshold is not None:
            value = float(value >= self._threshold and self._name not in score.errors)
        return {self.primary: value}

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1."""
        return {self.primary: 1.0}

    def close(self) -> None:
        """Nothing to stop."""


class NoGrader:
    """Grades nothing: the loss of the solutions is measured instead."""

    primary = LOSS
    metrics: tuple[str, ...] = ()

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return no metric."""
        return {}

    def weights(self, example: Example) -> dict[str, float]:
        """Return no weight."""
        return {}

    def close(self) -> None:
        """Nothing to stop."""


class MixtureGrader:
    """``accuracy`` over all parts of a mixture, and ``<part>/accuracy`` of each.

    Both count the primary metric of the part's own grader. If one of them is a reward that may give any
    number, they are called :data:`ANY_NUMBER`.

    Args:
        graders: graders of the parts, by their names.
    """

    def __init__(self, graders: Mapping[str, Grader]) -> None:
        self._graders = dict(graders)
        any_number = any(grader.primary == ANY_NUMBER for grader in graders.values())
        self.primary = ANY_NUMBER if any_number else "accuracy"
        self.metrics = (self.primary, *(f"{part}/{self.primary}" for part in graders))

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return the grade under the two names that the example counts for, and 0 for the others.

        It is nothing if the grader of the part gives none.

        Raises:
            Exception: the grader failed.
        """
        grader = self._graders[example.part]
        value = grader.grade(completion, example, score).get(grader.primary)
        if value is None:
            return {}
        return {name: value * weight for name, weight in self.weights(example).items()}

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1 for the two metrics of the example, and 0 for the others."""
        own = (self.primary, f"{example.part}/{self.primary}")
        return {name: float(name in own) for name in self.metrics}

    def close(self) -> None:
        """Close the graders."""
        for grader in self._graders.values():
            grader.close()


@dataclass(frozen=True)
class Graded:
    """The grades of one completion.

    Attributes:
        metrics: value of each metric of the grader; empty if a judge that grades has failed.
        score: what the run's rewards gave; empty if none of them is the user's.
        errors: what failed -> message. It is a reward, or ``grader``.
    """

    metrics: dict[str, float]
    score: ResponseScore = field(default_factory=lambda: ResponseScore(0.0))
    errors: dict[str, str] = field(default_factory=dict)


class CountingGrader:
    """Wrap a grader so that its errors do not stop an evaluation.

    An error is counted in ``error_count``, logged with the completion, and graded 0.

    Args:
        inner: grader that does the work.
        rewards: rewards that score what is graded, closed with the grader; None without rewards of the user.
        name: what grades, for the user.
        notes: what the user should know about it.
        workers: number of completions that are graded at a time.
    """

    def __init__(
        self,
        inner: Grader,
        rewards: RewardSet | MixtureRewardSet | None = None,
        name: str = "",
        notes: Sequence[str] = (),
        workers: int = 1,
    ) -> None:
        self._inner = inner
        self._rewards = rewards
        self.name = name
        self.notes = tuple(notes)
        self._workers = workers
        self.primary = inner.primary
        self.metrics = inner.metrics
        self.error_count = 0

    def grade(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Graded]:
        """Grade each completion of its own example.

        If grading fails, all metrics are 0. If a reward fails, it counts as ``reward.on_error``.
        """
        if self._rewards is None:
            scores = [ResponseScore(0.0)] * len(completions)
        else:
            scores = self._rewards.score(completions, examples)
        if self._workers == 1:
            grades = list(map(self._grade, completions, examples, scores))
        else:
            with ThreadPoolExecutor(self._workers, "grading") as threads:
                grades = list(threads.map(self._grade, completions, examples, scores))
        self.error_count += sum(bool(grade.errors) for grade in grades)
        return grades

    def _grade(self, completion: str, example: Example, score: ResponseScore) -> Graded:
        try:
            return Graded(self._inner.grade(completion, example, score), score, score.errors)
        except Exception as error:  # noqa: BLE001  a grader may be user code, as in RewardSet
            message = error_text(error)
            _log.warning(
                "grading of %s failed, so it counts as wrong: %s; completion: %s",
                example.id, message, excerpt(completion), extra={"fold": "grading"},
            )  # fmt: skip
            return Graded(dict.fromkeys(self.metrics, 0.0), score, {**score.errors, "grader": message})

    def weights(self, example: Example) -> dict[str, float]:
        """Return the weight of this example in the mean of each metric."""
        return self._inner.weights(example)

    def close(self) -> None:
        """Close the grader and the rewards."""
        self._inner.close()
        if self._rewards is not None:
            self._rewards.close()
