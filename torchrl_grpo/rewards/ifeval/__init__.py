"""IFEval (arXiv 2311.07911): 25 kinds of verifiable instruction, checked strictly and loosely."""

from __future__ import annotations

from torchrl_grpo.rewards.ifeval.reward import IFEvalGrader, IFEvalReward

__all__ = ["IFEvalGrader", "IFEvalReward"]
