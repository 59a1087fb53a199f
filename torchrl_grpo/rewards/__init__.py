"""Rewards for training and graders for evaluation. They map text to a score.

:func:`build_reward_set` and :func:`build_grader` create them from a configuration.
``python -m torchrl_grpo.rewards`` scores stored completions. The package does not import torch.
"""

from __future__ import annotations

from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.registry import (
    build_grader,
    build_reward_set,
    check_weights,
    eval_reward_name,
    grader_name,
    grader_of_run,
    of_run,
)
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet
from torchrl_grpo.rewards.types import Grader, ResponseScore, Reward

__all__ = [
    "CountingGrader",
    "Grader",
    "MixtureRewardSet",
    "ResponseScore",
    "Reward",
    "RewardSet",
    "build_grader",
    "build_reward_set",
    "check_weights",
    "eval_reward_name",
    "grader_name",
    "grader_of_run",
    "of_run",
]
