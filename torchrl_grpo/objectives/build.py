"""From ``policy.*`` to a loss and an advantage. A preset of a paper is a set of keys over these parts."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_grpo.config.derived import kl_start
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives.advantage import GroupAdvantage
from torchrl_grpo.objectives.coefficients import EntropyCoefficient, KLCoefficient
from torchrl_grpo.objectives.loss import GroupPolicyLoss


def build_objective(
    cfg: PolicyConfig,
    actor: nn.Module,
    reward_weights: Sequence[float],
    max_new_tokens: int,
    proximal_given: bool = True,
) -> tuple[GroupPolicyLoss, GroupAdvantage]:
    """The loss around ``actor`` and the write-side transform that computes its advantages.

    Args:
        cfg: the ingredients.
        actor: scores responses with the model that is trained; what it may be, :class:`GroupPolicyLoss` says.
        reward_weights: of the rewards in ``("next", "reward_parts")``.
        max_new_tokens: length bound of a response.
        proximal_given: see :class:`GroupPolicyLoss`.
    """
    kl = KLCoefficient(kl_start(cfg), cfg.kl_target, cfg.kl_horizon)
    entropy = EntropyCoefficient(
        cfg.entropy_coef, cfg.entropy_target, cfg.entropy_delta, cfg.entropy_coef_max
    )
    if not isinstance(actor, TensorDictModuleBase):
        actor.entropy_gradient = entropy.in_use  # type: ignore[assignment]
    constant_length = max_new_tokens if cfg.aggregation_length is None else cfg.aggregation_length
    loss = GroupPolicyLoss(
        actor,
        cfg,
        kl=kl,
        entropy=entropy,
        constant_length=constant_length,
        proximal_given=proximal_given,
    )
    return loss, GroupAdvantage(cfg, kl, reward_weights, max_new_tokens)
