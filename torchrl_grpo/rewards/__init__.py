"""Rewards for training and graders for evaluation. They map text to a score.

:func:`build` and :func:`grader` create them from a configuration. ``python -m torchrl_grpo.rewards`` scores
stored completions. The package does not import torch.
"""

from __future__ import annotations

from torchrl_grpo.rewards.registry import DEFAULT_WEIGHTS, REWARDS, build, check_weights, grader, judge
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.types import Grader, Reward, Scored

__all__ = [
    "DEFAULT_WEIGHTS",
    "REWARDS",
    "Grader",
    "Reward",
    "RewardSet",
    "Scored",
    "build",
    "check_weights",
    "grader",
    "judge",
]
