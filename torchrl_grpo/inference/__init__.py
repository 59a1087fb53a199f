"""One protocol, several engines that generate responses and take new weights while they run."""

from torchrl_grpo.inference.protocol import Completion, Engine, NextTokens, Probe, Request, Sampling

__all__ = ["Completion", "Engine", "NextTokens", "Probe", "Request", "Sampling"]
