"""IFEval (arXiv 2311.07911): strict and loose checks of 25 types of verifiable instructions."""

from __future__ import annotations

from torchrl_grpo.rewards.ifeval.reward import IFEvalGrader, IFEvalReward

__all__ = ["IFEvalGrader", "IFEvalReward"]
