"""Text in, score out: the rewards of training and the graders of evaluation. Imports no torch.

:func:`build` and :func:`grader` read a configuration; ``python -m torchrl_grpo.rewards`` scores stored
completions.
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
