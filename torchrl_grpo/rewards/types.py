"""The two shapes of this package: a reward for training and a grader for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torchrl_grpo.data.example import Example


class Reward(Protocol):
    """Text in, score out. Must be safe to call from several threads at once.

    Attributes:
        name: the name it has in ``reward.weights`` and in the logs.
    """

    name: str

    def __call__(self, completion: str, example: Example) -> float | Mapping[str, float]:
        """Score one completion.

        Args:
            completion: what the model wrote.
            example: the problem.

        Returns:
            A number, or named parts of which ``"score"`` is the one that is weighted; the others are logged
            apart as ``<name>/<part>``.

        Raises:
            Exception: whatever went wrong; :class:`~torchrl_grpo.rewards.RewardSet` counts and logs it.
        """
        ...


class Grader(Protocol):
    """Judges a completion for evaluation: right or wrong, by one or more measures."""

    # Properties, so that a constant of a class fits as well as an attribute of an instance.
    @property
    def primary(self) -> str:
        """The metric that stands for the data set."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics, in the order they are shown."""
        ...

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """A value in [0, 1] for each metric; 0 or 1 unless the metric is a mean over parts of an example.

        Raises:
            Exception: whatever went wrong; :class:`~torchrl_grpo.rewards.graders.CountingGrader` counts and
                logs it.
        """
        ...

    def weights(self, example: Example) -> dict[str, float]:
        """The weight of this example in the mean of each metric; all 1.0 where examples count alike."""
        ...

    def close(self) -> None:
        """Stop what the grader started. It may be called twice."""
        ...


@dataclass(frozen=True)
class Scored:
    """What a completion earned.

    Attributes:
        total: the weighted sum.
        parts: each reward's own value by name, unweighted, and its parts as ``<name>/<part>``.
        errors: reward name -> message, for rewards that raised; each counted ``reward.on_error`` instead.
    """

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
