"""Right or wrong, for evaluation: one grader for each way to judge."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from torchrl_grpo.data.example import Example
from torchrl_grpo.rewards.gsm8k import judge
from torchrl_grpo.rewards.reward_set import close_all, excerpt
from torchrl_grpo.rewards.types import Grader, Reward

_log = logging.getLogger(__name__)


class Gsm8kGrader:
    """``strict`` and ``flexible``; see :mod:`torchrl_grpo.rewards.gsm8k`."""

    primary = "flexible"
    metrics: tuple[str, ...] = ("strict", "flexible")

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """Both, 0 or 1."""
        return judge(completion, example.truth["answer"])

    def weights(self, example: Example) -> dict[str, float]:
        """Examples count alike."""
        return dict.fromkeys(self.metrics, 1.0)

    def close(self) -> None:
        """Nothing to stop."""


class AccuracyGrader:
    """``accuracy``: 1 where a reward gives its full score of 1, else 0.

    Args:
        reward: the reward that judges; it returns a plain number.
        owned: whether the reward is closed with the grader.
    """

    primary = "accuracy"
    metrics: tuple[str, ...] = ("accuracy",)

    def __init__(self, reward: Reward, owned: bool = True) -> None:
        self._reward, self._owned = reward, owned

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """0 or 1.

        Raises:
            Exception: what the reward raises.
        """
        score = self._reward(completion, example)
        assert not isinstance(score, Mapping)
        return {"accuracy": float(score >= 1.0)}

    def weights(self, example: Example) -> dict[str, float]:
        """Examples count alike."""
        return {"accuracy": 1.0}

    def close(self) -> None:
        """Close the reward if it is the grader's own."""
        if self._owned:
            close_all([self._reward])


class CountingGrader:
    """A grader whose errors do not end an evaluation: they are counted, logged with the completion, and
    graded 0.

    Args:
        inner: the grader that does the work.
    """

    def __init__(self, inner: Grader) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.primary = inner.primary
        self.metrics = inner.metrics
        self.error_count = 0

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """A value in [0, 1] for each metric, or all 0 and one more error where grading fails."""
        try:
            return self._inner.grade(completion, example)
        except Exception as error:  # noqa: BLE001  anybody's code, as in RewardSet
            with self._lock:
                self.error_count += 1
            _log.warning(
                "grading of %s failed and counts as wrong: %s: %s; completion: %s",
                example.id, type(error).__name__, error, excerpt(completion),
            )  # fmt: skip
            return dict.fromkeys(self.metrics, 0.0)

    def weights(self, example: Example) -> dict[str, float]:
        """The weight of this example in the mean of each metric."""
        return self._inner.weights(example)

    def close(self) -> None:
        """Close the grader."""
        self._inner.close()
