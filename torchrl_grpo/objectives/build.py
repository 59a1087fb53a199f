"""Build the loss and the advantage transform from ``policy.*``.

A preset of a paper is a choice of these keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives.advantage import GroupAdvantage
from torchrl_grpo.objectives.loss import GroupPolicyLoss


def build_objective(
    cfg: PolicyConfig,
    actor: nn.Module,
    reward_weights: Sequence[float],
    max_new_tokens: int,
    has_proximal_log_probs: bool = True,
) -> tuple[GroupPolicyLoss, GroupAdvantage]:
    """Build the loss around ``actor``, and the replay-buffer transform that computes its advantages.

    Args:
        cfg: configuration of the objective.
        actor: module that scores responses with the trained model, of any kind that :class:`GroupPolicyLoss`
            accepts.
        reward_weights: weights of the rewards in ``("next", "reward_parts")``.
        max_new_tokens: maximum length of a response in tokens.
        has_proximal_log_probs: see :class:`GroupPolicyLoss`.
    """
    constant_length = max_new_tokens if cfg.aggregation_length is None else cfg.aggregation_length
    loss = GroupPolicyLoss(
        actor, cfg, constant_length=constant_length, has_proximal_log_probs=has_proximal_log_probs
    )
    if not isinstance(actor, TensorDictModuleBase):
        actor.entropy_gradient = loss.entropy.in_use  # type: ignore[assignment]
    return loss, GroupAdvantage(cfg, loss.kl, reward_weights, max_new_tokens)
