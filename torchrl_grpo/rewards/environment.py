"""The reward that the environment of an episode gave."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example


class EnvironmentReward:
    """The sum of the rewards that the environment returned in an episode."""

    name = "environment"

    def __call__(self, completion: str, example: Example) -> float:
        """Return the sum.

        Raises:
            ValueError: the completion is no episode.
            RuntimeError: the environment failed.
        """
        record = completion.record if isinstance(completion, ResponseText) else None
        if record is None:
            raise ValueError("a completion outside an episode has no reward of an environment")
        if record.error is not None:
            raise RuntimeError(record.error)
        return record.reward


def build(cfg: Config) -> EnvironmentReward:
    """Return the reward. It reads no key."""
    return EnvironmentReward()
