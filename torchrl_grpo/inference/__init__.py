"""One protocol, several engines that generate responses and load new weights while they run."""

from torchrl_grpo.inference.protocol import Completion, Engine, Probe, ProbeResult, Request, Sampling

__all__ = ["Completion", "Engine", "Probe", "ProbeResult", "Request", "Sampling"]
