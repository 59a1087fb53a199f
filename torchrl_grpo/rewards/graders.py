"""Graders of completions in evaluation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.gsm8k import grade_answer
from torchrl_grpo.rewards.reward_set import close_all, excerpt, read_result
from torchrl_grpo.rewards.types import Grader, Reward

_log = logging.getLogger(__name__)


class Gsm8kGrader:
    """``strict`` and ``flexible``; see :mod:`torchrl_grpo.rewards.gsm8k`."""

    primary = "flexible"
    metrics: tuple[str, ...] = ("strict", "flexible")

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """Return ``strict`` and ``flexible``, each 0 or 1."""
        return grade_answer(completion, example.truth["answer"])

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1 for both metrics."""
        return dict.fromkeys(self.metrics, 1.0)

    def close(self) -> None:
        """Nothing to stop."""


class AccuracyGrader:
    """``accuracy``: 1 if a reward gives its full score of 1, else 0.

    Args:
        reward: reward that grades. If it returns a mapping, the ``"score"`` counts.
        owned: whether closing the grader closes the reward.
    """

    primary = "accuracy"
    metrics: tuple[str, ...] = ("accuracy",)

    def __init__(self, reward: Reward, owned: bool = True) -> None:
        self._reward, self._owned = reward, owned

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """Return ``accuracy``, 0 or 1.

        Raises:
            Exception: the reward failed.
        """
        score, _ = read_result(self._reward(completion, example))
        return {"accuracy": float(score >= 1.0)}

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1."""
        return {"accuracy": 1.0}

    def close(self) -> None:
        """Close the reward if the grader owns it."""
        if self._owned:
            close_all([self._reward])


class MixtureGrader:
    """``accuracy`` over all parts of a mixture, and ``<part>/accuracy`` of each.

    Both count the primary metric of the part's own grader.

    Args:
        graders: graders of the parts, by their names.
    """

    primary = "accuracy"

    def __init__(self, graders: Mapping[str, Grader]) -> None:
        self._graders = dict(graders)
        self.metrics = ("accuracy", *(f"{part}/accuracy" for part in graders))

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """Return the grade under the two names that the example counts for, and 0 for the others.

        Raises:
            Exception: the grader failed.
        """
        grader = self._graders[example.part]
        value = grader.grade(completion, example)[grader.primary]
        return {name: value * weight for name, weight in self.weights(example).items()}

    def weights(self, example: Example) -> dict[str, float]:
        """Return weight 1 for the two metrics of the example, and 0 for the others."""
        own = ("accuracy", f"{example.part}/accuracy")
        return {name: float(name in own) for name in self.metrics}

    def close(self) -> None:
        """Close the graders."""
        for grader in self._graders.values():
            grader.close()


class CountingGrader:
    """Wrap a grader so that its errors do not stop an evaluation.

    An error is counted in ``error_count``, logged with the completion, and graded 0.

    Args:
        inner: grader that does the work.
    """

    def __init__(self, inner: Grader) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.primary = inner.primary
        self.metrics = inner.metrics
        self.error_count = 0

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """Return a value in [0, 1] for each metric. If grading fails, return 0 for all and count an error."""
        try:
            return self._inner.grade(completion, example)
        except Exception as error:  # noqa: BLE001  a grader may be user code, as in RewardSet
            with self._lock:
                self.error_count += 1
            _log.warning(
                "grading of %s failed, so it counts as wrong: %s: %s; completion: %s",
                example.id, type(error).__name__, error, excerpt(completion),
            )  # fmt: skip
            return dict.fromkeys(self.metrics, 0.0)

    def weights(self, example: Example) -> dict[str, float]:
        """Return the weight of this example in the mean of each metric."""
        return self._inner.weights(example)

    def close(self) -> None:
        """Close the grader."""
        self._inner.close()
