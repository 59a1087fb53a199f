"""Group-relative advantages, computed once on the way into the replay buffer."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_grpo.objectives.kl import kl_estimate


def group_advantage(rewards: Tensor, std: str, eps: float) -> Tensor:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` within each group (GRPO, arXiv 2402.03300, sec. 4.1.2).

    Args:
        rewards: ``[P, G]``, one group a row.
        std: ``population`` (divides by G), ``unbiased`` (by G - 1) or ``none`` (no division).
        eps: added to the standard deviation.

    Returns:
        ``[P, G]``. A group of equal rewards gets exactly zero.

    Raises:
        ValueError: another name for ``std``.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    # The mean of equal floats can differ from them in the last bit, and a tiny std would blow that up.
    constant = (rewards == rewards[:, :1]).all(-1, keepdim=True)
    if std not in ("population", "unbiased", "none"):
        raise ValueError(f"advantage std {std!r} is none of population, unbiased, none")
    if std != "none":
        scale = rewards.std(-1, keepdim=True, correction=int(std == "unbiased"))
        centred = centred / (scale + eps)
    return centred.masked_fill(constant, 0.0)


class GroupAdvantage(Transform):
    """Write-side transform: ``("next", "reward")`` ``[P, G, 1]`` to ``"advantage"`` ``[P, G, 1]``.

    TorchRL's ``MCAdvantage`` queues single answers until a group is complete; groups arrive whole here.

    Args:
        std: see :func:`group_advantage`.
        eps: see :func:`group_advantage`.
        kl_coef: what a nat of KL to the reference costs; used where the penalty is part of the reward.
        kl_estimator: see :func:`~torchrl_grpo.objectives.kl.kl_estimate`.
    """

    def __init__(self, std: str, eps: float, kl_coef: float = 0.0, kl_estimator: str = "k1") -> None:
        super().__init__()
        self.std = std
        self.eps = eps
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reading changes nothing."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        rewards = tensordict["next", "reward"].squeeze(-1)
        if self.kl_coef != 0:
            per_token = kl_estimate(
                tensordict["log_probs", "response"], tensordict["log_probs", "reference"], self.kl_estimator
            )
            rewards = rewards - self.kl_coef * (per_token * tensordict["masks", "response"]).sum(-1)
        advantage = group_advantage(rewards.to(torch.float32), self.std, self.eps)
        return tensordict.set("advantage", advantage.unsqueeze(-1))
