"""From ``policy.*`` to a loss and an advantage. A preset of a paper is a set of keys over these parts."""

from __future__ import annotations

from torchrl_grpo.config import PolicyConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.objectives.advantage import GroupAdvantage
from torchrl_grpo.objectives.clipped import ClippedGroupLoss

PRESETS = ("grpo",)


def build_objective(cfg: PolicyConfig, actor: TokenScorer) -> tuple[ClippedGroupLoss, GroupAdvantage]:
    """The loss around ``actor`` and the write-side transform that computes its advantages.

    Raises:
        ConfigError: there is no preset of this name.
    """
    if cfg.name not in PRESETS:
        raise ConfigError(f"policy.name={cfg.name}: no such objective; write one of {', '.join(PRESETS)}")
    in_loss = cfg.kl_in == "loss"
    loss = ClippedGroupLoss(
        actor,
        clip_epsilon_low=cfg.clip_epsilon,
        clip_epsilon_high=cfg.clip_epsilon if cfg.clip_epsilon_high is None else cfg.clip_epsilon_high,
        kl_coef=cfg.kl_coef if in_loss else 0.0,
        kl_estimator=cfg.kl_estimator,
    )
    advantage = GroupAdvantage(
        cfg.advantage_std,
        cfg.advantage_eps,
        kl_coef=0.0 if in_loss else cfg.kl_coef,
        kl_estimator=cfg.kl_estimator,
    )
    return loss, advantage
